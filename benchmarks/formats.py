"""Check that every model family works or is refused, and that random turns lose no token.

    python benchmarks/formats.py [--quick] [--json | --table]

Each model of the zoo is loaded under its official name and from a
directory called `checkpoint-200`, untouched and, if it is refused, with `tool_prompt="hermes"`. A rollout then plays a
model that writes five kinds of calls in its own form, which the tokenizer's chat template renders. A *silent failure*
is a trajectory that ends as usual although a call was not executed.

The fuzz plays models that write text, calls, parts of calls, markers and random ids over several turns. A violation is
a prompt that is not what the engine received and sampled before, a wrong mask or a wrong log-probability.

`--table` prints the table of docs/models.md; `documentation_differs` is 1 if the page has another one.

Exits with status 1 if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from model_zoo import MODELS, ModelZoo, ZooModel

from toolroll.rollout.chat.formats import FormatReport, inspect_format
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.chat.template import PROBE_CALLS, PROBE_TOOLS, TemplateRenderer, common_length, turn_of
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.trajectory import Trajectory
from toolroll.schemas import JsonDict, OpenAIFunctionToolSchema, ToolResponse
from toolroll.tools.base_tool import BaseTool, ToolResult

QUESTION = "What is 6 times 7?"
MAX_FUZZ_TURNS = 6
FUZZ, FUZZ_QUICK = 24_000, 540
PAGE = Path(__file__).parent.parent / "docs/models.md"
BOUNDS: dict[str, Callable[[float], bool]] = {
    "models": lambda value: value >= 29,
    "usable": lambda value: value >= 23,
    "usable_with_remedy": lambda value: value >= 28,
    "silent_failures": lambda value: value == 0,
    "depends_on_directory": lambda value: value == 0,
    "qwen3_load_cpu_seconds": lambda value: value <= 5,
    "documentation_differs": lambda value: value == 0,
    "fuzz_violations": lambda value: value == 0,
    "fuzz_exceptions": lambda value: value == 0,
    "fuzz_needless_rerenders": lambda value: value == 0,
}


class ProbeTool(BaseTool[Any]):
    """A tool of the probes, which records its calls."""

    def __init__(self, schema: JsonDict) -> None:
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.calls: list[JsonDict] = []

    async def execute(self, instance_id: str, parameters: JsonDict, **_: Any) -> ToolResult:
        """Record the arguments."""
        self.calls.append(parameters)
        return ToolResult(ToolResponse(text="42"), None, {})


@dataclass
class Result:
    """What was found for one model."""

    model: str
    stand_in: bool
    form: str | None = None
    usable: bool = False
    remedy: str | None = None
    reason: str | None = None
    prompts: str = ""
    calls: str = ""
    earlier_ids: str = ""
    executed: int = 0
    """Number of kinds of calls that a rollout executed."""
    rendered: int = 0
    """Number of kinds of calls that the template renders."""
    same_elsewhere: bool = True
    load_cpu_s: float = 0.0
    silent_failures: list[str] = field(default_factory=list)


def check_model(zoo: ModelZoo, model: ZooModel, scratch: Path) -> tuple[Result, Rendering | None]:
    """Check one model."""
    result = Result(model.name, model.is_stand_in)
    directory = zoo.directory(model)
    began = time.process_time()
    report = inspect_format(directory)
    result.load_cpu_s = time.process_time() - began
    result.usable, result.reason = report.rendering is not None, report.problem
    renamed = scratch / model.name / "checkpoint-200"
    renamed.parent.mkdir()
    renamed.symlink_to(directory)
    elsewhere = inspect_format(renamed)
    if report.rendering is None:
        report, elsewhere = (inspect_format(path, tool_prompt="hermes") for path in (directory, renamed))
        result.remedy = None if report.rendering is None else "tool_prompt: hermes"
    result.same_elsewhere = _summary(report) == _summary(elsewhere)
    details = {check.name: check.detail for check in report.checks}
    result.form, result.prompts = report.call_form, details.get("prompts", "")
    result.calls, result.earlier_ids = details.get("calls", ""), details.get("earlier ids", "")
    if report.rendering is not None:
        asyncio.run(_play_probes(result, report.rendering))
    return result, report.rendering


def _summary(report: FormatReport) -> Any:
    return report.format, report.call_form, report.problem, [asdict(check) for check in report.checks]


async def _play_probes(result: Result, rendering: Rendering) -> None:
    for name, calls in PROBE_CALLS.items():
        turn = own_turn(rendering, calls)
        if turn is None:
            continue
        result.rendered += 1
        tools = [ProbeTool(schema) for schema in PROBE_TOOLS]
        engine = ScriptedEngine([turn, [*rendering.encode("It is 42."), rendering.stop_ids[-1]]])
        rollout = Rollout(engine=engine, rendering=rendering, tools=tools, limits={"max_parallel_calls": 4})
        [trajectory] = [trajectory async for trajectory in rollout.run([QUESTION])]
        executed = [(tool.name, call) for tool in tools for call in tool.calls]
        if sorted(executed, key=str) == sorted(calls, key=str):
            result.executed += 1
        elif trajectory.outcome == "ok" and not trajectory.calls:
            result.silent_failures.append(name)


def own_turn(rendering: Rendering, calls: list[tuple[str, JsonDict]]) -> list[int] | None:
    """Return the ids of a turn in the model's own form, by its chat template, or None if the template rejects it."""
    renderer = rendering.renderer
    assert isinstance(renderer, TemplateRenderer)
    question = {"role": "user", "content": QUESTION}
    prompt = renderer.render_ids([question], tools=PROBE_TOOLS, add_generation_prompt=True)
    for named_ids in (False, True):
        try:
            ids = renderer.render_ids([question, turn_of(calls, named_ids=named_ids)], tools=PROBE_TOOLS)
        except Exception:  # a template may reject any conversation
            continue
        start = common_length(prompt, ids)
        while 0 < start < len(prompt) and ids[start - 1] not in renderer.vocabulary.control_token_texts:
            start -= 1  # the turn starts after the header, not inside a marker that looks like the prompt's
        ids = ids[start:]
        if all(name in rendering.decode(ids) for name, _ in calls):
            end = next((index for index, token_id in enumerate(ids) if token_id in rendering.stop_ids), len(ids))
            tail, text = rendering.decode(prompt).rstrip(), rendering.decode(ids)
            is_thinking = tail.endswith("<think>") and "</think>" not in text
            reasoning = renderer.vocabulary.encode_template("</think>\n\n") if is_thinking else []
            return [*reasoning, *ids[:end], rendering.stop_ids[0]]
    return None


