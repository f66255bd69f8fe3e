"""Real MCP servers of npm and of PyPI, over stdio."""

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import doc_page
import psutil
import pytest
from mcp_servers import installed, processes_with, server_program, wait_until_gone

from toolroll import BaseTool, PolicyFault, ToolInstance, initialize_tools_from_config
from toolroll.tools.mcp.mcp_tool import load_mcp_tools
from toolroll.tools.mcp.settings import McpServerSettings
from toolroll.tools.mcp.stdio import ServerProcess

pytestmark = pytest.mark.process

FAULT_SERVER = Path(__file__).with_name("fault_server.py")


def load(**settings: Any) -> dict[str, BaseTool[Any]]:
    return {tool.name: tool for tool in load_mcp_tools({"type": "mcp", **settings})}


async def call(tool: BaseTool[Any], **arguments: Any) -> str:
    async with ToolInstance(tool) as instance:
        return (await instance.execute(arguments)).response.text or ""


def guards_of(marker: str) -> list[psutil.Process]:
    return [one for one in processes_with("server_guard.py") if marker in one.info["cmdline"]]


async def test_server_of_npm_answers() -> None:
    tools = load(command=server_program("mcp-server-everything"))
    assert await call(tools["echo"], message="hi") == "Echo: hi"
    assert '"conditions"' in await call(tools["get-structured-content"], location="New York")
    with pytest.raises(PolicyFault, match=r"'location' must be one of"):
        await call(tools["get-structured-content"], location="Rome")


async def test_server_of_pypi_answers() -> None:
    tools = load(command=str(installed()["python"]), args=["-m", "mcp_server_time", "--local-timezone", "UTC"])
    converted = await call(
        tools["convert_time"], source_timezone="Asia/Tokyo", time="09:00", target_timezone="Europe/Berlin"
    )
    assert "T09:00:00+09:00" in converted
    with pytest.raises(PolicyFault, match="Nowhere"):
        await call(tools["get_current_time"], timezone="Nowhere")


async def test_tools_of_a_trajectory_share_a_server_in_an_empty_directory() -> None:
    tools = load(command=server_program("mcp-server-filesystem"), args=["."], scope="trajectory")
    write, read = tools["write_file"], tools["read_text_file"]
    async with ToolInstance(write, "one") as writing, ToolInstance(read, "one") as reading:
        await writing.execute({"path": "note.txt", "content": "mine"})
        assert (await reading.execute({"path": "note.txt"})).response.text == "mine"
        async with ToolInstance(read, "two") as other:
            with pytest.raises(PolicyFault, match="no such file"):
                await other.execute({"path": "note.txt"})
        directories = [Path(one.cwd()) for one in processes_with("mcp-server-filesystem") if one.name() == "node"]
        directory = next(one for one in directories if (one / "note.txt").exists())
    assert not directory.exists()


@pytest.mark.sandbox
async def test_isolated_server_of_the_docs_has_a_private_directory(root: Path, tmp_path: Path) -> None:
    [entry] = [body for *_, body in doc_page.BLOCK.findall((root / "docs/mcp.md").read_text()) if "isolate:" in body]
    assert "/opt/servers" in entry
    (tmp_path / "tools.yaml").write_text(entry.replace("/opt/servers", str(installed()["node"].parents[1])))
    tools = {tool.name: tool for tool in initialize_tools_from_config(tmp_path / "tools.yaml")}
    async with (
        ToolInstance(tools["list_allowed_directories"], "one") as allowed,
        ToolInstance(tools["write_file"], "one") as write,
        ToolInstance(tools["read_text_file"], "one") as read,
        ToolInstance(tools["read_text_file"], "two") as other,
    ):
        directory = ((await allowed.execute({})).response.text or "").splitlines()[-1]
        assert directory.startswith("/tmp/")
        file = f"{directory}/note.txt"
        await write.execute({"path": file, "content": "mine"})
        assert (await read.execute({"path": file})).response.text == "mine"
        assert not Path(file).exists()
        with pytest.raises(PolicyFault, match="no such file"):
            await other.execute({"path": file})
        with pytest.raises(PolicyFault, match="Access denied"):
            await read.execute({"path": "/etc/hostname"})


