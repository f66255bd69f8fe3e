"""A tool's answer, cut to a length in tokens.

What is over it is cut out at the start, in the middle or at the end, and a mark says how much. The result, with the
mark, is never longer than it may be. Of a text that is far too long only the ends are looked at, so that a tool that
prints a megabyte costs no more than one that prints a page.
"""

from __future__ import annotations

from collections.abc import Callable

from toolroll.rollout.limits import Cut

CHARACTERS = 12
"""Characters that are looked at for each token that may be kept. Most tokens have less than half as many."""
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


def cut(text: str, most: int, side: Cut, encode: Encode, decode: Decode) -> str:
    """The text in at most so many tokens."""
    far_too_long = len(text) > 2 * CHARACTERS * most
    ends = (text[: CHARACTERS * most], text[-CHARACTERS * most :]) if far_too_long else (text, text)
    ids = encode(ends[0]), encode(ends[1])
    if not far_too_long and len(ids[0]) <= most:
        return text
    left_out = "" if far_too_long else f"{len(ids[0]) - most}+ "
    mark = f"[... {left_out}tokens cut ...]"
    room = most - len(encode(f"\n{mark}\n"))
    while room > 0:
        made = _joined(ids, room, side, mark, decode)
        if (over := len(encode(made)) - most) <= 0:
            return made
        room -= over  # what is decoded and encoded again may come out longer
    return decode(encode(mark)[:most])


def _joined(ids: tuple[list[int], list[int]], room: int, side: Cut, mark: str, decode: Decode) -> str:
    match side:
        case "start":
            return f"{mark}\n{decode(ids[1][-room:])}"
        case "end":
            return f"{decode(ids[0][:room])}\n{mark}"
    head = (room + 1) // 2
    tail = decode(ids[1][-(room // 2) :]) if room // 2 else ""
    return f"{decode(ids[0][:head])}\n{mark}\n{tail}"