# Fuzz


@dataclass
class Fuzz:
    """Counts of a fuzz."""

    trajectories: int = 0
    turns: int = 0
    calls: int = 0
    sampled_ids: int = 0
    rerenders: int = 0
    needless_rerenders: int = 0
    violations: int = 0
    exceptions: int = 0

    def add(self, rendering: Rendering, trajectory: Trajectory, log: list[tuple[list[int], list[int]]]) -> None:
        """Count a trajectory and compare it with what the engine received and sampled."""
        self.trajectories += 1
        self.turns += len(log)
        self.calls += len(trajectory.calls)
        self.sampled_ids += sum(len(sampled) for _, sampled in log)
        self.exceptions += trajectory.outcome != "ok"
        self.rerenders += len(trajectory.earlier)
        self.needless_rerenders += len(trajectory.earlier) if rendering.keeps_thinking else 0
        self.violations += not _is_exact(trajectory, log)


def _is_exact(trajectory: Trajectory, log: list[tuple[list[int], list[int]]]) -> bool:
    """Return True if the parts of a trajectory are the prompts and samples of the engine, with mask and logprobs."""
    turns = iter(log)
    for stream in [*trajectory.earlier, trajectory.tokens]:
        ids, position = stream.ids.tolist(), 0
        expected_mask = bytearray(len(ids))
        while position < len(ids) and (turn := next(turns, None)) is not None:
            prompt, sampled = turn
            position = len(prompt) + len(sampled)
            if ids[:position] != prompt + sampled:
                return False
            expected_mask[len(prompt) : position] = b"\1" * len(sampled)
            if stream is trajectory.tokens or position < len(ids):
                continue
            break
        logprobs = [-1.0 if bit else 0.0 for bit in expected_mask]
        if stream.mask != expected_mask or stream.logprobs.tolist() != logprobs:
            return False
    return next(turns, None) is None


async def fuzz(rendering: Rendering, count: int, generator: random.Random) -> Fuzz:
    """Play random models."""
    found = Fuzz()
    turns = [turn for calls in PROBE_CALLS.values() if (turn := own_turn(rendering, calls)) is not None]
    tools = [ProbeTool(schema) for schema in PROBE_TOOLS]
    logs: dict[str, list[tuple[list[int], list[int]]]] = {}
    longest: dict[str, int] = {}

    def script(request_id: str, prompt: Sequence[int], turn: int) -> list[int]:
        trajectory = request_id.rsplit("-", 2)[0]
        last = longest.setdefault(trajectory, generator.randint(1, MAX_FUZZ_TURNS))
        sampled = _random_turn(rendering, turns, generator, is_last=turn + 1 >= last)
        logs.setdefault(trajectory, []).append((list(prompt), sampled))
        return sampled

    engine = ScriptedEngine(script)
    limits = {"max_assistant_turns": MAX_FUZZ_TURNS + 2, "max_parallel_calls": 3, "max_response_len": 8192}
    rollout = Rollout(engine=engine, rendering=rendering, tools=tools, limits=limits, max_in_flight=1)
    async for trajectory in rollout.run([QUESTION], n=count):
        found.add(rendering, trajectory, logs.pop(trajectory.request_id, []))
    return found


