"""Text out of a sample does nothing to the terminal, and nothing of it is hidden."""

import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from toolroll.viewer.harmless import DEFAULT_MASK, harmless, one_line


def test_what_a_terminal_would_act_upon_is_shown() -> None:
    assert harmless("\x1b[31mred\x1b]0;title\x07\x9b2J") == "␛[31mred␛]0;title␇⟨009B⟩2J"
    assert harmless("a\tb\x00\x7f\rc\r\nd") == "a    b␀␡␍c\nd"
    assert harmless("safe \u202eevil\u2066 \u200bgap \ufeff \u2028") == "safe ⟨202E⟩evil⟨2066⟩ ⟨200B⟩gap ⟨FEFF⟩ ⟨2028⟩"
    assert harmless("half \ud83d of one") == "half \ufffd of one"


def test_what_is_meant_to_be_read_stays() -> None:
    text = "[bold]no markup[/] <b> & 漢字 é 😀 − …\nnext"
    assert harmless(text) == text
    assert harmless("✅\ufe0f 1\ufe0f\u20e3") == "✅ 1\u20e3"


def test_masked() -> None:
    assert harmless("a<|image_pad|><|image_pad|>b", re.compile(DEFAULT_MASK)) == "a**b"


def test_one_line() -> None:
    assert one_line("a\nb\x1b") == "a␤b␛"
    assert one_line("x" * 300, 10) == "x" * 9 + "…"


@given(st.text(alphabet=st.characters(codec=None)))
def test_no_character_is_left_that_a_terminal_acts_upon(text: str) -> None:
    shown = harmless(text)
    shown.encode("utf-8")
    for character in shown.replace("\n", ""):
        assert unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(character) not in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )
    assert harmless(shown) == shown
    assert cell_len(shown) >= 0
