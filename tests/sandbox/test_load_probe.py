"""Load probe: its decisions, its measurements and the command."""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sandbox.fault_server import SUCCESS, program
from sandbox.serving import serving
from toolroll.cli.sandbox_probe import probe
from toolroll.errors import ConfigError
from toolroll.sandbox import load_probe as probe_module
from toolroll.sandbox.load_probe import (
    MAX_REFINEMENTS,
    LoadProbe,
    LoadStep,
    ProbeEnd,
    conclude,
    next_concurrency,
    throughput_by_slice,
)

pytestmark = pytest.mark.timing
NAP = "import time; time.sleep(0.05)"


# Decisions


def climb(server: Callable[[int], LoadStep], maximum: int) -> list[LoadStep]:
    """Return all steps of a probe of the given server, and check the invariants."""
    steps: list[LoadStep] = []
    while (at_once := next_concurrency(steps, maximum)) is not None:
        assert 1 <= at_once <= maximum
        assert [step.concurrency for step in steps].count(at_once) <= 1
        assert all(at_once < step.concurrency for step in steps if not step.is_clean)
        steps.append(server(at_once))
        assert len(steps) <= math.log2(maximum) + 2 + MAX_REFINEMENTS
    return steps


def queueing(capacity: int, limit: float = math.inf, noise: float = 0.0, luck: st.DataObject | None = None) -> Any:
    """Return a simulated server with a capacity, 1 s per execution, that rejects executions beyond the limit."""

    def measure(at_once: int) -> LoadStep:
        throughput = float(min(at_once, capacity))
        if luck:
            throughput *= 1 + luck.draw(st.floats(-noise, noise), label=f"noise at {at_once}")
        refused = {"HTTP 429": 100} if at_once > limit else {}
        return LoadStep(
            concurrency=at_once,
            throughput=throughput,
            noise=noise / 2 * throughput,
            executions=100,
            errors=refused,
        )

    return measure


@given(st.integers(1, 400), st.sampled_from([0.0, 0.01, 0.03]), st.data())
def test_knee_is_found_despite_noise(capacity: int, noise: float, luck: st.DataObject) -> None:
    steps = climb(queueing(capacity, noise=noise, luck=luck), maximum=4096)
    found = conclude(steps)
    assert found.end is ProbeEnd.FLAT
    assert found.knee
    assert 0.85 * capacity <= found.knee.concurrency <= 1.15 * capacity + 1


@given(st.integers(1, 400), st.integers(1, 800), st.sampled_from([0.0, 0.03]), st.data())
def test_knee_is_below_errors(capacity: int, limit: int, noise: float, luck: st.DataObject) -> None:
    steps = climb(queueing(capacity, limit, noise, luck), maximum=4096)
    found = conclude(steps)
    assert found.knee
    assert found.knee.concurrency <= limit
    assert found.knee.concurrency >= 0.8 * min(capacity, limit)
    assert found.end is (ProbeEnd.ERRORS if max(step.concurrency for step in steps) > limit else ProbeEnd.FLAT)


@given(st.integers(1, 600), st.integers(1, 600))
def test_maximum_concurrency_is_respected(capacity: int, maximum: int) -> None:
    found = conclude(climb(queueing(capacity), maximum))
    assert found.knee
    assert found.knee.concurrency >= 0.85 * min(capacity, maximum)
    if 2 * maximum < capacity:
        assert found.end is ProbeEnd.MAXIMUM


@given(st.integers(1, 5000), st.data())
def test_probe_ends_for_any_measurements(maximum: int, data: st.DataObject) -> None:
    outcomes = st.builds(
        LoadStep,
        concurrency=st.just(1),
        throughput=st.floats(0, 1e6),
        noise=st.floats(0, 1e6),
        executions=st.integers(0, 1000),
        errors=st.dictionaries(st.just("HTTP 429"), st.integers(0, 20)),
    )

    def measure(at_once: int) -> LoadStep:
        drawn = data.draw(outcomes)
        return LoadStep(**{**vars(drawn), "concurrency": at_once})

    steps = climb(measure, maximum)
    found = conclude(steps)
    assert (found.knee is None) == (not steps[0].is_clean)
    if found.knee and found.best:
        assert found.knee.is_clean
        assert found.knee.throughput >= 0.9 * found.best.throughput
        assert all(found.knee.concurrency < step.concurrency for step in steps if not step.is_clean)


def test_one_failure_among_thousands_is_tolerated() -> None:
    step = LoadStep(concurrency=1, throughput=100, executions=1000, errors={"connection lost": 1})
    assert step.is_clean
    assert next_concurrency([step], 512) == 2


def test_outlier_is_measured_again() -> None:
    luck = iter([3.0])

    def measure(at_once: int) -> LoadStep:
        throughput = min(at_once, 10) * (next(luck, 1.0) if at_once == 16 else 1.0)
        return LoadStep(concurrency=at_once, throughput=throughput, executions=100)

    found = conclude(climb(measure, 512))
    assert found.knee
    assert 10 <= found.knee.concurrency <= 11


