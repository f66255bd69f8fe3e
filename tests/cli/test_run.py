"""The `toolroll run` command."""

import fcntl
import io
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tmux_terminal import Terminal

from toolroll.cli.run_display import (
    RateMeter,
    StartingPhase,
    format_duration,
    format_percent,
    status_line,
    status_panel,
    summary_tables,
)
from toolroll.records.stats.alarms import AlarmCounts, RunAlarms
from toolroll.run.aggregates import RunAggregates, SampleOutcome
from toolroll.run.status import RunRates, RunSnapshot

MODULE = '''
import asyncio
from toolroll import tool
from toolroll.errors import EngineUnavailable
from toolroll.rollout.engines.base import ChatReply, FinishType, GenerationTimings
from toolroll.schemas import FunctionCall, Message, ToolCall

class Talker:
    """Calls the tool, and answers with its result."""

    def __init__(self, urls, delay=0.0, down=False):
        self.delay, self.down = delay, down

    async def chat(self, request_id, messages, tools, sampling_params, *, deadline=None, affinity=None):
        await asyncio.sleep(self.delay)
        if self.down:
            raise EngineUnavailable("The engine at [bold]http://nowhere[/bold] is down.")
        if messages[-1].role == "user":
            call = ToolCall(id="1", function=FunctionCall(name="add", arguments={"a": 40, "b": 2}))
            answer = Message(role="assistant", content="", tool_calls=[call])
        else:
            answer = Message(role="assistant", content=f"It is #### {messages[-1].content}")
        return ChatReply(message=answer, finish=FinishType.STOP, timings=GenerationTimings(total=self.delay))

    async def close(self):
        pass

@tool
def add(a: int, b: int) -> int:
    """Add."""
    print("printed by a tool")
    return a + b
'''


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write the config of a run with ten problems, half of which the model solves."""
    name = f"talker_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"class_name": f"{name}.add"}]}))
    rows = [{"question": f"What is 40 + {2 + n % 2}?", "answer": f"#### {42 + n % 2}"} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "engine": {"kind": f"{name}.Talker", "urls": []},
        "tools": "tools.yaml",
        "data": {"path": "rows.jsonl", "prompt": "question", "ground_truth": "answer"},
        "n": 2,
        "rewards": {"functions": {"right": "toolroll.run.reward_functions.gsm8k_strict"}},
        "rollout_data_dir": "records",
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


COMMAND = Path(sys.executable).with_name("toolroll")
ENVIRONMENT = {**os.environ, "COLUMNS": "80"}


def toolroll(*arguments: Any, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
    command = [COMMAND, "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, **kwargs)


@pytest.mark.process
def test_second_run_of_a_complete_run_does_nothing(config: Path) -> None:
    done = toolroll(config)
    assert done.returncode == 0, done.stderr
    assert "20 of 20 done" in done.stdout or "20 trajectories of 10 prompts" in done.stdout
    for text in ("pass@1 50.0 %", "pass@2 50.0 %", "mean 0.500 · solved 10 of 20", "stop 20", "2.0 turns · 1.0 calls"):
        assert text in done.stdout
    records = config.parent / "records"
    assert f"toolroll view {records}" in done.stdout.replace("\n", "")
    assert len((records / "0.jsonl").read_text().splitlines()) == 20
    again = toolroll(config)
    assert again.returncode == 0, again.stderr
    assert "20 trajectories of 10 prompts in 0:0" in again.stdout
    assert "20 of them resumed" in again.stdout
    assert len((records / "0.jsonl").read_text().splitlines()) == 20


@pytest.mark.process
def test_json_output(config: Path) -> None:
    done = toolroll(config, "n=1", "data.limit=4", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["complete"], result["done"], result["total"], result["resumed"]) == (True, 4, 4, 0)
    assert result["rollout_data_dir"] == str(config.parent / "records")
    assert result["tally"]["pass_at_k"] == {"1": 0.5}
    assert result["tally"]["calls"] == 4
    assert "printed by a tool" in done.stderr
    assert "4 done" in done.stderr or "of 4 done" in done.stderr


@pytest.mark.process
def test_interrupted_run_resumes(config: Path) -> None:
    arguments = [config, "engine.options.delay=0.2", "max_in_flight=2", "--json"]
    process = subprocess.Popen([COMMAND, "run", *arguments], stdout=-1, stderr=-1, text=True, env=ENVIRONMENT)
    records = config.parent / "records" / "0.jsonl"
    ends = time.monotonic() + 30
    while time.monotonic() < ends and not (records.exists() and records.read_text().count("\n") >= 4):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    result = json.loads(out)
    assert not result["complete"]
    assert 4 <= result["done"] < 20
    assert f"Stopped with {result['done']} of 20 done. To resume, run the same command again:" in err
    assert f"toolroll run {config} engine.options.delay=0.2 max_in_flight=2 --json" in err
    assert "Traceback" not in err
    after = toolroll(config, "--json")
    assert after.returncode == 0, after.stderr
    resumed = json.loads(after.stdout)
    assert (resumed["done"], resumed["resumed"]) == (20, result["done"])
    assert records.read_text().count("\n") == 20


@pytest.mark.process
def test_full_disk_is_reported_on_one_line(config: Path) -> None:
    records = config.parent / "records" / "0.jsonl"
    records.parent.mkdir()
    records.symlink_to("/dev/full")
    done = toolroll(config, "--json")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors == [
        f"error: Cannot write records to {records}: No space left on device. Free disk space or make the directory "
        "writable, then run the same command again to resume."
    ]
    assert "Traceback" not in done.stderr
    records.unlink()
    assert json.loads(toolroll(config, "--json").stdout)["done"] == 20


@pytest.mark.process
def test_panel_in_a_terminal(config: Path) -> None:
    """The panel is redrawn in place, fits the terminal, and stays at the end."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "NO_COLOR", "CI")}
    environment["TERM"] = "xterm-256color"
    command = [COMMAND, "run", config, "engine.options.delay=0.3", "max_in_flight=8"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    seen = b""
    while True:
        try:
            seen += os.read(controller, 65536)
        except OSError:  # the process has ended
            break
    assert process.wait(20) == 0
    os.close(controller)
    text = seen.decode()
    assert "\x1b[1A" in text, "the cursor moves up to redraw the panel"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n")
    drawn, _, commands = plain.partition("Records: ")
    assert max(len(row) for row in drawn.splitlines()) <= 80
    assert f"toolroll view {config.parent / 'records'}" in commands, "the command is not wrapped, so it can be copied"
    for name in ("running", "queued", "tokens/s", "calls/s", "in flight", "reward", "ended by stop 20"):
        assert name in plain
    assert "20 of 20   100.0 %" in plain
    assert "pass@2 50.0 %" in plain


@pytest.mark.process
def test_panel_is_whole_after_ctrl_c(config: Path, terminal: Terminal) -> None:
    """Ctrl+C is not echoed, as it would shift the lines that are redrawn and leave a border behind."""
    arguments = ("engine.options.delay=0.5", "max_in_flight=1")
    terminal.run(str(COMMAND), "run", config.name, *arguments, folder=config.parent)
    terminal.sees("1 of 20")
    terminal.press("C-c")
    terminal.sees("To resume, run the same command again:", "exit status 130")
    everything = terminal.scrolled
    assert "Stopping; completed samples are saved." in everything
    assert (everything.count("╭"), everything.count("╰")) == (1, 1), everything
    assert "^C" not in everything


@pytest.mark.process
def test_phases_before_the_run_are_named(config: Path, terminal: Terminal) -> None:
    """A server that accepts connections and does not answer is one that still loads its model."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        engine = ("engine.kind=sglang", f"engine.urls={url}", "engine.options={}")
        terminal.run(str(COMMAND), "run", config.name, *engine, "model=none", folder=config.parent)
        terminal.sees("Waiting for the engine, 0:0")
        done = toolroll(config, *engine, "model=none")
        assert done.stdout.startswith("Waiting for the engine …\n"), "in a log, if a phase takes long"
    quick = toolroll(config, "n=1", "data.limit=1", f"rollout_data_dir={config.parent}/quick")
    assert not re.search("Checking|Waiting", quick.stdout)


@pytest.mark.process
def test_exit_status_is_1_if_all_trajectories_failed(config: Path) -> None:
    script = (
        "import sys; from toolroll.run import sample_worker; sample_worker.SAMPLE_RETRY_DELAYS_S = ()\n"
        "from toolroll.cli.app import main\n"
        f"sys.argv = ['toolroll', 'run', {str(config)!r}, 'engine.options.down=true', 'data.limit=2', 'n=1']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == 1, done.stderr
    assert "infra 2" in done.stdout
    assert "2 × The engine at [bold]http://nowhere[/bold] is down." in done.stdout
    assert "no reward" in done.stdout


@pytest.mark.process
def test_run_stops_if_everything_fails_in_the_same_way(config: Path) -> None:
    script = (
        "import sys; from toolroll.run import sample_worker; sample_worker.SAMPLE_RETRY_DELAYS_S = ()\n"
        "from toolroll.cli.app import main\n"
        f"sys.argv = ['toolroll', 'run', {str(config)!r}, 'engine.options.down=true', 'n=100', 'max_in_flight=8',"
        " 'engine.options.delay=0.05']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == 1, done.stderr
    assert "The first 32 trajectories failed with the same error: The engine at [bold]http://nowhere" in done.stderr
    assert "run the same command again" in done.stderr
    recorded = sum(file.read_bytes().count(b"\n") for file in config.parent.glob("records/*.jsonl"))
    assert 32 <= recorded < 1000, "it stopped early"
    again = toolroll(config, "n=100", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["tally"]["outcomes"] == {"ok": 1000}
    assert f"{recorded} samples failed before and are attempted again." in again.stderr


@pytest.mark.process
def test_exception_in_a_reward_function_is_shown_and_stops_the_run(config: Path) -> None:
    (config.parent / "my_rewards.py").write_text("def score(trajectory):\n    return trajectory.extra['anwser']\n")
    done = toolroll(config, "rewards.functions.mine=my_rewards.score", "n=50")
    assert done.returncode == 1
    place = f"{config.parent / 'my_rewards.py'}:2, in score"
    assert f"Reward function 'mine' failed: KeyError: 'anwser' ({place})" in done.stderr
    assert "The first 4 trajectories failed with the same error" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, "with the traceback, once"
    assert "return trajectory.extra['anwser']" in done.stderr


def serve_json(answers: dict[str, Any]) -> tuple[ThreadingHTTPServer, str]:
    """Serve JSON documents by path until `shutdown`. Return the server and its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path in answers
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "answers", "message"),
    [
        (
            "sglang",
            {"/v1/ping": {"ping": "pong"}},
            "is a sandbox, not SGLang. Set engine.urls to the address of SGLang.",
        ),
        (
            "sglang",
            {"/version": {"version": "0.32"}},
            "is vLLM, not SGLang. Set engine.urls to the address of SGLang, or",
        ),
        ("vllm", {"/model_info": {"model_path": "m"}}, "is SGLang, not vLLM."),
        ("vllm", {"/": "a web page"}, "answers, but it is not vLLM."),
        ("openai", {"/v1/ping": "pong"}, "is a sandbox, not a chat server."),
    ],
)
def test_another_server_at_the_address_is_recognised(config: Path, kind: str, answers: Any, message: str) -> None:
    server, url = serve_json(answers)
    try:
        done = toolroll(config, f"engine.kind={kind}", f"engine.urls={url}", "engine.model=m")
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 2
    assert f"{url} (engine) {message}" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["n"], "Invalid setting 'n'. Expected key=value"),
        (["n=none"], "n: Input should be a valid integer"),
        (["modle=x"], "unknown key 'modle' (did you mean 'model'?)"),
        (
            ["limits.max_respons_len=9"],
            "unknown key 'limits.max_respons_len' (did you mean 'limits.max_response_len'?)",
        ),
        (["engine.kind=sglnag"], "engine.kind: Unknown engine 'sglnag'. Did you mean 'sglang'?"),
        (["engine.kind=vllm", "engine.urls=[]"], "engine: urls is missing: set the address of the vllm server"),
        (["engine.kind=transformers", "model=/no/such"], "The model's directory does not exist: /no/such."),
        (["data.prompt=questoin"], "Unknown column 'questoin' (did you mean 'question'?)"),
        (["engine.kind=sglang", "engine.urls=http://127.0.0.1:9"], "Cannot connect to http://127.0.0.1:9 (engine)."),
        (["engine.kind=sglang", "engine.urls=http://u:pw@127.0.0.1:9"], "Cannot connect to http://***@127.0.0.1:9 ("),
        (["rewards.functions.right=toolroll.nothing"], "rewards.functions.right"),
        (["rewards.functions.right=toolroll.errors"], "toolroll.errors is a module. Name a function."),
    ],
)
def test_config_error_is_printed_on_one_line(config: Path, arguments: list[str], message: str) -> None:
    done = toolroll(config, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def status(**other: Any) -> RunSnapshot:
    given: dict[str, Any] = {
        "done": 30, "running": 10, "queued": 60, "total": 100, "tokens": 0, "calls": 0, "in_flight": None,
        "limit": None, "workers": 1, "seconds": 30.0, "aggregates": RunAggregates().summary(),
    }  # fmt: skip
    return RunSnapshot(**{**given, **other})


def render(renderable: Any, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_alarms_are_shown() -> None:
    alarms = RunAlarms()
    for malformed in (5, 5, 5, 51):
        alarms.add(AlarmCounts(samples=256, malformed=malformed))
    message = "19.9 % samples with malformed tool calls, 2.0 % before"
    alarmed = status(alarms=alarms.figures())
    assert message in render(status_panel("run.yaml", alarmed, RunRates()))
    assert f"alarm: {message}" in status_line(alarmed, RunRates())
    assert "alarm" not in status_line(status(alarms=RunAlarms().figures()), RunRates())


def test_unreachable_services_are_shown_and_the_estimate_pauses() -> None:
    dead = status(unreachable={"engine": 130.4, "code_interpreter": 0.5})
    panel = render(status_panel("run.yaml", dead, RunRates()))
    assert "engine unreachable for 2:10" in panel
    assert "code_interpreter" not in panel, "short outages are not shown"
    assert "left" not in panel
    assert "left" in render(status_panel("run.yaml", status(), RunRates()))
    assert "engine unreachable for 2:10" in status_line(dead, RunRates())


def test_wait_for_the_first_answer_is_shown() -> None:
    for waiting in (status(done=0, seconds=12.0), status(done=0, seconds=12.0, total=None)):
        assert "waiting for the engine's first answer, 0:12" in render(status_panel("run", waiting, RunRates()))
        assert "waiting for the engine's first answer, 0:12" in status_line(waiting, RunRates())
    for other in (
        status(done=0, seconds=12.0, tokens=5),
        status(done=0, seconds=12.0, running=0),
        status(done=0, seconds=12.0, unreachable={"engine": 9.0}),
        status(done=1, seconds=12.0),
    ):
        assert "first answer" not in render(status_panel("run", other, RunRates()))


def test_time_of_a_phase_is_shown_if_it_takes_long() -> None:
    now = 100.0
    phase = StartingPhase("Waiting for the engine", clock=lambda: now)
    assert render(phase) == "Waiting for the engine …\n"
    now += 12
    assert render(phase) == "Waiting for the engine, 0:12\n"


def test_rates_are_shown_before_the_first_trajectory_has_ended() -> None:
    running = status(done=0, tokens=300)
    assert "10.0 tokens/s" in status_line(running, RunRates(tokens=10.0))
    assert "– tokens/s" in status_line(status(done=0), RunRates())


def test_full_status_fits_80_columns() -> None:
    aggregates = RunAggregates(2)
    error = (
        "The sandbox at http://sandbox:8080 answered 429 until the deadline, five times in a row, at [red]last[/red]."
    )
    for number in range(60):
        infra = number % 10 == 0
        aggregates.add(
            SampleOutcome(
                row=number // 2, sample=number % 2, reward=None if infra else 1.0, outcome="infra" if infra else "ok",
                finish_reason="infra" if infra else "stop", turns=2, sampled=100, tokens=1000, calls=3,
                policy_faults=1, infra_faults=int(infra), seconds=12.5, tool_seconds=3.0, queue_wait=0.5,
                fidelity="rerendered", error=error if infra else None,
            )
        )  # fmt: skip
    full = status(
        done=60_000_000, total=100_000_000, running=100_000, queued=39_900_000, in_flight=5000,
        limit=5000, workers=1000, lost_workers=3, seconds=200_000.0, resumed=1000, bad_rows=17,
        aggregates=aggregates.summary(),
    )  # fmt: skip
    text = render(status_panel("a/very/long/path/" * 8 + "[red]run.yaml[/red]", full, RunRates(1e4, 1e7, 1e5)))
    assert max(map(len, text.splitlines())) == 80
    for text_part in (
        "60,000,000 of 100,000,000", "60.0 %", "1 d 13:02:", "100,000", "39,900,000", "10,000,000", "5,000 of 5,000",
        "1000 · 3 lost", "stop 54 · infra 6", "policy 60 · infra 6", "6 × The sandbox", "17 skipped",
        "1,000 from earlier runs", "100.0 %",
    ):  # fmt: skip
        assert text_part in text, text_part
    assert f"faults: policy 60 · infra 6 · 6 × {error} · 3 workers lost" in status_line(full, RunRates())
    end = render(summary_tables(full))
    assert max(map(len, end.splitlines())) <= 80
    for text_part in (
        "pass@1 100.0 % · pass@2",
        "no reward",
        "rerendered 60",
        "[red]last[/red]",
        "their wait for a slot",
    ):
        assert text_part in " ".join(end.split()), text_part


def test_status_of_unknown_total() -> None:
    endless = status(total=None, queued=None)
    assert "30 done" in render(status_panel("x", endless, RunRates()))
    assert "left" not in render(status_panel("x", endless, RunRates()))
    assert status_line(endless, RunRates()).startswith("0:30 · 30 done, 10 running")
    assert status_line(status(), RunRates()).endswith("1:10 left")
    assert render(status_panel("x", status(done=0, seconds=0.0), RunRates()))


def test_formatting_of_durations_and_percentages() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.6, 3600, 90_000)] == [
        "0:00",
        "1:00",
        "1:00:00",
        "1 d 1:00:00",
    ]
    assert [format_percent(*some) for some in ((0, 0), (0, 3), (9999, 10_000), (3, 3))] == [
        "–",
        "0.0 %",
        "99.9 %",
        "100.0 %",
    ]


