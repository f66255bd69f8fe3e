"""Draw the display of `toolroll run` for docs/run.md: `python scripts/make_run_picture.py`.

The picture shows a real run of examples/gsm8k with a real sandbox. Only the engine is simulated, so that no GPU is
needed: it plays a model that uses the tools and usually answers correctly.
"""

import asyncio
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from toolroll.cli.run_display import RateMeter, status_panel, summary_tables
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.run.config import RunConfig
from toolroll.run.run import Run

ROOT = Path(__file__).parent.parent
CONFIG = "examples/gsm8k/run.yaml"
SHOWN_FRACTION = 0.6
"""Fraction of the run that is done in the picture."""


class SimulatedEngine(ScriptedEngine):
    """Plays a model that runs a program, submits the result, and answers with it."""

    def __init__(self, urls: object, *, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        problems = map(json.loads, (ROOT / "examples/gsm8k/problems.jsonl").read_text().splitlines())
        self._answers = {problem["question"]: problem["answer"] for problem in problems}
        self._random = random.Random(8)
        super().__init__(self._next, seconds_per_token=0.03)

    def _next(self, request_id: str, prompt_ids: Sequence[int], turn: int) -> list[int]:
        prompt = self._tokenizer.decode(prompt_ids)
        answer = next(answer for question, answer in self._answers.items() if question in prompt)
        steps, number = re.findall(r"<<(.+?)=", answer), answer.rpartition("#### ")[2]
        if self._random.random() < 0.25:
            number = str(int(number) + 1)
        text = f"Step by step, that makes {number}.\n#### {number}"
        if turn == 0:
            code = f"print({steps[-1]})" if self._random.random() < 0.8 else "print(result)"
            text = f"I compute it.\n{_call('code_interpreter', code=code)}"
        elif turn == 1 and self._random.random() < 0.7:
            text = _call("calc_gsm8k_reward" if self._random.random() < 0.9 else "check", answer=number)
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def draw(model: str, image: Path) -> None:
    """Run the example, and draw its display in progress and at the end."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ toolroll run {CONFIG}", style="bold"))
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            "engine.kind=make_run_picture.SimulatedEngine",
            f"engine.options.tokenizer={model}",
            f"model={model}",
        ]
        settings += [f"rollout_data_dir={folder}", "max_in_flight=20"]
        async with Run(RunConfig.load(ROOT / CONFIG, settings)) as run:
            rate_meter, waiting = RateMeter(), asyncio.create_task(run.wait())
            while True:
                status = await run.status()
                rates = rate_meter.update(status)
                if status.total is not None and status.done >= SHOWN_FRACTION * status.total:
                    break
                await asyncio.sleep(0.1)
            console.print(status_panel(CONFIG, status, rates))
            await waiting
        console.print(Text("…", style="dim"))
        console.print(summary_tables(await run.status()))
    console.save_svg(str(image), title="toolroll run")


def main() -> None:
    """Draw the picture, with the tokenizer of the tests' model and a new sandbox."""
    sys.modules["make_run_picture"] = sys.modules["__main__"]  # the config refers to the engine by this name
    made = subprocess.run([ROOT / ".ci/sglang"], stdout=subprocess.PIPE, text=True, check=True).stdout
    model = dict(line.split("=", 1) for line in made.split())["model"]
    serve = [sys.executable, "-m", "toolroll.cli", "sandbox", "serve", "--port", "0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as sandbox:
        assert sandbox.stdout is not None
        greeting = "".join(iter_until(sandbox.stdout, "serving on "))
        os.environ["SANDBOX_FUSION_URL"] = greeting.split()[-1]
        try:
            asyncio.run(draw(model, ROOT / "docs/images/run.svg"))
        finally:
            sandbox.terminate()


def iter_until(lines: Iterable[str], prefix: str) -> Iterator[str]:
    """Yield lines up to the first one that starts with the prefix."""
    for line in lines:
        yield line
        if line.startswith(prefix):
            return


if __name__ == "__main__":
    main()