MOMENTS = st.floats(0, 20).map(lambda seconds: round(seconds, 3))


@given(st.lists(st.tuples(MOMENTS, MOMENTS).map(sorted).map(tuple)), st.integers(1, 20))
def test_execution_counts_by_its_part_in_each_slice(spans: list[tuple[float, float]], slices: int) -> None:
    begin, end = 5.0, 15.0
    found = throughput_by_slice(spans, begin, end, slices)
    assert len(found) == slices
    parts = 0.0
    for began, ended in spans:
        ended = max(ended, began + 1e-9)
        parts += max(min(ended, end) - max(began, begin), 0.0) / (ended - began)
    assert sum(found) * (end - begin) / slices == pytest.approx(parts, abs=1e-3)


@given(st.floats(0.3, 30), st.integers(1, 8))
def test_throughput_does_not_depend_on_end_of_step(duration: float, workers: int) -> None:
    """Programs of the same duration start and end together."""
    spans = [(index * duration, (index + 1) * duration) for index in range(int(20 / duration) + 1)] * workers
    assert throughput_by_slice(spans, 3.0, 5.0) == pytest.approx([workers / duration] * 10)


# Measurements


@asynccontextmanager
async def fusion(
    slots: int = 1000, nap: float = 0.01, ping: Any = "pong", respond: Callable[[int], web.Response] | None = None
) -> AsyncIterator[str]:
    """Serve like SandboxFusion: `slots` programs run at once, each for `nap` seconds.

    `respond` creates the response from the number of requests in flight.
    """
    turn, here = asyncio.Semaphore(slots), 0

    async def run_code(request: web.Request) -> web.Response:
        nonlocal here
        assert (await request.json())["language"] == "python"
        here += 1
        try:
            if respond and (answer := respond(here)).status != 200:
                return answer
            async with turn:
                await asyncio.sleep(nap)
            return respond(here) if respond else web.json_response(SUCCESS)
        finally:
            here -= 1

    async def pong(_: web.Request) -> web.Response:
        return web.json_response(ping) if ping else web.Response(status=404)

    app = web.Application()
    app.add_routes([web.post("/run_code", run_code), web.get("/v1/ping", pong)])
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


async def measured(url: str, maximum: int = 64, seconds: float = 0.1, **options: Any) -> list[LoadStep]:
    async with LoadProbe(url, seconds=seconds, maximum=maximum, **options) as load:
        await load.inspect_server()
        steps: list[LoadStep] = []
        while at_once := next_concurrency(steps, maximum):
            steps.append(await load.measure(at_once))
    return steps


@pytest.mark.parametrize("ping", ["pong", None])
async def test_server_without_ping_or_with_plain_pong(ping: str | None) -> None:
    async with fusion(nap=0.03, ping=ping) as url, LoadProbe(url) as load:
        met = await load.inspect_server()
    assert (met.version, met.tier, met.capacity, met.clock) == ("", "", None, None)
    assert 0.029 < met.alone < 1


async def test_capacity_of_sandbox_fusion_is_found() -> None:
    async with fusion(slots=3, nap=0.03) as url:
        found = conclude(await measured(url + "run_code", seconds=0.2))
    assert found.knee
    assert found.best
    assert 3 <= found.knee.concurrency <= 4
    assert 50 < found.best.throughput < 101
    assert 0.029 < found.knee.p50 <= found.knee.p99
    assert found.end is ProbeEnd.FLAT


async def test_short_step_measures_long_programs() -> None:
    async with fusion(slots=2, nap=0.5) as url, LoadProbe(url, seconds=0.1) as load:
        step = await load.measure(2)
    assert 3 < step.throughput < 4.01
    assert step.noise < 0.2


async def test_errors_end_the_probe_without_retries() -> None:
    def respond(here: int) -> web.Response:
        return web.json_response(SUCCESS) if here <= 5 else web.json_response({"detail": "full"}, status=429)

    async with fusion(respond=respond, nap=0.02) as url:
        steps = await measured(url)
    assert [step.concurrency for step in steps[:6]] == [1, 2, 4, 8, 6, 5]
    assert all(set(step.errors) == ({"HTTP 429"} if step.concurrency > 5 else set()) for step in steps)
    found = conclude(steps)
    assert found.end is ProbeEnd.ERRORS
    assert found.knee
    assert 4 <= found.knee.concurrency <= 5


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ({"body": {}, "status": 503}, "HTTP 503"),
        ({"body": {"status": "SandboxError", "message": "no cgroup left"}}, "the sandbox failed"),
        ({"body": {"odd": 1}}, "invalid response"),
        ({"body": program(status="TimeLimitExceeded", return_code=None)}, "program: timeout"),
        ({"body": {}, "status": 403}, "rejected"),
    ],
)
async def test_failure_under_load_is_an_error(answer: dict[str, Any], what: str) -> None:
    def respond(here: int) -> web.Response:
        if here == 1:
            return web.json_response(SUCCESS)
        return web.json_response(answer["body"], status=answer.get("status", 200))

    async with fusion(respond=respond) as url:
        steps = await measured(url)
    assert [step.concurrency for step in steps] == [1, 2]
    assert set(steps[1].errors) == {what}
    assert not steps[1].is_clean


