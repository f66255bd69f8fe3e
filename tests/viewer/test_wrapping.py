"""Wrapping: no character lost, no row too wide."""

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from toolroll._internal.sanitize import sanitize
from toolroll.viewer.documents.layout import wrap


def rows(text: str, width: int) -> list[str]:
    return [text[start:end] for start, end in wrap(text, width)]


def test_words_are_kept_whole_if_possible() -> None:
    assert rows("one two three", 8) == ["one two", "three"]
    assert rows("a\n\nb", 8) == ["a", "", "b"]
    assert rows("", 8) == [""]
    assert rows("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert rows("    indented words", 10) == ["    indent", "ed words"]
    assert rows("漢字漢字", 4) == ["漢字", "漢字"]


@given(st.text(st.sampled_from("ab 漢é😀\n"), max_size=80).map(sanitize), st.integers(2, 20))
def test_rows_contain_all_characters_and_fit(text: str, width: int) -> None:
    found = wrap(text, width)
    left_out = text
    for (_, end), (start, _) in itertools.pairwise(found):
        assert end <= start
        assert text[end:start] in ("", " ", "\n", " \n")
    assert found[0][0] == 0
    assert text[found[-1][1] :] in ("", " ")
    assert all(cell_len(text[start:end]) <= width for start, end in found)
    assert sum(end - start for start, end in found) <= len(left_out)


def test_five_megabytes_are_wrapped_quickly() -> None:
    for text in ("word " * 1_000_000, "é漢字 " * 800_000, "x" * 5_000_000):
        began = time.process_time()
        assert len(wrap(text, 80)) > 40_000
        assert time.process_time() - began < 3
