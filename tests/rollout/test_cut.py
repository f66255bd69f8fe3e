"""A tool's answer is never longer than it may be, and says what was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rollout.cut import cut
from toolroll.rollout.limits import Cut


def encode(text: str) -> list[int]:
    """Bytes in pairs: what is cut between two bytes of a character decodes and encodes to something longer."""
    raw = text.encode("utf-8", "surrogatepass")
    return [int.from_bytes(raw[at : at + 2].ljust(2, b"\0"), "big") for at in range(0, len(raw), 2)]


def decode(ids: list[int]) -> str:
    return b"".join(one.to_bytes(2, "big") for one in ids).decode("utf-8", "replace").replace("\0", "")


@given(text=st.text(max_size=400), most=st.integers(16, 60), side=st.sampled_from(["start", "middle", "end"]))
def test_it_fits_and_what_fits_is_left_alone(text: str, most: int, side: Cut) -> None:
    made = cut(text, most, side, encode, decode)
    assert len(encode(made)) <= most
    if len(encode(text)) <= most:
        assert made == text
    else:
        assert "tokens cut" in made


@pytest.mark.parametrize(
    ("side", "starts", "ends"), [("start", "[...", "z"), ("middle", "a", "z"), ("end", "a", "...]")]
)
def test_which_part_is_cut_out(side: Cut, starts: str, ends: str) -> None:
    made = cut("a" * 500 + "z" * 500, 100, side, encode, decode)
    assert made.startswith(starts)
    assert made.endswith(ends)


def test_of_a_megabyte_only_the_ends_are_looked_at() -> None:
    seen: list[int] = []

    def watched(text: str) -> list[int]:
        seen.append(len(text))
        return encode(text)

    made = cut("a" * 1_000_000 + "z", 100, "middle", watched, decode)
    assert made.endswith("z")
    assert sum(seen) < 10_000
