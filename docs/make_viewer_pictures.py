"""Writes the pictures of docs/viewer.md, and its table of keys: `make figures`.

The viewer is opened on a run that is the same every time, keys are pressed, and the screen is kept as SVG.
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
from viewer.dumps import ours  # noqa: E402

from toolroll.viewer.keys import GROUPS  # noqa: E402

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
KEYS = re.compile(r"(<!-- keys -->\n).*?(<!-- end of keys -->)", re.DOTALL)


async def picture(name: str, size: tuple[int, int], keys: tuple[str, ...], tokenizer: str) -> None:
    """One screen, after some keys."""
    async with viewing(Path("runs/gsm8k"), size, tokenizer=tokenizer) as user:
        for key in keys:
            await (user.type(key.removeprefix("type:")) if key.startswith("type:") else user.press(key))
        await user.pilot.pause(1.0)
        image = user.app.export_screenshot(title="toolroll view runs/gsm8k", simplify=True)
        (ROOT / f"docs/images/viewer-{name}.svg").write_text(image)


def table_of_keys() -> str:
    """All keys, as Markdown."""
    rows = ["| key | |", "|---|---|"]
    for _, keys in GROUPS:
        rows += [f"| {' '.join(f'`{one}`' for one in key.shown.split())} | {key.help} |" for key in keys]
    return "\n".join(rows) + "\n"


async def main() -> None:
    """Everything anew."""
    page = ROOT / "docs/viewer.md"
    page.write_text(KEYS.sub(lambda found: found[1] + table_of_keys() + found[2], page.read_text()))
    tokenizer = make()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        tokenizer.save_pretrained("tokenizer")
        ours(Path("runs/gsm8k"), steps=range(1, 25), encode=tokenizer.encode)
        for name, (size, keys) in PICTURES.items():
            await picture(name, size, keys, "tokenizer")


if __name__ == "__main__":
    asyncio.run(main())
