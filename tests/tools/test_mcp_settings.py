"""Settings of MCP servers, conversion of results, and the identity of a run with MCP tools."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp_types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from toolroll import ConfigError, InfraFault, MissingExtra, PolicyFault, ResourceLimits, initialize_tools_from_config
from toolroll.run.config import RunConfig
from toolroll.run.run_coordinator import lock_directory, mcp_identity
from toolroll.run.run_lock import RunLock
from toolroll.run.sample_worker import SampleWorker, load_tools
from toolroll.tools.mcp import server as server_module
from toolroll.tools.mcp.connection import ListedTool
from toolroll.tools.mcp.content import to_response
from toolroll.tools.mcp.mcp_tool import McpTool
from toolroll.tools.mcp.settings import McpServerSettings

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, ListedTool]]:
    """Return what servers list, by command or URL. They are not started."""
    known = {
        "one": {"search": ListedTool("search", "Search.", SCHEMA), "open": ListedTool("open", None, {})},
        "two": {"search": ListedTool("search", "Search more.", SCHEMA)},
    }
    monkeypatch.setattr(server_module, "_servers", {})
    monkeypatch.setattr(server_module, "LISTING_LIFETIME_S", 0)
    monkeypatch.setattr(
        server_module.McpServer, "list_tools", lambda self: known[self.settings.command or self.settings.url]
    )
    return known


def load(tmp_path: Path, *entries: dict[str, Any]) -> list[McpTool]:
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": list(entries)}))
    return [tool for tool in initialize_tools_from_config(path) if isinstance(tool, McpTool)]


def names(tools: list[McpTool]) -> list[str]:
    return [tool.name for tool in tools]


@pytest.mark.usefixtures("listings")
def test_entry_exposes_all_tools_or_the_named_ones(tmp_path: Path) -> None:
    assert names(load(tmp_path, {"config": {"type": "mcp", "command": "one"}})) == ["search", "open"]
    [tool] = load(tmp_path, {"config": {"type": "mcp", "command": "one", "tools": ["open"]}})
    assert tool.tool_schema.model_dump() == {
        "type": "function",
        "function": {"name": "open", "description": "", "parameters": {"type": "object", "properties": {}}},
    }


@pytest.mark.usefixtures("listings")
@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"config": {"type": "mcp"}}, "set either `command` or `url`"),
        ({"config": {"type": "mcp", "command": "one", "url": "two"}}, "set either `command` or `url`"),
        ({"config": {"type": "mcp", "url": "two", "args": ["x"]}}, "need a `command`"),
        ({"config": {"type": "mcp", "command": "one", "headers": {"A": "b"}}}, "need a `url`"),
        ({"config": {"type": "mcp", "command": "one", "tools": ["serch"]}}, "Did you mean 'search'"),
        (
            {"config": {"type": "mcp", "command": "one", "tools": {"search": {"hidden": ["q"]}}}},
            "Unknown argument 'q'. Available arguments: query",
        ),
        ({"config": {"type": "mcp", "command": "one"}, "class_name": "my.Tool"}, "cannot be used with `type: mcp`"),
        ({"config": {"type": "mcp", "command": "one"}, "tool_schema": {}}, "come from the server"),
    ],
)
def test_invalid_entry_is_refused(tmp_path: Path, entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, entry)
    assert problem in str(error.value)


@pytest.mark.usefixtures("listings")
def test_tools_of_two_servers_need_different_names(tmp_path: Path) -> None:
    one = {"config": {"type": "mcp", "command": "one", "tools": ["search"]}}
    two = {"config": {"type": "mcp", "command": "two"}}
    with pytest.raises(ConfigError, match="has the same name, 'search'"):
        load(tmp_path, one, two)
    two["config"]["tools"] = {"search": {"name": "search_more"}}  # type: ignore[index]
    assert names(load(tmp_path, one, two)) == ["search", "search_more"]


@pytest.mark.usefixtures("listings")
def test_entry_of_verl_loads_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mcp_server.json").write_text(json.dumps({"mcpServers": {"first": {"url": "one", "auth_token": "t"}}}))
    entry: dict[str, Any] = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"rate_limit": 120, "timeout": 20, "type": "mcp"},
        "mcp": {
            "mcp_servers_config_path": str(tmp_path / "mcp_server.json"),
            "tool_selected_list": ["search"],
        },
    }
    [tool] = load(tmp_path, entry)
    assert tool.name == "search"
    assert tool.limits == ResourceLimits(resource="mcp_server.json", rates={"requests": 120})
    assert tool.server.settings.headers == {"Authorization": "Bearer t"}
    assert tool.server.settings.transport == "sse"
    with pytest.raises(ConfigError, match=r"rate_limit.*add `rates: \{requests: 120\}` to `limits`"):
        load(tmp_path, {**entry, "limits": {"limit": 3}})
    entry["mcp"]["tool_selected_list"] = ["serch"]
    with pytest.raises(ConfigError, match="Unknown tool 'serch'"):
        load(tmp_path, entry)


@pytest.mark.usefixtures("listings")
def test_several_servers_of_verl_prefix_their_tools(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = {"url": "one", "description": "Searches.", "timeout": 30000}
    servers = {"mcpServers": {"first": first, "second": {"command": "two"}}}
    (tmp_path / "servers.json").write_text(json.dumps(servers))
    entry = {
        "class_name": "verl.tools.mcp_base_tool.MCPBaseTool",
        "config": {"type": "mcp"},
        "mcp": {"mcp_servers_config_path": str(tmp_path / "servers.json")},
    }
    assert names(load(tmp_path, entry)) == ["first_search", "first_open", "second_search"]
    assert "server 'first': ignored description, timeout" in caplog.text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        ("{", "invalid JSON"),
        ("{}", "has no servers"),
        ('{"mcpServers": {"a": 1}}', "mapping"),
    ],
)
def test_invalid_server_file_of_verl_is_refused(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "servers.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, {"config": {"type": "mcp"}, "mcp": {"mcp_servers_config_path": str(path)}})


@pytest.mark.usefixtures("listings")
def test_limits_of_an_entry_are_shared_by_its_tools(tmp_path: Path) -> None:
    config = {"type": "mcp", "command": "one"}
    tools = load(tmp_path, {"config": config, "limits": {"limit": 3}})
    assert [tool.limits for tool in tools] == [ResourceLimits(resource="one", limit=3)] * 2


@pytest.mark.usefixtures("listings")
def test_pickled_tool_uses_the_same_server(tmp_path: Path) -> None:
    [tool] = load(tmp_path, {"config": {"type": "mcp", "command": "two"}})
    assert pickle.loads(pickle.dumps(tool)).server is tool.server


@pytest.mark.usefixtures("listings")
def test_results_with_images_are_not_reused_without_them(tmp_path: Path) -> None:
    config = {"type": "mcp", "command": "two"}
    [text], [images] = (load(tmp_path, {"config": {**config, "returns_images": images}}) for images in (False, True))
    assert text.fingerprint != images.fingerprint


@pytest.mark.usefixtures("listings")
@pytest.mark.parametrize(("server", "setting"), [({"command": "two"}, "env"), ({"url": "two"}, "headers")])
def test_results_depend_on_env_and_headers_but_not_on_secrets(
    tmp_path: Path, server: dict[str, str], setting: str
) -> None:
    def fingerprint(**values: str) -> str | None:
        [tool] = load(tmp_path, {"config": {"type": "mcp", **server, setting: values}})
        assert "wiki" not in str(tool.config)
        return tool.fingerprint

    assert fingerprint(INDEX="wiki-2018") != fingerprint(INDEX="wiki-2024")
    for secret in ("Authorization", "Cookie", "X-API-Key", "SEARCH_TOKEN"):
        assert fingerprint(INDEX="wiki-2018", **{secret: "s"}) == fingerprint(INDEX="wiki-2018")


def test_null_in_a_schema_is_no_value(tmp_path: Path, listings: dict[str, dict[str, ListedTool]]) -> None:
    listings["two"]["search"] = ListedTool("search", "Search.", {"properties": None, "required": None})
    [tool] = load(tmp_path, {"config": {"type": "mcp", "command": "two"}})
    assert tool.tool_schema.function.parameters.model_dump() == {"type": "object", "properties": {}, "required": []}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": []}, "'properties' of its schema: expected dict, got list"),
        ({"required": "query"}, "'required' of its schema: expected list, got str"),
        ({"required": [["query"]]}, "parameters.required.0"),
        ({"properties": {"query": None}}, "parameters.properties.query"),
    ],
)
def test_invalid_schema_of_a_server_is_refused(
    tmp_path: Path, listings: dict[str, dict[str, ListedTool]], schema: dict[str, Any], problem: str
) -> None:
    listings["two"]["search"] = ListedTool("search", "Search.", schema)
    with pytest.raises(ConfigError, match=rf"tool 1: MCP server two, tool 'search': .*{problem}"):
        load(tmp_path, {"config": {"type": "mcp", "command": "two"}})


def test_changed_schema_stops_a_resumed_run(tmp_path: Path, listings: dict[str, dict[str, ListedTool]]) -> None:
    entry = {"config": {"type": "mcp", "command": "two"}}

    def start() -> None:
        RunLock(tmp_path / "run", {"n": 1, **mcp_identity(load(tmp_path, entry))}).release()

    start()
    (tmp_path / "run/0.jsonl").write_text("{}\n")
    start()
    listings["two"]["search"] = ListedTool("search", "Search less.", SCHEMA)
    with pytest.raises(ConfigError, match=r"a run with mcp_tools\.search='\w{16}', but this run has"):
        start()


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    """Return the config of a run with the server `two`."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Search."}\n')
    (tmp_path / "tools.yaml").write_text("tools: [{config: {type: mcp, command: two}}]")
    return RunConfig.model_validate({
        "engine": {"kind": "openai", "urls": "http://127.0.0.1:9", "model": "none"},
        "tools": str(tmp_path / "tools.yaml"),
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "rollout_data_dir": str(tmp_path / "run"),
    })  # fmt: skip


