"""Draws the display of `toolroll run`: `python docs/make_run_picture.py`.

The run is a real one, of examples/gsm8k, with a sandbox of its own. Only the engine is none: it plays a model that
computes with the tools and is right in most cases, as no such model runs on a machine without a GPU.
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

from toolroll.cli.run_display import Pace, panel
from toolroll.cli.run_summary import summary
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.run.config import RunConfig
from toolroll.run.run import Run

ROOT = Path(__file__).parent.parent
CONFIG = "examples/gsm8k/run.yaml"
PART = 0.6
"""How much of the run is done in the picture."""


class Player(ScriptedEngine):
    """A model that writes a program, submits what it printed, and says it."""

    def __init__(self, urls: object, *, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        problems = map(json.loads, (ROOT / "examples/gsm8k/problems.jsonl").read_text().splitlines())
        self._answers = {problem["question"]: problem["answer"] for problem in problems}
        self._random = random.Random(8)  # noqa: S311 (a picture's)
        super().__init__(self._next, seconds_per_token=0.03)

    def _next(self, request_id: str, prompt_ids: Sequence[int], turn: int) -> list[int]:
        text = self._tokenizer.decode(prompt_ids)
        answer = next(answer for question, answer in self._answers.items() if question in text)
        steps, number = re.findall(r"<<(.+?)=", answer), answer.rpartition("#### ")[2]
        if self._random.random() < 0.25:
            number = str(int(number) + 1)
        said = f"Step by step, that makes {number}.\n#### {number}"
        if turn == 0:
            code = f"print({steps[-1]})" if self._random.random() < 0.8 else "print(result)"
            said = f"I compute it.\n{_call('code_interpreter', code=code)}"
        elif turn == 1 and self._random.random() < 0.7:
            said = _call("calc_gsm8k_reward" if self._random.random() < 0.9 else "check", answer=number)
        return [*self._tokenizer.encode(said, add_special_tokens=False), self._tokenizer.eos_token_id]


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def draw(model: str, image: Path) -> None:
    """Run it, and draw how it stands on the way and at its end."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ toolroll run {CONFIG}", style="bold"))
    with tempfile.TemporaryDirectory() as folder:
        settings = ["engine.kind=make_run_picture.Player", f"engine.options.tokenizer={model}", f"model={model}"]
        settings += [f"rollout_data_dir={folder}", "max_in_flight=20"]
        async with Run(RunConfig.load(ROOT / CONFIG, settings)) as run:
            pace, waiting = Pace(), asyncio.create_task(run.wait())
            while True:
                status = await run.status()
                rates = pace.at(status)
                if status.total is not None and status.done >= PART * status.total:
                    break
                await asyncio.sleep(0.1)
            console.print(panel(CONFIG, status, rates))
            await waiting
        console.print(Text("…", style="dim"))
        console.print(summary(await run.status()))
    console.save_svg(str(image), title="toolroll run")


def main() -> None:
    """With the tokenizer of the model that the tests have, and a sandbox."""
    sys.modules["make_run_picture"] = sys.modules["__main__"]  # the config names the engine so
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


def iter_until(lines: Iterable[str], last: str) -> Iterator[str]:
    """Lines, up to the one that begins so."""
    for line in lines:
        yield line
        if line.startswith(last):
            return


if __name__ == "__main__":
    main()
