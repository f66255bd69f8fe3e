"""docs/migration.md has every name of verl's original design, and the names that it gives in toolroll exist."""

import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from toolroll.cli.app import app

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/migration.md"
NAMES = (ROOT / "tests/data/verl_names.txt").read_text(encoding="utf-8").splitlines()
"""Names in the founding documents, sorted. `test_names_are_those_of_the_documents` compares them."""


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_migration_table", ROOT / "scripts/make_migration_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()
ROWS = [row for rows in script.GROUPS.values() for row in rows]


def references(kind: type) -> list[Any]:
    found = dict.fromkeys(one for row in ROWS for one in row.references if type(one) is kind)
    assert found
    return [*found]


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute, or a field of a data class, which the class itself may not have."""
    return getattr(owner, "__dataclass_fields__", {}).get(name) or getattr(owner, name)


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is not a package
        return False


def resolve(path: str) -> Any:
    """Import a module, or a name in it."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        if is_module(name):
            return reduce(attribute, parts[count:], importlib.import_module(name))
    raise ImportError(path)


def test_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [group for _, group, _ in script.TABLE.findall(page)] == list(script.GROUPS)
    assert script.render(page) == page, "run scripts/make_migration_table.py"


def test_page_has_every_original_name() -> None:
    assert len(NAMES) > 100
    cells = re.findall(r"^\| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert [name for name in NAMES if name not in listed] == []


def test_each_name_has_one_row() -> None:
    names = [name for row in ROWS for name in row.names]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("name", references(script.Name), ids=str)
def test_name_can_be_imported(name: Any) -> None:
    assert resolve(name.path) is not None


@pytest.mark.parametrize("setting", references(script.Setting), ids=str)
def test_setting_exists(setting: Any) -> None:
    model = resolve(setting.model)
    for part in setting.field.split("."):
        assert issubclass(model, BaseModel)
        model = model.model_fields[part].annotation


@pytest.mark.parametrize("command", references(script.Command), ids=str)
def test_command_exists(command: Any) -> None:
    program, *words = command.line.split()
    assert program == "toolroll"
    found: Any = typer.main.get_command(app)
    while hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    files = [word for word in words if "/" in word]
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert len(words) >= sum(parameter.required for parameter in found.params)


@pytest.mark.parametrize("file", references(script.File), ids=str)
def test_file_exists(file: Any) -> None:
    assert (ROOT / file.path).exists()


@pytest.mark.parametrize("test", references(script.Test), ids=str)
def test_test_exists(test: Any) -> None:
    source = (ROOT / test.path).read_text(encoding="utf-8")
    assert re.search(rf"^(?:async def|def|class) {test.name}\b", source, re.MULTILINE)


@pytest.mark.parametrize("text", references(script.Text), ids=str)
def test_text_is_in_module(text: Any) -> None:
    assert text.text in inspect.getsource(importlib.import_module(text.module))


# The list of names, compared with the documents. They are not part of the repository.

LOCAL_NAMES = {
    "ExitStack", "_req", "actual_output", "alt", "bonus_percentage", "bonus_this_year", "cls_name", "executes",
    "param1", "parsed_tool_calls", "result_status", "tool_call", "tool_call_results", "tool_cls", "tool_config",
    "tool_creation_coroutines", "tool_creation_results", "tool_list", "tool_reward_tasks", "tool_type", "tools_config",
    "total_income_this_year", "total_pay_this_year",
}  # fmt: skip
"""Local variables of the documents' examples."""
PROPER_NOUNS = {"ByteDance", "FaaS", "GSM8K", "OpenAI", "SGLang", "VeRL", "asyncIO"}


def names_in(document: str) -> Iterator[str]:
    """Yield code spans, paths, and identifiers that look like code."""
    yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", document)
    document = document.replace("\\n", " ")
    named = (
        r"(?:verl|examples|tests|config|path|scripts)/[\w./*-]*[\w*]|run_[\w.-]+\.sh|(?:verl|trainer|path)\.[\w.]*\w"
    )
    yield from re.findall(rf"(?<![\w./])(?:{named}|actor_rollout_ref\.[\w.]+)", document)
    document = re.sub(rf"(?<![\w./])(?:{named}|actor_rollout_ref\.[\w.]+)|https?://\S+", " ", document)
    yield from re.findall(r"(?a:\b(?:class|def) (\w+))", document)
    yield from re.findall(r"(?a:\b([a-z]\w+)=[\w\"\[{])", document)  # keyword arguments
    yield from re.findall(r"(?am:^ *(?:- )?([a-z]\w+): )", document)  # keys of YAML
    yield from re.findall(r"(?a:\"([a-z]+)\": )", document)  # keys of JSON
    yield from re.findall(r"搜索 \"([^\"]+)\"", document)  # log lines to search for
    yield from re.findall(r"\b[A-Z]{6,}\b", document)  # states
    yield from re.findall(r"(?a:\b_*[A-Za-z]+\w*_\w+\b|\b_[a-z]+\b)", document)  # snake_case
    yield from re.findall(r"(?a:\b[A-Z]\w*[a-z0-9][A-Z]\w+\b)", document)  # CamelCase


def documents() -> list[Path]:
    directory = Path(os.environ.get("TOOLROLL_SEEDS") or ROOT.parent / "shared/seeds")
    return sorted(directory.glob("*.txt"))


@pytest.mark.skipif(not documents(), reason="needs the founding documents in TOOLROLL_SEEDS or ../shared/seeds")
def test_names_are_those_of_the_documents() -> None:
    found = {name for path in documents() for name in names_in(path.read_text(encoding="utf-8"))}
    assert sorted(found - LOCAL_NAMES - PROPER_NOUNS) == NAMES