def test_changed_schema_stops_a_worker(run_config: RunConfig, listings: dict[str, dict[str, ListedTool]]) -> None:
    identity = mcp_identity(load_tools(run_config))
    SampleWorker(run_config, separate_directories=True, mcp_identity=identity)
    listings["two"]["search"] = ListedTool("search", "Search less.", SCHEMA)
    with pytest.raises(ConfigError, match=r"started with mcp_tools\.search='\w{16}', but a worker found mcp_tools\.s"):
        SampleWorker(run_config, separate_directories=True, mcp_identity=identity)


def test_resumed_run_names_the_entry_that_is_invalid(
    run_config: RunConfig, listings: dict[str, dict[str, ListedTool]]
) -> None:
    listings["two"]["search"] = ListedTool("search", "Search.", {"properties": []})
    with pytest.raises(ConfigError, match=r"tools\.yaml, tool 1: MCP server two"):
        lock_directory(run_config)


def test_run_without_mcp_tools_resumes_one_of_an_earlier_version(tmp_path: Path) -> None:
    RunLock(tmp_path, {"n": 1}).release()
    (tmp_path / "0.jsonl").write_text("{}\n")
    RunLock(tmp_path, {"n": 1, **mcp_identity([])}).release()


def test_results_are_text_in_the_order_of_their_parts() -> None:
    text = TextResourceContents(uri="file:///a", text="inside")
    result = CallToolResult(
        content=[
            TextContent(type="text", text="first"),
            AudioContent(type="audio", data="", mime_type="audio/wav"),
            ResourceLink(type="resource_link", name="log", uri="file:///log"),
            EmbeddedResource(type="resource", resource=text),
        ]
    )
    response = to_response("read", result, returns_images=False)
    assert response.text == "first\n(audio: audio/wav)\nlog: file:///log\ninside"


