"""Sanitized text has no control characters, and nothing is hidden."""

import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from toolroll._internal.sanitize import one_line, sanitize
from toolroll.viewer.formatting import DEFAULT_MASK


def test_control_characters_become_visible() -> None:
    assert sanitize("\x1b[31mred\x1b]0;title\x07\x9b2J") == "␛[31mred␛]0;title␇⟨009B⟩2J"
    assert sanitize("a\tb\x00\x7f\rc\r\nd") == "a    b␀␡␍c\nd"
    assert sanitize("safe \u202eevil\u2066 \u200bgap \ufeff \u2028") == "safe ⟨202E⟩evil⟨2066⟩ ⟨200B⟩gap ⟨FEFF⟩ ⟨2028⟩"
    assert sanitize("half \ud83d of one") == "half \ufffd of one"


def test_readable_text_is_unchanged() -> None:
    text = "[bold]no markup[/] <b> & 漢字 é 😀 − …\nnext"
    assert sanitize(text) == text
    assert sanitize("✅\ufe0f 1\ufe0f\u20e3") == "✅ 1\u20e3"


def test_mask_replaces_matches() -> None:
    assert sanitize("a<|image_pad|><|image_pad|>b", re.compile(DEFAULT_MASK)) == "a**b"


def test_one_line_shortens_and_joins_lines() -> None:
    assert one_line("a\nb\x1b") == "a␤b␛"
    assert one_line("x" * 300, 10) == "x" * 9 + "…"


@given(st.text(alphabet=st.characters(codec=None)))
def test_no_control_character_remains(text: str) -> None:
    shown = sanitize(text)
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
    assert sanitize(shown) == shown
    assert cell_len(shown) >= 0
