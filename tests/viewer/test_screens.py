"""What the screens look like. The text of each is kept in screens/: UPDATE_SCREENS=1 writes them anew."""

import os
import re
from pathlib import Path

import pytest

from viewer.driving import NARROW, WIDE, User, viewing

KEPT = Path(__file__).parent / "screens"
DIRECTORY = re.compile(r"(?<= · )\S*$")
"""Where the directory stands in the title."""
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
"""A screen's name, the keys that lead there, and those that lead back."""


async def press(user: User, keys: tuple[str, ...]) -> None:
    for key in keys:
        if key.startswith("paste:"):
            await user.type(key.removeprefix("paste:"))
        else:
            await user.press(key)


def check(name: str, user: User, directory: Path) -> list[str]:
    """What is other than it was."""
    lines = [line.replace(str(directory), "…") for line in user.lines]
    lines[0] = DIRECTORY.sub("…", lines[0])
    path = KEPT / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        KEPT.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    kept = path.read_text().splitlines()
    assert len(kept) == len(lines)
    return [f"{name}, {now!r} was {was!r}" for now, was in zip(lines, kept, strict=True) if now != was]


@pytest.mark.parametrize("size", SIZES)
async def test_a_tour_through_ours(size: str, our_run: Path) -> None:
    others = []
    async with viewing(our_run, SIZES[size]) as user:
        for name, there, back in TOUR:
            await press(user, there)
            others += check(f"{name}-{size}", user, our_run)
            await press(user, back)
    assert not others


@pytest.mark.parametrize("size", SIZES)
async def test_verls(size: str, verl_run: Path) -> None:
    async with viewing(verl_run, SIZES[size]) as user:
        await user.press("n")
        assert not check(f"verls-{size}", user, verl_run)


async def test_odd_ones(tmp_path: Path) -> None:
    async with viewing(tmp_path) as user:
        others = check("empty-directory-narrow", user, tmp_path)
        (tmp_path / "1.jsonl").write_bytes(
            b'{"output": "\xff"}\n{"input": "user\\nhi", "output": "\\u001b[1m[b]"}\n{"inp'
        )
        await user.look()
        others += check("unreadable-narrow", user, tmp_path)
        await user.press("n")
        others += check("harmless-narrow", user, tmp_path)
    assert not others


def test_nothing_is_kept_that_nobody_looks_at() -> None:
    named = {f"{name}-{size}" for name, *_ in (*TOUR, ("verls",)) for size in SIZES}
    assert {path.stem for path in KEPT.glob("*.txt")} == named | {
        "empty-directory-narrow",
        "unreadable-narrow",
        "harmless-narrow",
    }
