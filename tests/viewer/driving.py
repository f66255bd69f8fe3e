"""Drive the viewer like a user: press keys, read the text on the screen."""

import html
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.events import Paste
from textual.pilot import Pilot

from toolroll.viewer.app import RolloutViewer
from toolroll.viewer.screens.browse import BrowseScreen
from toolroll.viewer.widgets.sample_pane import SamplePane

NARROW, WIDE = (80, 24), (160, 48)
WAIT_S = 60.0
"""Timeout for what the screen should show, after which a test fails."""
CELL = 12.2
"""Width of a character in Textual's screenshots."""
PIECE = re.compile(r'<text class="[^"]*" x="([\d.]+)" y="[\d.]+"[^>]*clip-path="url\([^)]*line-(\d+)\)">([^<]*)</text>')
SCROLLBAR = re.compile("[▁▂▃▄▅▆▇]")
"""Ends of scroll bars."""


class Viewer(RolloutViewer):
    """The viewer, with a record of its notifications."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.notifications: list[str] = []

    def notify(self, message: str, **settings: Any) -> None:
        """Record and show a notification."""
        self.notifications.append(message)
        super().notify(message, **settings)


class User:
    """A user at the keyboard."""

    def __init__(self, app: Viewer, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        """Press keys and wait until their effects are complete."""
        await self.pilot.press(*keys)
        await self.settle()
        await self.pilot.pause()

    async def sees(self, *texts: str) -> None:
        """Wait until the screen shows all texts."""
        deadline = time.monotonic() + WAIT_S
        while not all(text in self.text for text in texts):
            assert time.monotonic() < deadline, f"{texts} not in\n{self.text}"
            await self.pilot.pause()

    async def type(self, text: str) -> None:
        """Paste a text at the cursor."""
        self.app.post_message(Paste(text))
        await self.pilot.pause()

    async def settle(self) -> None:
        """Wait for the background threads and their messages."""
        while any(not worker.is_finished for worker in self.app.workers):
            await self.app.workers.wait_for_complete()
            await self.pilot.pause()

    async def still(self) -> None:
        """Wait until the layout is complete: until three screenshots in a row are the same."""
        seen: list[list[str]] = []
        deadline = time.monotonic() + WAIT_S
        while len(seen) < 3 or seen[-3:] != [self.lines] * 3:
            assert time.monotonic() < deadline, f"the screen keeps changing:\n{self.text}"
            await self.pilot.pause(0.02)
            seen.append(self.lines)

    async def look(self) -> None:
        """Check the directory for changes now."""
        self.browse.background.poll_directory()
        await self.settle()
        await self.pilot.pause()

    @property
    def browse(self) -> BrowseScreen:
        """The main screen."""
        screen = self.app.screen_stack[0]
        assert isinstance(screen, BrowseScreen)
        return screen

    @property
    def pane(self) -> SamplePane:
        """The pane of the sample."""
        return self.browse.pane

    @property
    def notification(self) -> str:
        """The last notification."""
        return self.app.notifications[-1] if self.app.notifications else ""

    @property
    def lines(self) -> list[str]:
        """Lines of the screen."""
        return screen_lines(self.app.export_screenshot(), self.app.size.height)

    @property
    def text(self) -> str:
        """Text of the screen."""
        return "\n".join(self.lines)

    @property
    def title(self) -> str:
        """First line of the screen."""
        return self.lines[0].strip()

    @property
    def scores(self) -> list[str]:
        """Scores of the listed samples, as displayed."""
        listed = self.browse.navigator.listing
        found = [listed[row].step.column("score")[listed[row].row] for row in range(len(listed))]
        return [f"{score:g}" if score is not None else "–" for score in found]


def screen_lines(picture: str, height: int) -> list[str]:
    """Return the lines of text in an SVG screenshot, which is the only form that Textual's public API offers."""
    lines: list[dict[int, str]] = [{} for _ in range(height)]
    for x, line, text in PIECE.findall(picture):
        lines[int(line)][round(float(x) / CELL)] = html.unescape(text).replace("\xa0", " ").rstrip("\n")
    texts = []
    for pieces in lines:
        texts.append("")
        for column, text in sorted(pieces.items()):
            texts[-1] = texts[-1].ljust(column) + text
    return [SCROLLBAR.sub("", line).rstrip() for line in texts]


@asynccontextmanager
async def viewing(directory: Path, size: tuple[int, int] = NARROW, **settings: Any) -> AsyncIterator[User]:
    """Open a directory in the viewer."""
    app = Viewer(directory, **{"refresh_interval_s": 3600.0, **settings})
    async with app.run_test(size=size, notifications=True) as pilot:
        user = User(app, pilot)
        await user.settle()
        await user.still()
        yield user
