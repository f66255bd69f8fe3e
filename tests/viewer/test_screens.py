"""Snapshots of the screens, stored as text in screens/. Set UPDATE_SCREENS=1 to update them."""

import os
import re
from pathlib import Path

import pytest

from viewer.driving import NARROW, WIDE, User, viewing

pytestmark = pytest.mark.viewer

SNAPSHOTS = Path(__file__).parent / "screens"
DIRECTORY = re.compile(r"(?<= · )\S*$")
"""The directory in the title."""
SIZES = {"narrow": NARROW, "wide": WIDE}
TOUR: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("first", (), ()),
    ("reading", ("n", "n", "enter"), ("escape",)),
    ("plain", ("s",), ("escape",)),
    ("table", ("s", "s"), ("escape",)),
    ("tokens", ("t",), ()),
    ("tokens-by-line", ("t", "j", "j", "j", "j"), ("t", "escape")),
    ("rewards", ("r",), ("escape",)),
    ("compare", ("c",), ("escape",)),
    ("plots", ("l",), ("escape",)),
    ("help", ("question_mark",), ("escape",)),
    ("sorted", ("o", "O"), ("o",) * 7),
    ("find", ("f", "paste:prnt", "enter"), ("escape", "escape")),
    ("filter-wrong", ("slash", "paste:score == 0 && faults"), ("escape",)),
    ("filter", ("a", "slash", "paste:score == 0 and faults", "enter"), ("escape", "a")),
)
"""Name of a screen, keys that open it, and keys that close it."""


async def press(user: User, keys: tuple[str, ...]) -> None:
    for key in keys:
        if key.startswith("paste:"):
            await user.type(key.removeprefix("paste:"))
        else:
            await user.press(key)


def screen(user: User, directory: Path) -> list[str]:
    """Return the lines of the screen, without the directory."""
    lines = [line.replace(str(directory), "…") for line in user.lines]
    lines[0] = DIRECTORY.sub("…", lines[0])
    return lines


async def check(name: str, user: User, directory: Path) -> list[str]:
    """Wait until the screen is the snapshot, and return the lines that still differ."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        await user.still()
        SNAPSHOTS.mkdir(exist_ok=True)
        path.write_text("\n".join(screen(user, directory)) + "\n")
    stored = path.read_text().splitlines()
    for _ in range(100):
        lines = screen(user, directory)
        if lines == stored:
            break
        await user.pilot.pause(0.02)
    assert len(stored) == len(lines)
    return [f"{name}, {now!r} was {was!r}" for now, was in zip(lines, stored, strict=True) if now != was]


@pytest.mark.parametrize("size", SIZES)
async def test_screens_of_toolroll_run(size: str, our_run: Path) -> None:
    differences = []
    async with viewing(our_run, SIZES[size]) as user:
        for name, there, back in TOUR:
            await press(user, there)
            differences += await check(f"{name}-{size}", user, our_run)
            await press(user, back)
    assert not differences


@pytest.mark.parametrize("size", SIZES)
async def test_screen_of_verl_run(size: str, verl_run: Path) -> None:
    async with viewing(verl_run, SIZES[size]) as user:
        await user.press("n")
        assert not await check(f"verl-{size}", user, verl_run)


async def test_screens_of_malformed_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path("malformed")  # short, because the screen shows it in one line
    directory.mkdir()
    async with viewing(directory) as user:
        differences = await check("empty-directory-narrow", user, directory)
        (directory / "1.jsonl").write_bytes(
            b'{"output": "\xff"}\n{"input": "user\\nhi", "output": "\\u001b[1m[b]"}\n{"inp'
        )
        await user.look()
        differences += await check("unreadable-narrow", user, directory)
        await user.press("n")
        differences += await check("sanitized-narrow", user, directory)
    assert not differences


def test_every_snapshot_is_used() -> None:
    used = {f"{name}-{size}" for name, *_ in (*TOUR, ("verl",)) for size in SIZES}
    assert {path.stem for path in SNAPSHOTS.glob("*.txt")} == used | {
        "empty-directory-narrow",
        "unreadable-narrow",
        "sanitized-narrow",
    }
