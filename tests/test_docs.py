"""Commands, files, links and generated tables of the documentation work as printed."""

import importlib.util
import re
from pathlib import Path

import doc_page
import pytest
from real_engine import RealEngine

PAGES = [
    "docs/tools.md",
    "docs/limiter.md",
    "docs/sandbox.md",
    "docs/code-interpreter.md",
    "docs/rewards.md",
    "docs/records.md",
]


@pytest.fixture
def sandbox_variable(sandbox_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide the sandbox server that a page asks the reader to start."""
    monkeypatch.setenv("SANDBOX_FUSION_URL", sandbox_url)


@pytest.mark.sglang
@pytest.mark.usefixtures("sandbox_variable")
@pytest.mark.parametrize("name", ["docs/rollout.md", "docs/run.md", "docs/models.md"])
def test_page_with_engine_works_as_printed(
    name: str, root: Path, tmp_path: Path, sglang: RealEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_URL", sglang.url)
    monkeypatch.setenv("MODEL", str(sglang.model_dir))
    test_page_works_as_printed(name, root, tmp_path)


@pytest.mark.sandbox
@pytest.mark.usefixtures("sandbox_variable")
@pytest.mark.parametrize("name", PAGES)
def test_page_works_as_printed(name: str, root: Path, tmp_path: Path) -> None:
    page = (root / name).read_text()
    for title, body in doc_page.files(page).items():
        (tmp_path / title).write_text(body)
    commands = doc_page.commands(page)
    assert commands
    for command in commands:
        assert doc_page.trimmed(doc_page.run(command, tmp_path)) == doc_page.trimmed(command.output), command.line


def test_tools_page_examples_are_as_short_as_claimed(root: Path) -> None:
    files = doc_page.files((root / "docs/tools.md").read_text())

    def lines_of_code(title: str) -> int:
        code, in_docstring = 0, False
        for line in files[title].splitlines():
            in_docstring ^= line.count('"""') == 1
            code += (
                bool(line.strip())
                and not in_docstring
                and '"""' not in line
                and not line.startswith(("from", "import"))
            )
        return code

    assert lines_of_code("words.py") <= 10
    assert lines_of_code("notebook.py") <= 30


@pytest.mark.sandbox
@pytest.mark.usefixtures("sandbox_variable")
def test_readme_commands_work_as_printed(root: Path) -> None:
    commands = doc_page.commands((root / "README.md").read_text())
    assert len(commands) > 1
    for command in commands:
        assert doc_page.trimmed(doc_page.run(command, root)) == doc_page.trimmed(command.output), command.line


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_anchors_resolve(root: Path) -> None:
    for page in [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            target, _, anchor = link.partition("#")
            if target.startswith("http"):
                continue
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {link}"


def test_architecture_page_names_existing_paths(root: Path) -> None:
    page = (root / "docs/architecture.md").read_text()
    paths = set(re.findall(r"`((?:tests/)?[a-z_]+/[a-z_/]*(?:\.py)?|[a-z_]+\.py)`", page))
    assert len(paths) > 30
    assert [path for path in paths if not any(root.glob(f"toolroll/**/{path}")) and not (root / path).exists()] == []


def test_scale_table_matches_the_figures(root: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_scale", root / "scripts/make_scale.py")
    assert spec is not None
    assert spec.loader is not None
    make_scale = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_scale)
    assert make_scale.table() in (root / "docs/scale.md").read_text(), "run scripts/make_scale.py"
