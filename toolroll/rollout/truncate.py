"""Truncation of tool responses to a number of tokens.

The start, the middle or the end is replaced by a marker. Of a very long text only the ends are encoded, so the cost is
bounded.
"""

from __future__ import annotations

from collections.abc import Callable

from toolroll.rollout.limits import TruncateSide

MAX_CHARS_PER_TOKEN = 12
"""Number of characters that are encoded per allowed token. Most tokens have less than half as many."""
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


def truncate(text: str, max_tokens: int, side: TruncateSide, encode: Encode, decode: Decode) -> str:
    """Truncate a text.

    Args:
        text: Text to truncate.
        max_tokens: Maximum number of tokens of the result, including the marker.
        side: Part of the text that is removed.
        encode: Function that returns the ids of a text.
        decode: Function that returns the text of ids.

    Returns:
        The text itself if it is short enough.
    """
    max_chars = MAX_CHARS_PER_TOKEN * max_tokens
    is_very_long = len(text) > 2 * max_chars
    head, tail = (text[:max_chars], text[-max_chars:]) if is_very_long else (text, text)
    head_ids, tail_ids = encode(head), encode(tail)
    if not is_very_long and len(head_ids) <= max_tokens:
        return text
    marker = "[text truncated]" if is_very_long else f"[{len(head_ids) - max_tokens}+ tokens truncated]"

    def join(kept: int) -> str:
        match side:
            case "start":
                return f"{marker}\n{decode(tail_ids[-kept:])}"
            case "end":
                return f"{decode(head_ids[:kept])}\n{marker}"
        tail_len = kept // 2
        tail = decode(tail_ids[-tail_len:]) if tail_len else ""
        return f"{decode(head_ids[: kept - tail_len])}\n{marker}\n{tail}"

    kept = max_tokens - len(encode(f"\n{marker}\n"))
    while kept > 0:
        truncated = join(kept)
        if (surplus := len(encode(truncated)) - max_tokens) <= 0:
            return truncated
        kept -= surplus  # decoding and encoding again may yield more tokens
    return decode(encode(marker)[:max_tokens])
