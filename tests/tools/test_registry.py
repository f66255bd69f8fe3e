"""Tests of loading tools from a YAML file."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolroll import BaseTool, ConfigError, ToolInstance, initialize_tools_from_config
from toolroll.tools.gsm8k_tool import Gsm8kTool
from toolroll.tools.registry import ToolType, get_tool_class

HERE = """
from typing import Any
from toolroll import BaseTool, ToolResponse, ToolSettings, tool

@tool
def shout(text: str) -> str:
    '''Say it louder.'''
    return text.upper()

def whisper(text: str) -> str:
    return text.lower()

class Echo(BaseTool[None]):
    class Settings(ToolSettings):
        times: int = 1

    def __init__(self, config: Any = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.times = self.Settings.read(self.config).times

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text=parameters["text"] * self.times), None, {}

class Fragile(BaseTool[None]):
    def __init__(self, config: Any = None, tool_schema: Any = None) -> None:
        raise RuntimeError("no licence")
    async def execute(self, *args: Any, **kwargs: Any) -> Any: ...
"""

SCHEMA = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "Say it again.",
        "parameters": {"type": "object", "required": ["text"]},
    },
}
ECHO = {"class_name": "here.Echo", "config": {"type": "native", "times": 2}, "tool_schema": SCHEMA}


@pytest.fixture(autouse=True)
def module_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.py").write_text(HERE)
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "here", raising=False)


def load(tmp_path: Path, content: Any) -> list[BaseTool[Any]]:
    path = tmp_path / "tools.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return initialize_tools_from_config(path)


async def test_examples_load(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checker,) = initialize_tools_from_config(root / "examples/gsm8k/tool_config.yaml")
    assert isinstance(checker, Gsm8kTool)
    assert checker.name == "calc_gsm8k_reward"
    expected = yaml.safe_load((root / "examples/gsm8k/tool_config.yaml").read_text())["tools"][0]["tool_schema"]
    assert checker.get_openai_tool_schema().model_dump() == expected

    monkeypatch.syspath_prepend(str(root / "examples/custom_tool"))
    convert, pantry = initialize_tools_from_config(str(root / "examples/custom_tool/tool_config.yaml"))
    assert [convert.name, pantry.name] == ["convert", "pantry"]
    async with ToolInstance(convert) as instance:
        assert (await instance.execute('{"amount": 2, "unit": "cup"}')).response.text == '{"grams": 240.0}'
    async with ToolInstance(pantry, create_kwargs={"flour": 1}) as instance:
        assert (await instance.execute({"item": "flour", "count": 2})).response.text == "3 flour stored"
        assert await instance.calc_reward() == 1.0


async def test_settings_and_schema_reach_the_tool(tmp_path: Path) -> None:
    (echo,) = load(tmp_path, {"tools": [ECHO]})
    async with ToolInstance(echo) as instance:
        assert (await instance.execute({"text": "ho"})).response.text == "hoho"
    assert echo.tool_schema.model_dump() == SCHEMA


async def test_function_with_custom_schema(tmp_path: Path) -> None:
    (plain,) = load(tmp_path, {"tools": [{"class_name": "here.shout"}]})
    assert plain.tool_schema.function.description == "Say it louder."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    renamed = {"type": "function", "function": {"name": "yell", "description": "Yell.", "parameters": parameters}}
    (other,) = load(tmp_path, {"tools": [{"class_name": "here.shout", "tool_schema": renamed}]})
    assert other.name == "yell"
    async with ToolInstance(plain, "a") as one, ToolInstance(other, "a") as two:
        assert (await one.execute({"text": "hey"})).response.text == "HEY"
        assert (await two.execute({"text": "hey"})).response.text == "HEY"


def test_environment_variables_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMES", "3")
    (echo,) = load(tmp_path, {"tools": [{**ECHO, "config": {"times": "${oc.decode:${oc.env:TIMES}}"}}]})
    assert vars(echo)["times"] == 3


def test_verl_class_names_load_replacements(tmp_path: Path) -> None:
    (checker,) = load(
        tmp_path, {"tools": [{"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}}]}
    )
    assert isinstance(checker, Gsm8kTool)


def test_tool_class_is_found_by_name() -> None:
    for name in ("verl.tools.gsm8k_tool.Gsm8kTool", "toolroll.tools.gsm8k_tool.Gsm8kTool", "toolroll.Gsm8kTool"):
        assert get_tool_class(name) is Gsm8kTool
    shout = get_tool_class("here.shout")
    assert shout(config={"type": ToolType("native")}, tool_schema=None).name == "shout"
    for name in ("here.whisper", "pathlib.Path", "here.Nothing"):
        with pytest.raises(ConfigError):
            get_tool_class(name)
    with pytest.raises(ValueError, match="grpc"):
        ToolType("grpc")


def test_null_keywords_of_original_schema_are_dropped(tmp_path: Path) -> None:
    """Configs and dumps of the original have `enum: null`, which is not valid JSON Schema."""
    properties = {"text": {"type": "string", "description": "The text.", "enum": None}}
    parameters = {"type": "object", "properties": properties, "required": ["text"]}
    function = {"name": "echo", "description": "Say it again.", "parameters": parameters, "strict": False}
    entry = {**ECHO, "tool_schema": {"type": "function", "function": function}}
    (echo,) = load(tmp_path, {"tools": [entry]})
    assert "enum: null" in (tmp_path / "tools.yaml").read_text()
    del properties["text"]["enum"]
    assert echo.tool_schema.model_dump() == {"type": "function", "function": function}
    assert "enum" not in echo.tool_schema.model_dump_json()
    assert echo.arguments.parse('{"text": "ho"}') == {"text": "ho"}


def test_loaded_tools_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "toolroll")
    load(tmp_path, {"tools": [ECHO, {"class_name": "here.shout"}]})
    assert caplog.messages == [f"Initialize tools from configuration {tmp_path / 'tools.yaml'}: echo, shout"]


def test_hundreds_of_tools_load(tmp_path: Path) -> None:
    def echo(number: int) -> dict[str, Any]:
        return {**ECHO, "tool_schema": {**SCHEMA, "function": {**SCHEMA["function"], "name": f"echo_{number}"}}}  # type: ignore[dict-item]

    tools = load(tmp_path, {"tools": [echo(number) for number in range(500)]})
    assert [tool.name for tool in tools] == [f"echo_{number}" for number in range(500)]


@pytest.mark.parametrize(
    ("entry", "messages"),
    [
        ({"clas_name": "here.Echo"}, ["unknown key 'clas_name' (did you mean 'class_name'?)"]),
        ({"config": {"type": "native"}}, ["missing key 'class_name'"]),
        ({**ECHO, "tool_shema": {}}, ["(here.Echo)", "unknown key 'tool_shema' (did you mean 'tool_schema'?)"]),
        ({**ECHO, "config": {"tims": 3}}, ["config: unknown key 'tims' (did you mean 'times'?)"]),
        ({**ECHO, "config": {"times": "many"}}, ["config: times: Input should be a valid integer"]),
        ({**ECHO, "config": {"type": "mpc"}}, ["config.type: unknown type 'mpc'. Use 'native' or 'mcp'"]),
        ({**ECHO, "class_name": "here.Ecko"}, ["Module 'here' has no attribute 'Ecko' (did you mean 'Echo'?)"]),
        ({**ECHO, "class_name": "not_there.Echo"}, ["No module named 'not_there'", "PYTHONPATH"]),
        ({**ECHO, "class_name": "Echo"}, ["Expected a dotted path, got 'Echo'", "my_module.Echo"]),
        ({**ECHO, "class_name": "pathlib.Path"}, ["pathlib.Path is not a tool", "Derive it from toolroll.BaseTool"]),
        ({"class_name": "here.whisper"}, ["here.whisper is not a tool", "Decorate it with @tool"]),
        ({"class_name": "here.shout", "config": {"loud": 3}}, ["'loud'", "a function has no settings"]),
        ({"class_name": "here.Echo"}, ["Echo has no schema"]),
        ({"class_name": "here.shout", "tool_schema": SCHEMA}, ["does not match the function", "requires ['text']"]),
        ({"class_name": "leaves.X"}, ["Importing 'leaves.X' failed: SystemExit"]),
        ({"class_name": "here.Fragile", "tool_schema": SCHEMA}, ["creating the tool failed: RuntimeError: no licence"]),
        ({**ECHO, "tool_schema": {"type": "function"}}, ["missing key 'function'"]),
        ({**ECHO, "config": {"times": "${oc.env:NOT_SET_ANYWHERE}"}}, ["NOT_SET_ANYWHERE", "tools[1].config.times"]),
        ({**ECHO, "config": {"times": "???"}}, ["tools[1].config.times"]),
        (ECHO, ["tool 1 has the same name, 'echo'", "Rename one"]),
        ("here.Echo", ["should be a valid dictionary"]),
    ],
)
def test_error_names_file_entry_and_fix(tmp_path: Path, entry: Any, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"tools": [ECHO, entry]})
    message = str(caught.value)
    assert str(tmp_path / "tools.yaml") in message
    assert "tool 2" in message or "tools[1]" in message
    for part in messages:
        assert part in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no list `tools`"),
        ("tools:", "has no list `tools`"),
        ("tools: {a: 1}", "has no list `tools`"),
        ("- a", "has no list `tools`"),
        ("tools: []\ntool: []", "unknown key 'tool'"),
        ("tools: [", "invalid YAML"),
    ],
)
def test_invalid_file_is_rejected(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 'tools.yaml'}: ")
    assert message in str(caught.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("tools: [{class_name: h\xe9}]".encode("latin-1"))
    for path in (tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match=str(path)):
            initialize_tools_from_config(path)


def test_empty_config_key_is_empty_config(tmp_path: Path) -> None:
    assert load(tmp_path, "tools:\n  - class_name: here.shout\n    config:\n")[0].name == "shout"


def test_each_load_creates_new_tools(tmp_path: Path) -> None:
    entry = {"tools": [{"class_name": "here.shout"}]}
    assert load(tmp_path, entry)[0].instances is not load(tmp_path, entry)[0].instances


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file not found"):
        initialize_tools_from_config(tmp_path / "none.yaml")


def test_import_failure_is_explained(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("import not_installed_anywhere")
    with pytest.raises(
        ConfigError, match=r"tool 1 \(broken_module\.X\): .*No module named 'not_installed_anywhere'.*Install it"
    ):
        load(tmp_path, {"tools": [{"class_name": "broken_module.X"}]})
    (tmp_path / "raising_module.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"Importing 'raising_module\.X' failed: ZeroDivisionError"):
        load(tmp_path, {"tools": [{"class_name": "raising_module.X"}]})
