"""Measure the cost of the rollout loop, compared with direct requests to the engine, and how it grows.

    python benchmarks/rollout.py [--quick] [--json]

With a real SGLang server on the CPU of this machine:

- `vs_bare_engine`: tokens per second of the rollout loop, divided by those of a plain HTTP client that sends the same
  requests in the same order at the same concurrency. Both start with an empty prefix cache and alternate.

With a scripted engine and a tool that does nothing:

- `overhead_us_per_turn`: CPU time of a turn with a tool call, while 16 trajectories are in flight.
- `overhead_us_per_turn_at_scale`: the same while thousands are, whose state does not fit into the processor's caches.
- `loop_lag_p99_ms`: delay of a timer in the same event loop while 10,000 trajectories of 4 turns are in flight. Turns
  take so long that they need `LOAD` of a core. `loop_lag_p99_turns` is the number of turns that start between the time
  at which a timer is due and its callback. Unlike the delay, it does not depend on the speed of the machine.
- `kb_per_trajectory`: memory of each of these trajectories.
- `turn_cost_growth`: CPU time of a turn in trajectories of 128 turns, divided by that in trajectories of 8 turns.

The benchmark owns its process and limits full garbage collections (`infrequent_full_gc`), as `toolroll run` does. A
figure out of bounds is measured up to three times, because other processes on the machine can disturb a measurement.
The exit code is 1 if a figure stays out of bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import time
from bisect import bisect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from real_engine import real_engine
from report import report

from toolroll import BaseTool, ToolResponse, ToolResult
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.parsed_turn import ParsedCall, ParsedTurn
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.engines.base import FinishType, Generation
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.rollout.gc_tuning import infrequent_full_gc
from toolroll.rollout.limits import Limits
from toolroll.rollout.rollout import Rollout

BOUNDS: dict[str, Callable[[float], bool]] = {
    "vs_bare_engine": lambda value: value >= 0.97,
    "loop_lag_p99_turns": lambda value: value <= 40,
    "turn_cost_growth": lambda value: value <= 1.2,
    "unfinished": lambda value: value == 0,
}
MAX_MEASUREMENTS = 3
CALL = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
LOAD = 0.6
"""Share of a core that the turns of all concurrent trajectories need, as they arrive from a busy engine."""
IN_FLIGHT_AT_SCALE = 4_000


class NoOpTool(BaseTool[None]):
    """A tool that does nothing."""

    default_schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "nothing", "description": "Do nothing.", "parameters": {"type": "object"}},
    }

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """Do nothing."""
        return ToolResult(ToolResponse(text="done"), None, {})


class PacedEngine(ScriptedEngine):
    """A scripted engine in which each request takes a random time."""

    def __init__(self, script: Any, seconds: tuple[float, float]) -> None:
        super().__init__(script)
        self._duration_range = seconds
        self.ended_at: list[float] = []
        """Times at which requests ended, in order."""

    async def _wait(self, request_id: str, seconds: float, deadline: float | None) -> bool:
        if self._duration_range[1]:
            await asyncio.sleep(random.uniform(*self._duration_range))
        else:
            await asyncio.sleep(0)
        self.ended_at.append(time.perf_counter())
        return False


def conversation(rendering: Rendering, tokenizer: Any, turns: int) -> Callable[[str, Any, int], list[int]]:
    """Return a script of `turns` turns: a tool call in each, and an answer in the last."""
    stop = rendering.stop_ids[0]
    call = [*tokenizer.encode("I will look it up. " + CALL, add_special_tokens=False), stop]
    answer = [*tokenizer.encode("That is all.", add_special_tokens=False), stop]
    return lambda _, __, turn: answer if turn + 1 == turns else call


def make_rollout(rendering: Rendering, engine: Any, max_in_flight: int) -> Rollout:
    """Return a rollout with a tool that does nothing."""
    limits = Limits(max_response_len=100_000, max_assistant_turns=1000)
    return Rollout(engine=engine, tools=[NoOpTool()], rendering=rendering, limits=limits, max_in_flight=max_in_flight)


async def count_unfinished(rollout: Rollout, count: int) -> int:
    """Run trajectories and return the number that did not finish normally."""
    prompts = ({"prompt": f"Look up number {number}."} for number in range(count))
    return sum([trajectory.finish_reason != "stop" async for trajectory in rollout.run(prompts)])


async def cpu_per_turn(rendering: Rendering, tokenizer: Any, turns: int, count: int, in_flight: int = 16) -> float:
    """Return the CPU time of a turn in microseconds."""
    script = conversation(rendering, tokenizer, turns)
    rollout = make_rollout(rendering, PacedEngine(script, (0.0, 0.0)), in_flight)
    await count_unfinished(rollout, 16)
    started = time.process_time()
    await count_unfinished(rollout, count)
    return (time.process_time() - started) / (count * turns) * 1e6


async def measure_concurrency(rendering: Rendering, tokenizer: Any, count: int, us_per_turn: float) -> dict[str, float]:
    """Measure `count` concurrent trajectories of 4 turns each, each of which needs `us_per_turn` of CPU time."""
    timers: list[tuple[float, float]] = []

    async def heartbeat() -> None:
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            timers.append((due, time.perf_counter()))

    turn_seconds = count * us_per_turn / 1e6 / LOAD
    engine = PacedEngine(conversation(rendering, tokenizer, 4), (0.7 * turn_seconds, 1.3 * turn_seconds))
    rollout = make_rollout(rendering, engine, count)
    gc.collect()
    before = _resident_mb()
    heartbeats = asyncio.create_task(heartbeat())
    unfinished = await count_unfinished(rollout, count)
    heartbeats.cancel()
    lags = sorted(called_at - due for due, called_at in timers)
    turns = sorted(bisect(engine.ended_at, called_at) - bisect(engine.ended_at, due) for due, called_at in timers)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "trajectories_at_once": count,
        "unfinished": unfinished,
        "loop_lag_p50_ms": round(lags[len(lags) // 2] * 1000, 2),
        "loop_lag_p99_ms": round(lags[int(len(lags) * 0.99)] * 1000, 2),
        "loop_lag_p99_turns": turns[int(len(turns) * 0.99)],
        "kb_per_trajectory": round((peak - before) * 1024 / count, 1),
    }


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


# Real engine


class CallingRendering:
    """A rendering that parses every turn except the last as a tool call."""

    def __init__(self, rendering: Rendering, turns: int) -> None:
        self._rendering = rendering
        self._turns = turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rendering, name)

    def parse(self, ids: Any, *, tools: Any, prompt_ids: Any) -> ParsedTurn:
        """Return a turn with a tool call, or without one in the last turn."""
        responses = self._rendering.decode(list(prompt_ids)).count("</tool_response>")
        call = ParsedCall(name="nothing", arguments={}, raw="{}")
        return ParsedTurn(self._rendering.decode(ids), None, () if responses + 1 >= self._turns else (call,))


class RecordingEngine(SGLangEngine):
    """The real engine, which samples a fixed number of tokens. Records its requests by trajectory."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.requests: dict[str, list[tuple[list[int], dict[str, Any]]]] = {}
        self.tokens = 0

    async def generate(self, request_id: str, prompt_ids: Any, sampling_params: Any, **kwargs: Any) -> Generation:
        """Sample, and report the end as a stop of the model."""
        self.requests.setdefault(str(kwargs.get("affinity")), []).append((list(prompt_ids), dict(sampling_params)))
        generation = await super().generate(request_id, prompt_ids, sampling_params, **kwargs)
        self.tokens += len(generation.ids)
        return replace(generation, finish=FinishType.STOP)


