"""The Chinese pages correspond to the English ones."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TRANSLATED = (
    "get-started/demo.md", "get-started/laptop.md", "get-started/cluster.md", "tools.md", "code-interpreter.md",
    "sandbox.md", "run.md", "verl.md", "migration.md",
)  # fmt: skip
"""Pages that have a translation."""
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(params=["README.zh-CN.md", *(f"docs/zh/{name}" for name in TRANSLATED)])
def pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Any]:
    """Return a translation, its English page and the script that marks translations."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = import_module("mark_translations")
    chinese = ROOT / request.param
    return chinese, script.translations()[chinese], script


def code_blocks(page: Path) -> list[str]:
    return CODE_BLOCK.findall(page.read_text())


def headings(page: Path) -> list[int]:
    """Return the levels of the headings of a page."""
    return [len(marks) for marks in re.findall(r"^(#+) ", CODE_BLOCK.sub("", page.read_text()), re.MULTILINE)]


def test_code_blocks_are_those_of_the_english_page(pages: tuple[Path, Path, Any]) -> None:
    chinese, english, _ = pages
    assert code_blocks(chinese) == code_blocks(english)


def test_headings_correspond(pages: tuple[Path, Path, Any]) -> None:
    chinese, english, _ = pages
    assert headings(chinese) == headings(english)


def test_translation_is_up_to_date(pages: tuple[Path, Path, Any]) -> None:
    chinese, english, script = pages
    expected = script.mark(english)
    found = script.MARK.search(chinese.read_text())
    assert found is not None, f"run scripts/mark_translations.py {chinese.relative_to(ROOT)}"
    assert found[0].strip() == expected, (
        f"{english.relative_to(ROOT)} has changed. Translate the change in {chinese.relative_to(ROOT)}, "
        f"then run scripts/mark_translations.py {chinese.relative_to(ROOT)}"
    )


def test_no_other_page_is_translated() -> None:
    """A page that is not listed above would not be checked."""
    found = {page.relative_to(ROOT / "docs/zh").as_posix() for page in (ROOT / "docs/zh").rglob("*.md")}
    assert found == set(TRANSLATED)
