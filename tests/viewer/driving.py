"""The viewer as a user has it: keys in, text on the screen out."""

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
from toolroll.viewer.browse import BrowseScreen
from toolroll.viewer.sample_pane import SamplePane

NARROW, WIDE = (80, 24), (160, 48)
CELL = 12.2
"""The width of a character in textual's pictures."""
PIECE = re.compile(r'<text class="[^"]*" x="([\d.]+)" y="[\d.]+"[^>]*clip-path="url\([^)]*line-(\d+)\)">([^<]*)</text>')
SCROLLBAR = re.compile("[▁▂▃▄▅▆▇]")
"""The ends of scroll bars."""


class Viewer(RolloutViewer):
    """The viewer, with what it said in passing."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.told: list[str] = []

    def notify(self, message: str, **settings: Any) -> None:
        """Say something in passing."""
        self.told.append(message)
        super().notify(message, **settings)


class User:
    """Somebody at the keyboard."""

    def __init__(self, app: Viewer, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        """Press keys, and wait until all is done that they set off."""
        await self.pilot.press(*keys)
        await self.settle()
        await self.pilot.pause()

    async def sees(self, *texts: str) -> None:
        """What the screen has to show, soon."""
        deadline = time.monotonic() + 5
        while not all(text in self.text for text in texts):
            assert time.monotonic() < deadline, f"{texts} not in\n{self.text}"
            await self.pilot.pause()

    async def type(self, text: str) -> None:
        """Put a text where the cursor is, as one does who pastes it."""
        self.app.post_message(Paste(text))
        await self.pilot.pause()

    async def settle(self) -> None:
        """Wait for the threads, and for what they have to say."""
        while any(not worker.is_finished for worker in self.app.workers):
            await self.app.workers.wait_for_complete()
            await self.pilot.pause()

    async def still(self) -> None:
        """Wait until the screen is laid out: until it looks the same three times in a row."""
        seen: list[list[str]] = []
        deadline = time.monotonic() + 5
        while len(seen) < 3 or seen[-3:] != [self.lines] * 3:
            assert time.monotonic() < deadline, f"the screen keeps changing:\n{self.text}"
            await self.pilot.pause(0.02)
            seen.append(self.lines)

    async def look(self) -> None:
        """Have the directory looked at now."""
        self.browse.background.look()
        await self.settle()
        await self.pilot.pause()

    @property
    def browse(self) -> BrowseScreen:
        """The first screen."""
        screen = self.app.screen_stack[0]
        assert isinstance(screen, BrowseScreen)
        return screen

    @property
    def pane(self) -> SamplePane:
        """The sample."""
        return self.browse.pane

    @property
    def told(self) -> str:
        """What was last said in passing."""
        return self.app.told[-1] if self.app.told else ""

    @property
    def lines(self) -> list[str]:
        """What is on the screen, line by line."""
        return screen_lines(self.app.export_screenshot(), self.app.size.height)

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(self.lines)

    @property
    def title(self) -> str:
        """The first line."""
        return self.lines[0].strip()

    @property
    def scores(self) -> list[str]:
        """The scores that are listed, as they are written."""
        listed = self.browse.listing
        found = [listed[row].step.column("score")[listed[row].row] for row in range(len(listed))]
        return [f"{score:g}" if score is not None else "–" for score in found]


def screen_lines(picture: str, height: int) -> list[str]:
    """The text of a picture of the screen. A picture is what textual's public interface gives."""
    lines: list[dict[int, str]] = [{} for _ in range(height)]
    for x, line, text in PIECE.findall(picture):
        lines[int(line)][round(float(x) / CELL)] = html.unescape(text).replace("\xa0", " ").rstrip("\n")
    made = []
    for pieces in lines:
        made.append("")
        for column, text in sorted(pieces.items()):
            made[-1] = made[-1].ljust(column) + text
    return [SCROLLBAR.sub("", line).rstrip() for line in made]


@asynccontextmanager
async def viewing(directory: Path, size: tuple[int, int] = NARROW, **settings: Any) -> AsyncIterator[User]:
    """Open a directory."""
    app = Viewer(directory, **{"every": 3600.0, **settings})
    async with app.run_test(size=size, notifications=True) as pilot:
        user = User(app, pilot)
        await user.settle()
        await user.still()
        yield user
