"""Run the benchmarks and update the figures and pictures of the documentation: `make figures`.

    python scripts/make_figures.py [BENCHMARK...]

By default, all benchmarks run, which takes about an hour on a machine that does nothing else. A table of figures is
placed between `<!-- figures: SCRIPT -->` and `<!-- end of figures -->`.
"""

import argparse
import io
import json
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
FIGURES_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

MAIN_BLOCK = re.compile(r"(<!-- main figures -->\n).*?(<!-- end of main figures -->)", re.DOTALL)
MAIN_FIGURES = (
    ("tokens per second of a rollout, relative to the bare engine", "{vs_bare_engine:.0%}", "rollout"),
    ("programs per second, relative to a new Python for each", "{vs_python_cold:.1f} ×", "sandbox"),
    ("CPU time of a program, relative to a bare isolated fork", "{vs_bare_isolated_fork:.1f} ×", "sandbox"),
    (
        "executions per second under a limit, relative to the original design",
        "{throughput_vs_original:.1f} ×",
        "limiter",
    ),
    ("remote calls per execution under a limit", "{rpcs_per_execution_contended:.4f}", "limiter"),
    ("time of 64 tool calls of one second each, relative to TRL's loop", "{tool_wall_vs_trl:.0%}", "trl"),
)
"""Descriptions of the figures for newcomers, their values, and the benchmarks that measure them."""

PICTURES = {
    "tools": [
        "toolroll tools list examples/custom_tool/tool_config.yaml",
        """toolroll tools call examples/custom_tool/tool_config.yaml convert '{"amount": 2, "unit": "cup"}'""",
        """toolroll tools call examples/custom_tool/tool_config.yaml convert '{"amount": "two", "unit": "pinch"}'""",
    ]
}


def table(script: str) -> str:
    """Run a benchmark and return its figures as a Markdown table."""
    done = subprocess.run([sys.executable, script, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = (f"| `{name}` | {value:,} |" for name, value in json.loads(done.stdout.splitlines()[-1]).items())
    return "\n".join([f"`python {script}`:", "", "| figure | value |", "|---|---|", *rows, ""])


def read_figures() -> dict[str, float]:
    """Return all figures of the documentation by name."""
    found: dict[str, float] = {}
    for block in FIGURES_BLOCK.finditer((ROOT / "docs/benchmarks.md").read_text()):
        for name, value in re.findall(r"^\| `(\w+)` \| ([\d,.]+) \|$", block[0], re.MULTILINE):
            found[name] = float(value.replace(",", ""))
    return found


def main_table() -> str:
    """Return the figures for newcomers as a Markdown table."""
    figures = read_figures()
    rows = (f"| {what} | {value.format(**figures)} | `benchmarks/{name}.py` |" for what, value, name in MAIN_FIGURES)
    return "\n".join(["| figure | value | measured by |", "|---|---|---|", *rows, ""])


def plot(path: Path) -> None:
    """Draw the main figures as bars: how many times as fast as the alternative."""
    from matplotlib.figure import Figure

    figures = read_figures()
    bars = {
        "tool calls of a step\nvs. TRL's loop": 1 / figures["tool_wall_vs_trl"],
        "executions under a limit\nvs. the original design": figures["throughput_vs_original"],
        "programs\nvs. a new Python for each": figures["vs_python_cold"],
        "tokens of a rollout\nvs. the bare engine": figures["vs_bare_engine"],
    }
    drawing = Figure(figsize=(7, 2.8), layout="constrained")
    axes = drawing.subplots()
    drawn = axes.barh([*bars][::-1], [*bars.values()][::-1], color="#4051b5")
    axes.bar_label(drawn, [f"{value:.2g} ×" for value in [*bars.values()][::-1]], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 200)
    axes.set_xticks([1, 10, 100], ["1 ×", "10 ×", "100 ×"])
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_xlabel("throughput, relative to the alternative in the same run")
    axes.spines[["top", "right"]].set_visible(False)
    drawing.savefig(path, metadata={"Date": None})


def picture(name: str, lines: list[str]) -> None:
    """Run commands and draw their output in a terminal as SVG."""
    console = Console(record=True, width=110, file=io.StringIO())
    for line in lines:
        console.print(Text(f"$ {line}", style="bold"))
        environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "COLUMNS": "108", "FORCE_COLOR": "1"}
        done = subprocess.run(
            ["/bin/bash", "-c", f"{line} 2>&1"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        console.print(Text.from_ansi(done.stdout))
    console.save_svg(str(ROOT / f"docs/images/{name}.svg"), title="toolroll")


def main() -> None:
    """Update the figures of the named benchmarks, or all figures and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help="for example limiter")
    names = parser.parse_args().benchmarks
    for name, lines in PICTURES.items() if not names else ():
        picture(name, lines)

    def update(block: re.Match[str]) -> str:
        is_chosen = not names or Path(block[2]).stem in names
        return block[1] + table(block[2]) + block[3] if is_chosen else block[0]

    page = ROOT / "docs/benchmarks.md"
    page.write_text(FIGURES_BLOCK.sub(update, page.read_text()))
    update_main_figures()


def update_main_figures() -> None:
    """Write the figures for newcomers into the pages that show them."""
    for page in (ROOT / "README.md", ROOT / "docs/benchmarks.md"):
        page.write_text(MAIN_BLOCK.sub(lambda found: found[1] + main_table() + found[2], page.read_text()))
    plot(ROOT / "docs/images/figures.svg")


if __name__ == "__main__":
    main()
