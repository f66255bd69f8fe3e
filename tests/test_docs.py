"""What stands in the documentation works as it stands."""

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


@pytest.fixture(autouse=True)
def _sandbox(sandbox_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox that a page has the reader start."""
    monkeypatch.setenv("SANDBOX_FUSION_URL", sandbox_url)


def test_files_and_commands_of_the_page_on_rollouts(
    root: Path, tmp_path: Path, sglang: RealEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_URL", sglang.url)
    monkeypatch.setenv("MODEL", str(sglang.model_dir))
    test_files_and_commands_of_a_page("docs/rollout.md", root, tmp_path)


@pytest.mark.parametrize("name", PAGES)
def test_files_and_commands_of_a_page(name: str, root: Path, tmp_path: Path) -> None:
    page = (root / name).read_text()
    for title, body in doc_page.files(page).items():
        (tmp_path / title).write_text(body)
    commands = doc_page.commands(page)
    assert commands
    for command in commands:
        assert doc_page.trimmed(doc_page.run(command, tmp_path)) == doc_page.trimmed(command.output), command.line


def test_the_tools_page_keeps_its_word_on_lengths(root: Path) -> None:
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


def test_commands_of_the_readme(root: Path) -> None:
    commands = doc_page.commands((root / "README.md").read_text())
    assert len(commands) > 1
    for command in commands:
        assert doc_page.trimmed(doc_page.run(command, root)) == doc_page.trimmed(command.output), command.line


def test_links_lead_somewhere(root: Path) -> None:
    import re

    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
