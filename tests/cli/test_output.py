"""No text of foreign origin controls the terminal, whichever command prints it."""

import ast
import asyncio
import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from record_samples import trajectory
from typer.main import get_command

import toolroll.cli
from toolroll.cli import app as cli
from toolroll.cli import limiter, output, sandbox, sandbox_probe
from toolroll.errors import PolicyFault
from toolroll.limiter.ledger.ledger import LimiterStatus
from toolroll.records.writer import RecordWriter
from toolroll.sandbox.execution import Execution, ExecutionOutcome
from toolroll.sandbox.load_probe import LoadStep, ServerFacts

EVIL = "\x1b]0;EVIL\x07\x1b]52;c;RVZJTA==\x1b\\\x1b[2J\x1b[7;99mEVIL\x9b31m\u202e\u2066[bold]EVIL"
"""Title, clipboard, clear screen, style, 8-bit CSI, bidirectional overrides, rich markup."""
RICH_SEQUENCE = re.compile(r"\x1b\[(?:[0-9;]*m|[0-9]*[ABK]|\?25[lh])")
"""Sequences that rich writes: styles, moving the cursor, hiding it."""
STYLE = re.compile(r"\x1b\[[0-9;]*m")
UNSAFE = re.compile("[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\x1b")
MODULE = '''
from toolroll import BaseTool, tool
from toolroll.errors import EngineUnavailable, PolicyFault
from toolroll.rollout.engines.base import ChatReply, FinishType, GenerationTimings
from toolroll.schemas import FunctionCall, Message, ToolCall

EVIL = {evil!r}

class Talker:
    """Calls a tool with a hostile name, then fails with a hostile message."""

    def __init__(self, urls):
        pass

    async def chat(self, request_id, messages, tools, sampling_params, *, deadline=None, affinity=None):
        if messages[-1].role == "tool":
            raise EngineUnavailable(EVIL)
        call = ToolCall(id="1", function=FunctionCall(name=EVIL, arguments={{}}))
        answer = Message(role="assistant", content=EVIL, tool_calls=[call])
        return ChatReply(message=answer, finish=FinishType.STOP, timings=GenerationTimings(total=0.0))

    async def close(self):
        pass

def good() -> str:
    return EVIL

@tool
def bad() -> str:
    """Fail."""
    raise PolicyFault(EVIL)

good.__doc__ = EVIL
good = tool(good)
'''


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write hostile records and configs, and replace the parts that need a cluster or a sandbox by hostile ones."""
    with RecordWriter(tmp_path / "records") as writer:
        for number in range(4):
            one = trajectory(number)
            writer.append(one, 1)
        call = {"tool": EVIL, "fault": "policy", "error": EVIL, "seconds": 1.0, "metrics": {}}
        more = {"format": "toolroll/1", "finish_reason": EVIL, "outcome": EVIL, "calls": [call], "error": EVIL}
        writer.append({"input": EVIL, "output": EVIL, "group": EVIL, "sample": 0, **more}, 2)
    with (tmp_path / "records" / "2.jsonl").open("ab") as file:
        file.write(b'"\x1b]0;EVIL\x07"\n')
    name = f"hostile_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(evil=EVIL))
    tools = [{"class_name": f"{name}.{tool}"} for tool in ("good", "bad")]
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": tools}))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": EVIL}) + "\n" + json.dumps({"prompt": ""}) + "\n")
    config = {
        "engine": {"kind": f"{name}.Talker", "urls": []},
        "tools": "tools.yaml",
        "data": {"path": "rows.jsonl"},
        "rollout_data_dir": "run",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    (tmp_path / "bad.yaml").write_text(json.dumps({**config, EVIL: 1}))
    monkeypatch.setattr("toolroll.run.sample_worker.SAMPLE_RETRY_DELAYS_S", ())
    numbers: dict[str, Any] = dict.fromkeys(LimiterStatus._fields, 1)
    amounts = {name: {EVIL: 1.0} for name in ("rates", "credit", "budgets", "spent")}
    status = LimiterStatus(**{**numbers, **amounts, "max": 2, "reason": EVIL})
    monkeypatch.setattr(limiter, "_statuses", lambda address: {EVIL: status})
    monkeypatch.setattr("toolroll.limiter.token_bucket.set_limit", lambda *args, **kwargs: None)
    monkeypatch.setattr("toolroll.limiter.registry.remove_limiter", lambda resource: None)
    unset = dict.fromkeys(field.name for field in fields(Execution))
    given = {"outcome": ExecutionOutcome.FAILED, "stdout": f"{EVIL}\n", "stderr": EVIL}
    execution = Execution(**{**unset, **given})  # type: ignore[arg-type]

    async def run_once(*arguments: Any, **options: Any) -> Execution:
        return execution

    async def measure(*arguments: Any) -> Any:
        console = arguments[-1]
        server = ServerFacts(alone=1.0, version=EVIL, tier=EVIL)
        sandbox_probe._print_server(console, EVIL, server)
        step = LoadStep(concurrency=1, throughput=0.0, errors={EVIL: 1})
        console.print(sandbox_probe._table([step]))
        return server, [step]

    async def serve(settings: Any, **options: Any) -> None:
        logging.getLogger("toolroll.sandbox").warning("A program wrote %s", EVIL)
        await asyncio.sleep(0)

    monkeypatch.setattr(sandbox, "_run_once", run_once)
    monkeypatch.setattr(sandbox, "_serve", serve)
    monkeypatch.setattr(sandbox_probe, "_measure", measure)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path


COMMANDS: dict[str, list[list[str]]] = {
    "demo": [["--no-view", "--directory", f"rows.jsonl/{EVIL.replace('/', '')}"]],
    "examples list": [[]],
    "examples copy": [[EVIL]],
    "tools list": [["tools.yaml"], ["tools.yaml", "--json"]],
    "tools schema": [["tools.yaml"], ["tools.yaml", EVIL]],
    "tools call": [["tools.yaml", "good"], ["tools.yaml", "bad"], ["tools.yaml", "good", "--json"]],
    "tools serve": [["tools.yaml", "--mcp", "--http", EVIL], [f"{EVIL}.yaml", "--mcp", "--http", "127.0.0.1:0"]],
    "limiter status": [[], ["--json"]],
    "limiter set": [[EVIL, "3"], [f"{EVIL}2", "3"], [EVIL, "--budget", f"{EVIL}=3"], [EVIL, "--rate", EVIL]],
    "limiter remove": [[EVIL], [f"{EVIL}2"]],
    "sandbox serve": [[]],
    "sandbox run": [["rows.jsonl"], ["rows.jsonl", "--json"]],
    "sandbox probe": [["http://127.0.0.1:1"]],
    "run": [["run.yaml"], ["run.yaml", "rollout_data_dir=run2", "--json"], ["bad.yaml"]],
    "records stats": [["records"], ["records", "--json"]],
    "records convert": [["records", f"{EVIL.replace('/', '')}.parquet"]],
    "records export": [["records", "--otlp", EVIL]],
    "records rescore": [
        ["records", "--rewards", "EVIL.f"],
        ["records", "--rewards", f"{EVIL}=math.floor"],
        ["records", "--rewards", f"{EVIL}=math.floor", "--json"],
    ],
    "records schema": [[]],
    "doctor": [[], [f"model{EVIL}"]],
    "view": [[f"records{EVIL}"]],
}
"""Arguments of every command, relative to the directory with the hostile files."""
SILENT = {"examples list", "records schema", "doctor"}
"""Commands that print no foreign text."""


def all_commands() -> set[str]:
    def walk(command: Any, path: tuple[str, ...]) -> Iterator[str]:
        if hasattr(command, "commands"):
            for name, child in command.commands.items():
                yield from walk(child, (*path, name))
        else:
            yield " ".join(path)

    return set(walk(get_command(cli.app), ()))


def test_every_command_is_tested() -> None:
    assert set(COMMANDS) == all_commands()


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_text_does_not_control_the_terminal(
    command: str, hostile: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest adds some
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for arguments in COMMANDS[command]:
        monkeypatch.setattr(sys, "argv", ["toolroll", *command.split(), *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        captured = capfd.readouterr()
        shown = captured.out + captured.err
        found = UNSAFE.search(RICH_SEQUENCE.sub("", shown).replace("\r", ""))
        assert found is None, shown[max(0, found.start() - 200) :]
        assert "\x1b[7;99m" not in shown
        assert "EVIL" in shown or command in SILENT, shown
        assert "Traceback" not in shown


def test_styles_of_rich_are_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    console = output.SafeConsole(force_terminal=True, color_system="standard", width=60, highlight=False)
    console.print(f"[red]{EVIL.replace('[bold]', '')}[/red]")
    shown = capsys.readouterr().out
    assert shown.startswith("\x1b[31m␛]0;EVIL␛]52;")
    assert UNSAFE.search(STYLE.sub("", shown)) is None


def test_json_keeps_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"text": f"{EVIL} 漢字 é"})
    shown = capsys.readouterr().out
    assert UNSAFE.search(shown) is None
    assert "漢字 é" in shown
    assert json.loads(shown) == {"text": f"{EVIL} 漢字 é"}


def test_traceback_is_sanitized(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError(EVIL)

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    shown = capsys.readouterr().err
    assert "RuntimeError: ␛]0;EVIL" in shown
    assert UNSAFE.search(shown) is None


def test_log_output_is_sanitized() -> None:
    record = logging.LogRecord("toolroll", logging.WARNING, "", 0, "Tool failed: %s", (EVIL,), None)
    assert UNSAFE.search(output.SafeFormatter().format(record)) is None
    try:
        raise PolicyFault(EVIL)
    except PolicyFault:
        record.exc_info = sys.exc_info()
    assert UNSAFE.search(output.SafeFormatter().format(record)) is None


def test_commands_print_only_through_the_output_module() -> None:
    """`typer.echo`, `print` and rich's own console would not sanitize."""
    for file in Path(toolroll.cli.__file__).parent.glob("*.py"):
        if file.name == "output.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("typer.echo", "typer.secho", "print", "Console", "sys.stdout.write"), (
                    f"{file.name}:{node.lineno} calls {name}"
                )
                if name in ("Live", "Progress"):
                    assert "console" in {keyword.arg for keyword in node.keywords}, f"{file.name}:{node.lineno}"