def test_structured_content_alone_becomes_json() -> None:
    result = CallToolResult(content=[], structured_content={"city": "Zürich", "degrees": 21})
    assert to_response("weather", result, returns_images=False).text == '{"city": "Zürich", "degrees": 21}'


def test_error_without_text_names_the_tool() -> None:
    with pytest.raises(PolicyFault, match="The tool 'read' failed without a message"):
        to_response("read", CallToolResult(content=[], is_error=True), returns_images=False)


def test_invalid_image_is_an_infra_fault() -> None:
    result = CallToolResult(content=[ImageContent(type="image", data="?", mime_type="image/png")])
    with pytest.raises(InfraFault, match="invalid image"):
        to_response("draw", result, returns_images=True)


def test_missing_sdk_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtra, match=r"toolroll\[mcp\]"):
        load(tmp_path, {"config": {"type": "mcp", "command": "one"}})


@pytest.mark.parametrize("value", ["Bearer k1\nX: 1", "Bearer k1\u00e9"])
def test_invalid_header_is_refused_without_its_value(tmp_path: Path, value: str) -> None:
    config = {"type": "mcp", "url": "https://host/mcp", "headers": {"Authorization": value}}
    with pytest.raises(ConfigError, match="'Authorization' has characters that are not printable ASCII") as error:
        load(tmp_path, {"config": config})
    assert "k1" not in str(error.value)


def test_label_hides_credentials() -> None:
    command = McpServerSettings(command="serve", args=("--api-key", "k1", "--token=t1", "--port", "80"))
    assert command.label == "serve --api-key '***' '--token=***' --port 80"
    assert McpServerSettings(url="https://me:secret@host/mcp").label == "https://***@host/mcp"
