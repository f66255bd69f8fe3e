"""Generate the pictures and the table of keys of docs/viewer.md: `make figures`.

The viewer opens a deterministic run; keys are pressed and the screen is saved as SVG.
"""

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from rollout.small_tokenizer import make  # noqa: E402
from viewer.driving import viewing  # noqa: E402
from viewer.dumps import write_toolroll_run  # noqa: E402

from toolroll.viewer.keys import BROWSE_KEYS  # noqa: E402

SMALL, LARGE = (80, 24), (160, 42)
PICTURES: dict[str, tuple[tuple[int, int], tuple[str, ...]]] = {
    "first": (LARGE, ("N", "N", "n", "n", "n")),
    "small": (SMALL, ("N", "N", "n", "n", "n", "enter", "j")),
    "tokens": (LARGE, ("N", "N", "n", "n", "n", "t")),
    "find": (SMALL, ("f", "type:NameError", "enter", "full_stop")),
    "filter": (SMALL, ("a", "slash", "type:score == 0 and fautls > 0")),
    "compare": (LARGE, ("N", "N", "N", "n", "c")),
    "plots": (LARGE, ("l",)),
}
"""Size of the terminal and keys to press, by the name of the picture."""
KEY_TABLE = re.compile(r"(<!-- keys -->\n).*?(<!-- end of keys -->)", re.DOTALL)


async def save_picture(name: str, size: tuple[int, int], keys: tuple[str, ...], tokenizer: str) -> None:
    """Press keys and save the screen."""
    async with viewing(Path("runs/gsm8k"), size, tokenizer=tokenizer) as user:
        for key in keys:
            await (user.type(key.removeprefix("type:")) if key.startswith("type:") else user.press(key))
        await user.pilot.pause(1.0)
        image = user.app.export_screenshot(title="toolroll view runs/gsm8k", simplify=True)
        (ROOT / f"docs/images/viewer-{name}.svg").write_text(image)


def key_table() -> str:
    """Return all keys as a Markdown table."""
    rows = [f"| {' '.join(f'`{one}`' for one in key.shown.split())} | {key.help} |" for key in BROWSE_KEYS]
    return "\n".join(["| Key | Action |", "|---|---|", *rows]) + "\n"


async def main() -> None:
    """Update the page and all pictures."""
    page = ROOT / "docs/viewer.md"
    page.write_text(KEY_TABLE.sub(lambda found: found[1] + key_table() + found[2], page.read_text()))
    tokenizer = make()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        tokenizer.save_pretrained("tokenizer")
        write_toolroll_run(Path("runs/gsm8k"), steps=range(1, 25), encode=tokenizer.encode)
        for name, (size, keys) in PICTURES.items():
            await save_picture(name, size, keys, "tokenizer")


if __name__ == "__main__":
    asyncio.run(main())
