"""Mark translations as up to date: `python scripts/mark_translations.py docs/zh/tools.md …`.

The last line of a translated page has the hash of the English page that it translates. A test fails if the English page
has changed since. Translate the change, or find that there is nothing to translate, then run this script.
"""

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"\n*<!-- translation of (\S+) ([0-9a-f]{12}) -->\n*\Z")


def translations() -> dict[Path, Path]:
    """Return the English page of each translated page."""
    pages = {page: ROOT / "docs" / page.relative_to(ROOT / "docs/zh") for page in (ROOT / "docs/zh").rglob("*.md")}
    return {ROOT / "README.zh-CN.md": ROOT / "README.md", **pages}


def mark(english: Path) -> str:
    """Return the mark of a translation of the present English page."""
    digest = hashlib.sha256(english.read_bytes()).hexdigest()[:12]
    return f"<!-- translation of {english.relative_to(ROOT).as_posix()} {digest} -->"


def main() -> None:
    """Write the marks of the given pages."""
    pages = translations()
    for name in sys.argv[1:]:
        page = Path(name).resolve()
        page.write_text(f"{MARK.sub('', page.read_text()).rstrip()}\n\n{mark(pages[page])}\n")


if __name__ == "__main__":
    main()