def test_rate_is_averaged_over_last_seconds() -> None:
    rate_meter = RateMeter()
    rates = [
        rate_meter.update(status(tokens=100 * min(second, 50), seconds=float(second))).tokens for second in range(101)
    ]
    assert rates[0] == 0.0
    assert rates[40] == pytest.approx(100.0)
    assert rates[100] == 0.0
    rate_meter.update(status(tokens=0, seconds=1.0))
    assert rate_meter.update(status(tokens=70, seconds=2.0)).tokens == pytest.approx(70.0), (
        "a restarted coordinator starts at 0"
    )


def test_rate_of_long_trajectories_is_smoothed() -> None:
    """Batches of 100 trajectories of 1,000 tokens that end every 50 s have a rate of 2,000 tokens/s."""
    rate_meter, rates = RateMeter(), []
    for half in range(1200):
        ended = half // 100 * 100
        aggregates = {"seconds": {"mean": 50.0}} if ended else {}
        now = status(done=ended, tokens=1000 * ended, seconds=half / 2, aggregates=aggregates)
        rates.append(rate_meter.update(now).tokens)
        if not ended:
            assert "– tokens/s" in status_line(now, RunRates()), "the rate is unknown until the first trajectory ends"
    assert all(1000 <= rate <= 3000 for rate in rates[100:]), rates
    assert sum(rates[100:]) / len(rates[100:]) == pytest.approx(2000, rel=0.1)