async def send_directly(url: str, requests: dict[str, list[tuple[list[int], dict[str, Any]]]]) -> int:
    """Send requests with a plain client and return the number of sampled tokens."""
    tokens = 0

    async def trajectory(session: aiohttp.ClientSession, turns: list[tuple[list[int], dict[str, Any]]]) -> None:
        nonlocal tokens
        for ids, params in turns:
            body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": -1}
            async with session.post(f"{url}/generate", json=body) as response:
                tokens += len((await response.json())["output_ids"])

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(trajectory(session, turns) for turns in requests.values()))
    return tokens


async def compare_with_engine(url: str, model: str, concurrency: int, rounds: int, length: int) -> dict[str, float]:
    """Measure the rollout loop and the plain client alternately, with turns of `length` tokens."""
    turns = 3
    rendering = CallingRendering(load_rendering(model, "chatml"), turns)
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    counts = {"ours": 0, "bare": 0}
    for number in range(rounds):
        engine = RecordingEngine(url)
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": length}
        limits = Limits(max_response_len=4000, max_assistant_turns=turns)
        rollout = Rollout(
            engine=engine,
            tools=[NoOpTool()],
            rendering=rendering,  # type: ignore[arg-type]
            limits=limits,
            sampling_params=params,
            max_in_flight=concurrency,
        )
        async with aiohttp.ClientSession() as session:
            await (await session.post(f"{url}/flush_cache")).read()
            prompts = [{"prompt": f"Tell me about the number {number * concurrency + i}."} for i in range(concurrency)]
            started = time.perf_counter()
            async for _ in rollout.run(prompts):
                pass
            times["ours"].append(time.perf_counter() - started)
            counts["ours"] += engine.tokens
            await (await session.post(f"{url}/flush_cache")).read()
            started = time.perf_counter()
            counts["bare"] += await send_directly(url, engine.requests)
            times["bare"].append(time.perf_counter() - started)
        await engine.close()
    rates = {name: counts[name] / sum(times[name]) for name in times}
    return {
        "vs_bare_engine": round(rates["ours"] / rates["bare"], 3),
        "tokens_per_s": round(rates["ours"], 1),
        "tokens_per_s_bare": round(rates["bare"], 1),
    }


async def measure(quick: bool, url: str, model: str) -> dict[str, float]:
    """Measure all figures."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    rendering = load_rendering(tokenizer, "chatml")
    figures = await within_bounds(lambda: compare_with_engine(url, model, 16, 2 if quick else 6, 12 if quick else 24))
    short = [await cpu_per_turn(rendering, tokenizer, 8, 160) for _ in range(3)]
    long = [await cpu_per_turn(rendering, tokenizer, 128, 10) for _ in range(3)]
    us_per_turn = min(short)
    figures["overhead_us_per_turn"] = round(us_per_turn, 1)
    figures["turn_cost_growth"] = round(min(long) / us_per_turn, 3)
    at_scale = await cpu_per_turn(rendering, tokenizer, 4, IN_FLIGHT_AT_SCALE, IN_FLIGHT_AT_SCALE)
    figures["overhead_us_per_turn_at_scale"] = round(at_scale, 1)
    return figures | await within_bounds(lambda: measure_concurrency(rendering, tokenizer, 10_000, at_scale))


async def within_bounds(measure: Callable[[], Awaitable[dict[str, float]]]) -> dict[str, float]:
    """Repeat a measurement until it is within bounds, at most `MAX_MEASUREMENTS` times."""
    for _ in range(MAX_MEASUREMENTS):
        figures = await measure()
        if all(BOUNDS[name](value) for name, value in figures.items() if name in BOUNDS):
            break
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds against the engine, with shorter turns")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    with real_engine() as engine, infrequent_full_gc():
        figures = uvloop.run(measure(options.quick, engine.url, str(engine.model_dir)))
    report(figures, BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
