"""Commands, files, links and generated tables of the documentation work as printed."""

import os
import re
import urllib.request
from importlib import import_module
from pathlib import Path

import doc_page
import pytest
from cli.test_output import COMMANDS
from collector import Collector
from mcp_servers import server_program
from real_engine import RealEngine
from record_samples import trajectory
from typer.testing import CliRunner

import toolroll
from toolroll import FinishReason, Limits, RunConfig, SandboxFusionTool, ServerSettings, initialize_tools_from_config
from toolroll.cli.app import app
from toolroll.records.writer import RecordWriter

PAGES = [
    "docs/tools.md",
    "docs/limiter.md",
    "docs/sandbox.md",
    "docs/code-interpreter.md",
    "docs/rewards.md",
    "docs/records.md",
    "docs/rescoring.md",
    "docs/replay.md",
    "docs/get-started/demo.md",
    "docs/operations/monitoring.md",
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


@pytest.mark.process
def test_tracing_page_works_as_printed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RecordWriter(tmp_path / "rollouts") as writer:
        for number in range(64):
            writer.append(trajectory(number), step=0)
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        test_page_works_as_printed("docs/operations/tracing.md", root, tmp_path)
    assert len([span for span in collector.spans if span.name == "invoke_agent"]) == 64


@pytest.mark.process
def test_page_with_mcp_servers_works_as_printed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Path(server_program("mcp-server-filesystem")).parent
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    test_page_works_as_printed("docs/mcp.md", root, tmp_path)


@pytest.mark.sglang
def test_python_example_of_the_readme_works(root: Path, tmp_path: Path, sglang: RealEngine) -> None:
    [example] = re.findall(r"^```python\n(.*?)^```$", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    example = example.replace("http://127.0.0.1:30000", sglang.url).replace("Qwen/Qwen3-8B", str(sglang.model_dir))
    example = example.replace("tools=[multiply]", 'tools=[multiply], sampling_params={"max_new_tokens": 16}')
    assert str(sglang.model_dir) in example
    assert "max_new_tokens" in example, "the model of the tests would write until it reaches the limit"
    (tmp_path / "example.py").write_text(example)
    shown = doc_page.run(doc_page.Command("python example.py", ""), tmp_path).splitlines()
    assert len(shown) == 8
    for tokens, sampled, finish_reason in map(str.split, shown):
        assert 0 < int(sampled) < int(tokens)
        assert FinishReason(finish_reason) in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.MAX_TURNS)


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


def test_config_files_of_the_cluster_page_load(root: Path, tmp_path: Path) -> None:
    page = (root / "docs/get-started/cluster.md").read_text()
    blocks = dict(re.findall(r"^```yaml\n# (\w+\.yaml)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert blocks.keys() == {"run.yaml", "tools.yaml"}
    for name, text in blocks.items():
        (tmp_path / name).write_text(text)
    config = RunConfig.load(tmp_path / "run.yaml")
    assert config.tools == str(tmp_path / "tools.yaml")
    assert config.data.path == str(tmp_path / "problems.jsonl")
    assert len(config.engine.urls) == 2
    [interpreter] = initialize_tools_from_config(tmp_path / "tools.yaml")
    assert isinstance(interpreter, SandboxFusionTool)
    assert len(interpreter.settings.sandbox_fusion_url) == 2


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them, and those written as `{#anchor}`."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    explicit = {found[1] for heading in headings if (found := re.search(r" \{#([\w-]+)\}$", heading))}
    return explicit | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_anchors_resolve(root: Path) -> None:
    for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
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


@pytest.fixture
def scripts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the modules in scripts/ importable."""
    monkeypatch.syspath_prepend(str(root / "scripts"))


@pytest.mark.usefixtures("scripts")
def test_tables_of_figures_are_up_to_date(root: Path) -> None:
    make_figures, make_scale = import_module("make_figures"), import_module("make_scale")
    for table in (make_scale.table(), make_scale.server_table()):
        assert table in (root / "docs/scale.md").read_text(), "run scripts/make_scale.py"
    for page in ("README.md", "docs/benchmarks.md"):
        assert make_figures.main_table() in (root / page).read_text(), "run scripts/make_figures.py"


@pytest.mark.usefixtures("scripts")
def test_reference_has_every_exported_name_and_setting() -> None:
    docs_site = import_module("docs_site")
    api, settings = docs_site.api_page(), docs_site.settings_page()
    exported = set(toolroll.__all__)
    assert {name for name in exported if not re.search(rf"^::: toolroll\.[\w.]+\.{name}$", api, re.MULTILINE)} == set()
    for name in docs_site.INTEGRATIONS["TRL"].values():
        assert all(f".{one}\n" in api for one in name)
    for model, prefix in ((RunConfig, ""), (Limits, "limits."), (ServerSettings, "")):
        keys = [key for key, field in model.model_fields.items() if not hasattr(field.annotation, "model_fields")]
        assert [key for key in keys if f"| `{prefix}{key}` |" not in settings] == []


@pytest.mark.usefixtures("scripts")
def test_reference_has_every_command_and_option() -> None:
    page = import_module("docs_site").cli_page()
    sections = dict(re.findall(r"^## `toolroll ([^`]+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == COMMANDS.keys()
    for name, section in sections.items():
        shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", shown)) - {"--help"}
        assert {option for option in options if f"`{option}`" not in section} == set(), name


@pytest.mark.sandbox
@pytest.mark.usefixtures("scripts")
def test_reference_has_every_metric(sandbox_url: str) -> None:
    with urllib.request.urlopen(f"{sandbox_url}/metrics", timeout=10) as response:
        exported = set(re.findall(r"^# HELP (\w+) ", response.read().decode(), re.MULTILINE))
    page = import_module("docs_site").metrics_page()
    named = set(re.findall(r"^\| `(toolroll_sandbox_\w+)` ", page, re.MULTILINE))
    assert {name for name in exported if not name.endswith("_created")} == named