def _random_turn(rendering: Rendering, turns: list[list[int]], generator: random.Random, *, is_last: bool) -> list[int]:
    """Return a turn of text, calls, cut calls, markers and random ids, which ends with a stop token."""
    control_tokens = sorted(rendering.renderer.vocabulary.control_token_texts)  # type: ignore[attr-defined]
    pieces: list[list[int]] = []
    for _ in range(generator.randint(0, 2) if is_last else generator.randint(1, 4)):
        turn = generator.choice(turns)[:-1]
        kind = generator.randrange(1 if is_last else 6)
        match kind:
            case 0:
                pieces.append(rendering.encode(generator.choice(["Let me see.", "\n\n", " 🎉 é", "{", "x < y", ""])))
            case 1:
                pieces.append(turn[: generator.randint(0, len(turn))])
            case 2:
                pieces.append([generator.choice(control_tokens)])
            case 3:
                pieces.append([generator.randrange(rendering.vocab_size) for _ in range(3)])
            case _:
                pieces.append(turn)
    ids = [token_id for piece in pieces for token_id in piece]
    end = next((index for index, token_id in enumerate(ids) if token_id in rendering.stop_ids), len(ids))
    return [*ids[:end], generator.choice(rendering.stop_ids)]


# Output


def table_of(results: list[Result]) -> str:
    """Return the table of the documentation."""
    lines = ["| model | form of calls | kinds of calls | earlier ids | needs |", "|---|---|---|---|---|"]
    for result in results:
        name = f"{result.model} ¹" if result.stand_in else result.model
        kept = "kept" if result.earlier_ids.startswith("kept") else "rendered again"
        kinds = f"{result.executed} of {len(PROBE_CALLS)}"
        needs = f"`{result.remedy}`" if result.remedy else "" if result.usable else "a chat template"
        lines.append(f"| {name} | `{result.form}` | {kinds} | {kept} | {needs} |")
    return "\n".join(lines)


def main() -> None:
    """Run the checks and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{FUZZ_QUICK} random trajectories, not {FUZZ}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random trajectories")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    fuzz_count = FUZZ_QUICK if options.quick else FUZZ
    zoo = ModelZoo()
    generator = random.Random(options.seed)
    results: list[Result] = []
    total = Fuzz()
    formats = 0
    with tempfile.TemporaryDirectory() as scratch:
        for index, model in enumerate(MODELS):
            result, rendering = check_model(zoo, model, Path(scratch))
            results.append(result)
            count = fuzz_count * (index + 1) // len(MODELS) - fuzz_count * index // len(MODELS)
            if rendering is not None and count:
                found = asyncio.run(fuzz(rendering, count, generator))
                formats += 1
                for name, value in asdict(found).items():
                    setattr(total, name, getattr(total, name) + value)
            print(f"{index + 1} of {len(MODELS)}: {model.name}", file=sys.stderr)
    works = [result for result in results if result.executed == result.rendered > 0]
    report: dict[str, Any] = {
        "models": len(results),
        "usable": sum(result.usable for result in works),
        "usable_with_remedy": len(works),
        "silent_failures": sum(len(result.silent_failures) for result in results),
        "depends_on_directory": sum(not result.same_elsewhere for result in results),
        "qwen3_load_cpu_seconds": next(result.load_cpu_s for result in results if result.model == "Qwen3-8B"),
        "documentation_differs": int(table_of(results) not in PAGE.read_text()),
        "fuzz_formats": formats,
        **{f"fuzz_{name}": value for name, value in asdict(total).items()},
    }
    if options.table:
        print(table_of(results))
    elif options.json:
        print(json.dumps({**report, "results": [asdict(result) for result in results]}, indent=2))
    else:
        for name, value in report.items():
            print(f"{name:24} {value:.2f}" if isinstance(value, float) else f"{name:24} {value}")
    if exceeded := [f"{name} = {report[name]}" for name, is_met in BOUNDS.items() if not is_met(report[name])]:
        sys.exit(f"out of bounds: {', '.join(exceeded)}")


if __name__ == "__main__":
    main()
