"""docs/viewer.md says what is there: its keys, its filters, its pictures."""

import ast
import re
from pathlib import Path

import pytest

from toolroll.viewer.expression import FUNCTIONS, Expression
from toolroll.viewer.help import FILTERS
from toolroll.viewer.keys import KEYS
from toolroll.viewer.listing import NAMES, Listing
from viewer.driving import viewing


@pytest.fixture
def page(root: Path) -> str:
    return (root / "docs/viewer.md").read_text()


def test_every_key_is_in_its_table(page: str) -> None:
    for key in KEYS:
        assert f"| {' '.join(f'`{one}`' for one in key.shown.split())} | {key.help} |" in page


def test_its_filters_are_filters_and_ask_for_what_there_is(page: str, our_run: Path) -> None:
    from toolroll.records.index import Shelf

    table = page.partition("| filter |")[2].partition("\n\n")[0]
    filters = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(filters) == 10
    steps = Shelf(our_run).steps
    for text in [*filters, *(example for example, _ in FILTERS)]:
        listing = Listing(steps, Expression(text))
        while not listing.advance(1):
            pass
        assert listing.looked_at == 48
        if "sqrt" not in text and "None" not in text and "5000" not in text and "calls > 3" not in text:
            assert len(listing) > 0, text
    assert all(f"`{name}`" in page for name in NAMES)
    assert all(f"`{name}`" in page for name in FUNCTIONS)


def test_its_pictures_are_there_and_are_made_by_the_script(page: str, root: Path) -> None:
    shown = set(re.findall(r"images/viewer-(\w+)\.svg", page))
    tree = ast.parse((root / "docs/make_viewer_pictures.py").read_text())
    made = next(node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "PICTURES")  # type: ignore[union-attr]
    assert {key.value for key in made.keys} == shown  # type: ignore[union-attr]
    assert all((root / f"docs/images/viewer-{name}.svg").stat().st_size > 10_000 for name in shown)


@pytest.mark.parametrize("theme", ["textual-light", "ansi-dark"])
async def test_other_themes(our_run: Path, theme: str) -> None:
    async with viewing(our_run) as user:
        user.app.theme = theme
        await user.press("n", "enter", "t", "r", "c", "escape", "question_mark", "escape")
        await user.sees("▎ ground truth")
