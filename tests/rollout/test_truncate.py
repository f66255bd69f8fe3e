"""Truncation of tool responses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rollout.limits import TruncateSide
from toolroll.rollout.truncate import truncate


def encode(text: str) -> list[int]:
    """Encode pairs of bytes. A character that is split decodes and encodes to something longer."""
    raw = text.encode("utf-8", "surrogatepass")
    return [int.from_bytes(raw[at : at + 2].ljust(2, b"\0"), "big") for at in range(0, len(raw), 2)]


def decode(ids: list[int]) -> str:
    return b"".join(one.to_bytes(2, "big") for one in ids).decode("utf-8", "replace").replace("\0", "")


@given(text=st.text(max_size=400), max_tokens=st.integers(16, 60), side=st.sampled_from(["start", "middle", "end"]))
def test_result_fits_and_short_text_is_unchanged(text: str, max_tokens: int, side: TruncateSide) -> None:
    result = truncate(text, max_tokens, side, encode, decode)
    assert len(encode(result)) <= max_tokens
    if len(encode(text)) <= max_tokens:
        assert result == text
    else:
        assert "tokens truncated" in result


@pytest.mark.parametrize(
    ("side", "starts", "ends"),
    [("start", "[400+ tokens truncated]", "z"), ("middle", "a", "z"), ("end", "a", "[400+ tokens truncated]")],
)
def test_side_selects_removed_part(side: TruncateSide, starts: str, ends: str) -> None:
    result = truncate("a" * 500 + "z" * 500, 100, side, encode, decode)
    assert result.startswith(starts)
    assert result.endswith(ends)


def test_only_ends_of_long_text_are_encoded() -> None:
    seen: list[int] = []

    def recording_encode(text: str) -> list[int]:
        seen.append(len(text))
        return encode(text)

    result = truncate("a" * 1_000_000 + "z", 100, "middle", recording_encode, decode)
    assert result.endswith("z")
    assert sum(seen) < 10_000
