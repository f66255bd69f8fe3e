"""Draw the display of `toolroll run` for docs/run.md: `python scripts/make_run_picture.py`.

The picture shows a real run of examples/gsm8k with a real sandbox and the scripted model of `toolroll demo`.
"""

import asyncio
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from toolroll.cli.run_display import RateMeter, status_panel, summary_tables
from toolroll.demo.demo_model import MODEL_DIR
from toolroll.run.config import RunConfig
from toolroll.run.run import Run

ROOT = Path(__file__).parent.parent
CONFIG = "examples/gsm8k/run.yaml"
SHOWN_FRACTION = 0.6
"""Fraction of the run that is done in the picture."""


async def draw(image: Path) -> None:
    """Run the example, and draw its display in progress and at the end."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ toolroll run {CONFIG}", style="bold"))
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            "engine.kind=toolroll.demo.demo_model.DemoModel",
            f"engine.options.problems={ROOT / 'examples/gsm8k/problems.jsonl'}",
            f"model={MODEL_DIR}",
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
    """Draw the picture, with a new sandbox."""
    serve = [sys.executable, "-m", "toolroll.cli", "sandbox", "serve", "--port", "0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as sandbox:
        assert sandbox.stdout is not None
        greeting = "".join(iter_until(sandbox.stdout, "serving on "))
        os.environ["SANDBOX_FUSION_URL"] = greeting.split()[-1]
        try:
            asyncio.run(draw(ROOT / "docs/images/run.svg"))
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