def toolroll(*arguments: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command, which finds the servers of npm and the engine of `mcp_engine.py`."""
    path = os.pathsep.join([str(installed()["node"]), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parent), "COLUMNS": "200"}
    command = [sys.executable, "-m", "toolroll", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


def test_example_runs_as_documented(tmp_path: Path) -> None:
    assert "run.yaml" in toolroll("examples", "copy", "mcp", directory=tmp_path).stdout
    settings = ("engine.kind=mcp_engine.McpEngine", "model=null", "n=2")
    done = toolroll("run", "mcp/run.yaml", *settings, "--json", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["complete"], result["done"]) == (True, 8)
    records = [json.loads(line) for line in (tmp_path / "mcp/rollouts/0.jsonl").read_text().splitlines()]
    assert [record["score"] for record in records] == [1.0] * 8, [record["output"] for record in records]
    assert all(call["fault"] is None for record in records for call in record["calls"])


def test_changed_schema_stops_the_command_that_resumes_a_run(tmp_path: Path) -> None:
    description, records = tmp_path / "description", tmp_path / "records/0.jsonl"
    server = {"type": "mcp", "command": sys.executable, "args": [str(FAULT_SERVER)], "tools": ["echo", "pid"]}
    server["env"] = {"DESCRIPTION": str(description)}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"config": server}]}))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say hello."}\n{"prompt": "Say hello again."}\n')
    engine = {"kind": "mcp_engine.McpEngine", "urls": []}
    config = {"engine": engine, "tools": "tools.yaml", "data": {"path": "rows.jsonl"}, "rollout_data_dir": "records"}
    (tmp_path / "run.yaml").write_text(json.dumps(config))

    description.write_text("Return a text.")
    first = toolroll("run", "run.yaml", directory=tmp_path)
    assert first.returncode == 0, first.stderr
    one, _ = records.read_text().splitlines(keepends=True)
    records.write_text(one)  # as if the run had been interrupted
    description.write_text("Return another text.")
    stopped = toolroll("run", "run.yaml", directory=tmp_path)
    assert stopped.returncode == 2
    assert re.search(r"belongs to a run with mcp_tools\.echo='\w+', but this run has mcp_tools\.echo='", stopped.stderr)
    assert "mcp_tools.pid" not in stopped.stderr, "this tool has not changed"
    assert records.read_text() == one


def test_no_process_remains_if_the_loop_ends_during_a_stop() -> None:
    seconds = str(5_000_000_000 + os.getpid())

    async def stop_halfway() -> None:
        script = f"sleep {seconds} & exec sleep {seconds}"  # it ignores the end of stdin
        process = ServerProcess(McpServerSettings(command="sh", args=("-c", script)))
        await process.start()
        while [one.name() for one in processes_with(seconds)].count("sleep") < 2:
            await asyncio.sleep(0.05)
        stopping = asyncio.create_task(process.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()

    asyncio.run(stop_halfway())
    assert processes_with(seconds) == []


def test_closed_event_loops_are_freed() -> None:
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    echo = load(command=sys.executable, args=[str(FAULT_SERVER)], tools=["echo"])["echo"]

    async def call_echo() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        assert await call(echo, text="hi") == "hi"

    for _ in range(3):
        asyncio.run(call_echo())
    gc.collect()
    assert sum(loop() is not None for loop in loops) <= 1


def test_no_process_remains_after_the_command_line(tmp_path: Path) -> None:
    marker = str(tmp_path)
    config = tmp_path / "tools.yaml"
    config.write_text(
        f"tools:\n  - config: {{type: mcp, command: {sys.executable}, args: [{FAULT_SERVER}, {marker}], tools: [hang]}}"
    )
    command = [sys.executable, "-m", "toolroll", "tools", "call", str(config), "hang"]
    for number in (signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not guards_of(marker):
                assert process.poll() is None
            process.send_signal(number)
        assert wait_until_gone(marker, timeout_s=20) == []
