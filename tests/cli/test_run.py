"""`toolroll run`, as typed in a shell."""

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from toolroll.cli.run_display import Pace, clock, line, panel, part
from toolroll.cli.run_summary import summary
from toolroll.run.status import Rates, Status
from toolroll.run.tally import Outcome, Tally

MODULE = '''
import asyncio
from toolroll import tool
from toolroll.errors import EngineUnavailable
from toolroll.rollout.engines.engine import Finish, Reply, Timings
from toolroll.schemas import FunctionCall, Message, ToolCall

class Talker:
    """Adds by the tool, and says what it was told."""

    def __init__(self, urls, delay=0.0, down=False):
        self.delay, self.down = delay, down

    async def chat(self, request_id, messages, tools, sampling_params, *, deadline=None, affinity=None):
        await asyncio.sleep(self.delay)
        if self.down:
            raise EngineUnavailable("The engine at [bold]http://nowhere[/bold] is down.")
        if messages[-1].role == "user":
            call = ToolCall(id="1", function=FunctionCall(name="add", arguments={"a": 40, "b": 2}))
            said = Message(role="assistant", content="", tool_calls=[call])
        else:
            said = Message(role="assistant", content=f"It is #### {messages[-1].content}")
        return Reply(message=said, finish=Finish.STOP, timings=Timings(total=self.delay))

    async def close(self):
        pass

@tool
def add(a: int, b: int) -> int:
    """Add."""
    print("said by a tool")
    return a + b
'''


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run of ten problems, half of which have the answer that the model gives."""
    name = f"talker_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"class_name": f"{name}.add"}]}))
    rows = [{"question": f"What is 40 + {2 + n % 2}?", "answer": f"#### {42 + n % 2}"} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {
        "engine": {"kind": f"{name}.Talker", "urls": []},
        "tools": "tools.yaml",
        "data": {"path": "rows.jsonl", "prompt": "question", "ground_truth": "answer"},
        "n": 2,
        "rewards": {"functions": {"right": "toolroll.run.reward_functions.gsm8k_strict"}},
        "rollout_data_dir": "records",
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(said))
    return path


COMMAND = Path(sys.executable).with_name("toolroll")
ENVIRONMENT = {**os.environ, "COLUMNS": "80"}


def toolroll(*words: Any, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
    command = [COMMAND, "run", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, **kwargs)


def test_a_run_and_the_same_again(config: Path) -> None:
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
    assert "20 of them before" in again.stdout
    assert len((records / "0.jsonl").read_text().splitlines()) == 20


def test_for_programs(config: Path) -> None:
    done = toolroll(config, "n=1", "data.limit=4", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["complete"], told["done"], told["total"], told["resumed"]) == (True, 4, 4, 0)
    assert told["rollout_data_dir"] == str(config.parent / "records")
    assert told["tally"]["pass_at_k"] == {"1": 0.5}
    assert told["tally"]["calls"] == 4
    assert "said by a tool" in done.stderr
    assert "4 done" in done.stderr or "of 4 done" in done.stderr


def test_interrupted_and_gone_on_with(config: Path) -> None:
    words = [config, "engine.options.delay=0.2", "max_in_flight=2", "--json"]
    process = subprocess.Popen([COMMAND, "run", *words], stdout=-1, stderr=-1, text=True, env=ENVIRONMENT)
    records = config.parent / "records" / "0.jsonl"
    ends = time.monotonic() + 30
    while time.monotonic() < ends and not (records.exists() and records.read_text().count("\n") >= 4):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    told = json.loads(out)
    assert not told["complete"]
    assert 4 <= told["done"] < 20
    assert f"Stopped with {told['done']} of 20 done. The same command goes on from there:" in err
    assert f"toolroll run {config} engine.options.delay=0.2 max_in_flight=2 --json" in err
    assert "Traceback" not in err
    after = toolroll(config, "--json")
    assert after.returncode == 0, after.stderr
    told_after = json.loads(after.stdout)
    assert (told_after["done"], told_after["resumed"]) == (20, told["done"])
    assert records.read_text().count("\n") == 20


def test_in_a_terminal(config: Path) -> None:
    """The panel is drawn over itself, no wider than the terminal, and stays when all is done."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "NO_COLOR", "CI")}
    environment["TERM"] = "xterm-256color"
    command = [COMMAND, "run", config, "engine.options.delay=0.3", "max_in_flight=8"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # its end
            break
    assert process.wait(20) == 0
    os.close(ours)
    text = seen.decode()
    assert "\x1b[1A" in text, "it moves up to draw over itself"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n")
    drawn, _, commands = plain.partition("Records: ")
    assert max(len(row) for row in drawn.splitlines()) <= 80
    assert f"toolroll view {config.parent / 'records'}" in commands, "in one piece, to be copied"
    for name in ("running", "queued", "tokens/s", "calls/s", "in flight", "reward", "ended by stop 20"):
        assert name in plain
    assert "20 of 20   100.0 %" in plain
    assert "pass@2 50.0 %" in plain


def test_nothing_but_failures_of_the_infrastructure(config: Path) -> None:
    script = (
        "import sys; from toolroll.run import hands; hands.PAUSES = (); from toolroll.cli.app import main; "
        f"sys.argv = ['toolroll', 'run', {str(config)!r}, 'engine.options.down=true', 'data.limit=2', 'n=1']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == 1, done.stderr
    assert "infra 2" in done.stdout
    assert "2 × The engine at [bold]http://nowhere[/bold] is down." in done.stdout
    assert "no reward" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["n"], "'n' is no setting. Write it as key=value"),
        (["n=none"], "n: Input should be a valid integer"),
        (["data.prompt=questoin"], "no column 'questoin' (did you mean 'question'?)"),
        (["engine.kind=sglang", "engine.urls=http://127.0.0.1:9"], "Nothing answers at http://127.0.0.1:9 (engine)."),
        (["rewards.functions.right=toolroll.nothing"], "rewards.functions.right"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(config: Path, words: list[str], said: str) -> None:
    done = toolroll(config, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def status(**other: Any) -> Status:
    given: dict[str, Any] = {
        "done": 30, "running": 10, "queued": 60, "total": 100, "tokens": 0, "calls": 0, "in_flight": None,
        "limit": None, "workers": 1, "seconds": 30.0, "tally": Tally().figures(),
    }  # fmt: skip
    return Status(**{**given, **other})


def shown(renderable: Any, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_everything_that_can_be_shown_is_shown_within_eighty_columns() -> None:
    tally = Tally(2)
    error = (
        "The sandbox at http://sandbox:8080 answered 429 until the deadline, five times in a row, at [red]last[/red]."
    )
    for number in range(60):
        infra = number % 10 == 0
        tally.add(
            Outcome(
                row=number // 2, sample=number % 2, reward=None if infra else 1.0, outcome="infra" if infra else "ok",
                finish_reason="infra" if infra else "stop", turns=2, sampled=100, tokens=1000, calls=3,
                policy_faults=1, infra_faults=int(infra), seconds=12.5, tool_seconds=3.0, queue_wait=0.5,
                fidelity="rerendered", error=error if infra else None,
            )
        )  # fmt: skip
    full = status(
        done=60_000_000, total=100_000_000, running=100_000, queued=39_900_000, tally=tally.figures(), in_flight=5000,
        limit=5000, workers=1000, lost_workers=3, seconds=200_000.0, resumed=1000, bad_rows=17,
    )  # fmt: skip
    text = shown(panel("a/very/long/path/" * 8 + "[red]run.yaml[/red]", full, Rates(1e4, 1e7, 1e5)))
    assert max(map(len, text.splitlines())) == 80
    for said in (
        "60,000,000 of 100,000,000", "60.0 %", "1 d 13:02:", "100,000", "39,900,000", "10,000,000", "5,000 of 5,000",
        "1000 · 3 lost", "stop 54 · infra 6", "policy 60 · infra 6", "6 × The sandbox", "17 that can't be used",
        "1,000 were done before", "100.0 %",
    ):  # fmt: skip
        assert said in text, said
    assert f"faults: policy 60 · infra 6 · 6 × {error} · 3 workers lost" in line(full, Rates())
    end = shown(summary(full))
    assert max(map(len, end.splitlines())) <= 80
    for said in ("pass@1 100.0 % · pass@2", "no reward", "rerendered 60", "[red]last[/red]", "their wait for a slot"):
        assert said in " ".join(end.split()), said


def test_a_run_of_which_nobody_knows_the_end() -> None:
    endless = status(total=None, queued=None)
    assert "30 done" in shown(panel("x", endless, Rates()))
    assert "left" not in shown(panel("x", endless, Rates()))
    assert line(endless, Rates()).startswith("0:30 · 30 done, 10 running")
    assert line(status(), Rates()).endswith("1:10 left")
    assert shown(panel("x", status(done=0, seconds=0.0), Rates()))


def test_words_for_numbers() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3600, 90_000)] == ["0:00", "1:00", "1:00:00", "1 d 1:00:00"]
    assert [part(*some) for some in ((0, 0), (0, 3), (9999, 10_000), (3, 3))] == ["–", "0.0 %", "99.9 %", "100.0 %"]


def test_a_rate_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    rates = [pace.at(status(tokens=100 * min(second, 50), seconds=float(second))).tokens for second in range(101)]
    assert rates[0] == 0.0
    assert rates[40] == pytest.approx(100.0)
    assert rates[100] == 0.0
    pace.at(status(tokens=0, seconds=1.0))
    assert pace.at(status(tokens=70, seconds=2.0)).tokens == pytest.approx(70.0), "a board that died begins at 0"


def test_a_rate_of_long_trajectories_is_not_that_of_the_moment_at_which_they_end() -> None:
    """100 at once, each of 1,000 tokens in 50 seconds: 2,000 tokens per second, though nothing ends but every 50."""
    pace, rates = Pace(), []
    for half in range(1200):
        ended = half // 100 * 100
        tally = {"seconds": {"mean": 50.0}} if ended else {}
        now = status(done=ended, tokens=1000 * ended, seconds=half / 2, tally=tally)
        rates.append(pace.at(now).tokens)
        if not ended:
            assert "– tokens/s" in line(now, Rates()), "nobody knows, before the first of them have ended"
    assert all(1000 <= rate <= 3000 for rate in rates[100:]), rates
    assert sum(rates[100:]) / len(rates[100:]) == pytest.approx(2000, rel=0.1)
