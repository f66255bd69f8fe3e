"""Draw `toolroll demo` and the viewer as one animated SVG, docs/images/demo.svg: `make figures`.

The demo runs in a real terminal (tmux). Its screens at a few moments become the frames.
"""

import io
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
SOCKET = "toolroll-demo-picture"
COLUMNS, ROWS = 100, 30
FRAMES = (
    ("4 samples each", (), 2.0),
    (r"\b2\d of 64", (), 1.5),
    (r"\b5\d of 64", (), 1.5),
    ("To view them", (), 4.0),
    ("▎ user", (), 3.0),
    ("▎ assistant", ("Down",) * 12, 3.0),
    ("mask 0: prompt tool", ("t", "j", "j", "j"), 4.0),
)
"""Text to wait for, keys to press before, and seconds for which the frame is shown."""


def tmux(*words: str) -> str:
    """Run a tmux command and return its output."""
    return subprocess.run(["tmux", "-L", SOCKET, *words], capture_output=True, text=True, check=True).stdout


def capture(pattern: str) -> str:
    """Wait until the screen shows a text and return the screen with its colors."""
    for _ in range(600):
        if re.search(pattern, tmux("capture-pane", "-p", "-t", "demo")):
            return tmux("capture-pane", "-p", "-e", "-t", "demo")
        time.sleep(0.05)
    raise TimeoutError(f"{pattern!r} was not shown:\n{tmux('capture-pane', '-p', '-t', 'demo')}")


def record() -> list[str]:
    """Run the demo and return its screens."""
    toolroll = Path(sys.executable).with_name("toolroll")
    with tempfile.TemporaryDirectory() as directory:
        command = f"echo '$ toolroll demo'; {shlex.quote(str(toolroll))} demo"
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        environment = ("-e", "COLORTERM=truecolor")
        tmux("-f", "/dev/null", "new-session", "-d", "-s", "demo", *size, *environment, "-c", directory, command)
        try:
            screens = []
            for pattern, keys, _ in FRAMES:
                for key in keys:
                    tmux("send-keys", "-t", "demo", key)
                    time.sleep(0.1)
                time.sleep(0.5 if keys else 0.0)
                screens.append(capture(pattern))
            return screens
        finally:
            tmux("kill-server")


def draw(screen: str, number: int) -> str:
    """Return one screen as SVG."""
    console = Console(record=True, width=COLUMNS, height=ROWS, file=io.StringIO(), color_system="truecolor")
    console.print(Text.from_ansi("\n".join([*screen.splitlines(), *[""] * ROWS][:ROWS])), no_wrap=True, crop=True)
    return console.export_svg(title="toolroll demo", unique_id=f"frame{number}")


def animate(pictures: list[str], seconds: list[float]) -> str:
    """Return one SVG that shows the pictures one after another."""
    total, start, styles = sum(seconds), 0.0, []
    for number, shown in enumerate(seconds):
        begin, end = 100 * start / total, 100 * (start + shown) / total
        hidden = f"0% {{opacity: 0}} {begin:.2f}% {{opacity: 0}} " if number else ""
        styles.append(
            f"@keyframes show{number} {{{hidden}{begin + 0.01:.2f}% {{opacity: 1}} {end:.2f}% {{opacity: 1}} "
            f"{min(100.0, end + 0.01):.2f}% {{opacity: 0}} 100% {{opacity: 0}}}}\n"
            f"#show{number} {{animation: show{number} {total}s infinite step-end; opacity: {int(number == 0)}}}"
        )
        start += shown
    opening = re.match(r"<svg[^>]*>", pictures[0])
    assert opening is not None
    inner = (re.sub(r"^<svg[^>]*>|</svg>\s*$", "", picture) for picture in pictures)
    groups = (f'<g id="show{number}">{content}</g>' for number, content in enumerate(inner))
    return "\n".join([opening[0], f"<style>{chr(10).join(styles)}</style>", *groups, "</svg>\n"])


def main() -> None:
    """Write the picture."""
    pictures = [draw(screen, number) for number, screen in enumerate(record())]
    (ROOT / "docs/images/demo.svg").write_text(animate(pictures, [seconds for *_, seconds in FRAMES]))


if __name__ == "__main__":
    main()