async def test_missing_response_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "EXECUTION_OVERHEAD_S", 0.1)
    async with fusion(slots=1, nap=0.2) as url:
        steps = await measured(url, timeout=0.1)
    assert steps[-1].errors["no response"]
    assert conclude(steps).end is ProbeEnd.ERRORS


async def test_clock_offset_is_measured() -> None:
    async with fusion(ping={"ping": "pong", "version": "9", "time": time.time() + 3600}) as url, LoadProbe(url) as load:
        met = await load.inspect_server()
    assert met.clock == pytest.approx(3600, abs=1)
    assert met.clock_error is not None
    assert met.clock_error < 0.5


# The command


def run(*words: str, **environment: str) -> Result:
    app = typer.Typer()
    app.command()(probe)
    return CliRunner().invoke(app, words, env={"COLUMNS": "120", **environment})


def report(*words: str) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.exception
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_capacity_of_toolroll_server_is_found(tmp_path: Path) -> None:
    nap = tmp_path / "nap.py"
    nap.write_text("import time; time.sleep(0.3)")  # much longer than the overhead, which varies on a busy machine
    with serving("--capacity", "2", "--queue", "4") as running:
        found = report(running.url, "--code", str(nap), "--seconds", "1.2")
    assert found["server"]["capacity"] == 2
    assert abs(found["server"]["clock"]) < 1
    assert found["knee"] == found["rate_limit"]
    assert found["knee"] in (2, 3)
    assert 1 < found["best_throughput"] < 7  # 6.7 without any overhead
    assert found["end"] == "errors"
    assert "HTTP 429" in found["steps"][3]["errors"]
    assert found["warnings"] == []


def test_output_without_terminal_is_lines(server: str) -> None:
    done = run(server, "--seconds", "0.2", "--max-concurrency", "2")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"server   {server}, toolroll ")
    table = lines[lines.index("at once  executions/s    p50 ms    p99 ms  errors") + 1 :]
    assert [line.split()[0] for line in table[: table.index("")]] in (["1", "2"], ["1", "2", "2"])
    assert table[-1] in ("set      rate_limit: 1", "set      rate_limit: 2")


def test_output_in_terminal_is_table(server: str) -> None:
    done = run(server, "--seconds", "0.2", "--max-concurrency", "1", FORCE_COLOR="1", TERM="xterm")
    assert done.exit_code == 0
    assert "measuring" in done.stdout
    assert "← knee" in done.stdout


def test_unusable_server_is_reported_in_one_line(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "PING_TIMEOUT_S", 0.3)
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    for words, message in [
        (("http://127.0.0.1:9",), "http://127.0.0.1:9: can't be reached"),
        (("127.0.0.1:9",), "Invalid sandbox URL: '127.0.0.1:9'"),
        ((server, "--code", str(broken)), "ZeroDivisionError"),
        ((server, "--code", str(tmp_path / "none.py")), "No such file"),
        ((server, "--language", "cobol"), "Unknown language 'cobol'"),
        ((server, "--max-concurrency", str(2**40)), "Use --max-concurrency"),
    ]:
        done = run(*words)
        assert isinstance(done.exception, ConfigError), (words, done.output)
        assert message in str(done.exception)


async def test_wrong_clock_is_reported() -> None:
    async with fusion(ping={"ping": "pong", "version": "9", "time": time.time() - 7200}) as url:
        done = await asyncio.to_thread(run, url, "--seconds", "0.1", "--max-concurrency", "1")
    assert done.exit_code == 0
    assert re.search(r"warning: The server's clock is 72\d\d\.\d s behind this machine's", done.stdout)


async def test_failing_server_gives_no_rate_limit() -> None:
    answers = [web.json_response(SUCCESS) for _ in range(4)]  # two for inspect_server, then two for the first step

    def respond(_: int) -> web.Response:
        return answers.pop() if answers else web.json_response({}, status=500)

    async with fusion(respond=respond) as url:
        done = await asyncio.to_thread(run, url, "--seconds", "0.1")
    assert done.exit_code == 1
    assert "at 1 at once executions failed (HTTP 500)" in done.stdout
    assert "rate_limit" not in done.stdout


async def test_token_is_sent() -> None:
    async def run_code(request: web.Request) -> web.Response:
        is_known = request.headers.get("Authorization") == "Bearer open sesame"
        return web.json_response(SUCCESS if is_known else {"detail": "no"}, status=200 if is_known else 401)

    app = web.Application()
    app.add_routes([web.post("/run_code", run_code), web.get("/v1/ping", run_code)])
    async with TestServer(app) as server:
        words = str(server.make_url("/")), "--seconds", "0.1", "--max-concurrency", "1"
        refused = await asyncio.to_thread(run, *words)
        assert isinstance(refused.exception, ConfigError)
        assert "Check the token" in str(refused.exception)
        done = await asyncio.to_thread(run, *words, TOOLROLL_SANDBOX_TOKEN="open sesame")
        assert done.exit_code == 0, done.exception
