"""docs/viewer.md matches the viewer: keys, filters, pictures."""

import ast
import re
from pathlib import Path

import pytest

from toolroll.viewer.keys import BROWSE_KEYS
from toolroll.viewer.query.expression import FUNCTIONS, FilterExpression
from toolroll.viewer.query.listing import SampleListing
from toolroll.viewer.query.scan import FIELD_NAMES
from toolroll.viewer.screens.dialogs import FILTER_EXAMPLES
from viewer.driving import viewing


@pytest.fixture
def page(root: Path) -> str:
    return (root / "docs/viewer.md").read_text()


def test_page_lists_every_key(page: str) -> None:
    for key in BROWSE_KEYS:
        assert f"| {' '.join(f'`{one}`' for one in key.shown.split())} | {key.help} |" in page


def test_filters_on_page_are_valid(page: str, our_run: Path) -> None:
    from toolroll.records.index import DumpDirectory

    table = page.partition("| Filter |")[2].partition("\n\n")[0]
    filters = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(filters) == 10
    steps = DumpDirectory(our_run).steps
    for text in [*filters, *(example for example, _ in FILTER_EXAMPLES)]:
        listing = SampleListing(steps, FilterExpression(text))
        while not listing.advance(1):
            pass
        assert listing.examined == 48
        if "sqrt" not in text and "None" not in text and "5000" not in text and "calls > 3" not in text:
            assert len(listing) > 0, text
    assert all(f"`{name}`" in page for name in FIELD_NAMES)
    assert all(f"`{name}`" in page for name in FUNCTIONS)


def test_pictures_on_page_are_generated_by_script(page: str, root: Path) -> None:
    shown = set(re.findall(r"images/viewer-(\w+)\.svg", page))
    tree = ast.parse((root / "scripts/make_viewer_pictures.py").read_text())
    pictures = next(
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "PICTURES"
    )  # type: ignore[union-attr]
    assert {key.value for key in pictures.keys} == shown  # type: ignore[union-attr]
    assert all((root / f"docs/images/viewer-{name}.svg").stat().st_size > 10_000 for name in shown)


@pytest.mark.parametrize("theme", ["textual-light", "ansi-dark"])
async def test_other_themes_render(our_run: Path, theme: str) -> None:
    async with viewing(our_run) as user:
        user.app.theme = theme
        await user.press("n", "enter", "t", "r", "c", "escape", "question_mark", "escape")
        await user.sees("▎ ground truth")
