"""Count the package's lines of code, without docstrings, comments and blank lines.

python scripts/count_lines.py            # one row per package, and the total
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "toolroll"
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Return the number of lines that hold code.

    Args:
        source: Python source. Docstrings include those of attributes: any statement that is only a string.
    """
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def main() -> None:
    """Print the count of every package and the total."""
    counts: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parent.parts
        counts["/".join(parts[:3]) or "."] += lines_of_code(path.read_text(encoding="utf-8"))
    for package, count in sorted(counts.items()):
        print(f"{count:7,}  {package}")
    print(f"{counts.total():7,}  total")


if __name__ == "__main__":
    main()
