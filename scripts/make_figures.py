"""Run the benchmarks and update the figures and pictures of the documentation: `make figures`.

A table of figures is placed between `<!-- figures: SCRIPT -->` and `<!-- end of figures -->`.
"""

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
    """Update all pictures and figures."""
    for name, lines in PICTURES.items():
        picture(name, lines)
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        made = FIGURES_BLOCK.sub(lambda found: found[1] + table(found[2]) + found[3], text)
        if made != text:
            page.write_text(made)


if __name__ == "__main__":
    main()
