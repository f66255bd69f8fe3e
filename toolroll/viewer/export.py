"""Save a sample as a Markdown file, or download it in a browser.

The text of the sample cannot break out: it is fenced by more backticks than it contains in a row, and titles are
written as inline code.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from textual.app import App

from toolroll._internal.sanitize import one_line
from toolroll.records.record import Record
from toolroll.records.summary import SampleSummary
from toolroll.viewer import formatting
from toolroll.viewer.documents.conversation import conversation
from toolroll.viewer.documents.document import Block, BlockKind
from toolroll.viewer.query.scan import SamplePosition


def export_sample(app: App[Any], position: SamplePosition, text: str) -> None:
    """Write the Markdown of a sample to a new file in the current directory and notify the user.

    In a browser, the file is downloaded instead.
    """
    name = export_file_name(position)
    if app.is_web:
        app.deliver_text(io.StringIO(text), save_filename=name)
        return
    path = unused_path(Path.cwd(), name)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        app.notify(f"Cannot write {path}: {error.strerror}.", severity="error", markup=False)
    else:
        app.notify(f"Saved to {path}", markup=False)


def export_file_name(position: SamplePosition) -> str:
    """Return a file name for a sample that is valid for any name of its step."""
    step = re.sub(r"[^\w.-]", "_", position.step.name)[:80] or "_"
    return f"step-{step}-sample-{position.row + 1}.md"


def unused_path(directory: Path, name: str) -> Path:
    """Return a path for a new file, with a number appended to the name if it exists."""
    path, number = directory / name, 2
    while path.exists():
        path = directory / f"{Path(name).stem}-{number}.md"
        number += 1
    return path


def markdown(record: Record, title: str) -> str:
    """Return a sample as a Markdown page.

    Args:
        record: Sample to export.
        title: Heading of the page.
    """
    parts = [f"# {inline_code(title)}", _summary_table(record.summary())]
    for block in conversation(record).blocks:
        level = "###" if block.beside or block.kind is BlockKind.CALL else "##"
        detail = f" ({block.detail})".replace("\u00a0", " ") if block.detail else ""
        parts.append(f"{level} {inline_code(block.title)}{detail}")
        if block.text:
            parts.append(code_block(block.text, _language(block)))
    return "\n\n".join(parts) + "\n"


def code_block(text: str, language: str = "") -> str:
    """Return a text as a fenced code block that the text cannot close."""
    fence = "`" * max(3, _longest_backticks(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def inline_code(text: str) -> str:
    """Return a short text as inline code."""
    longest = _longest_backticks(text)
    mark, space = "`" * (longest + 1), " " if longest else ""
    return f"{mark}{space}{text}{space}{mark}"


def _longest_backticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _language(block: Block) -> str:
    word = block.language or ""
    return word if re.fullmatch(r"[\w+#-]{1,20}", word) else "text"


def _summary_table(summary: SampleSummary) -> str:
    values = {
        "score": formatting.score(summary.score),
        "turns": formatting.count(summary.turns),
        "tool calls": formatting.count(summary.calls),
        "policy faults": formatting.count(summary.policy_faults),
        "infra faults": formatting.count(summary.infra_faults),
        "tokens": formatting.count(summary.tokens),
        "time": formatting.seconds(summary.seconds),
        "finish reason": summary.finish_reason,
        "outcome": summary.outcome,
        "fidelity": summary.fidelity,
        "group": summary.group,
        "sample": None if summary.sample is None else str(summary.sample),
        "request ID": summary.request_id,
    }
    cells = {name: one_line(value).replace("|", "\\|") for name, value in values.items() if value}
    rows = [f"| {name} | {inline_code(cell)} |" for name, cell in cells.items()]
    return "\n".join(["| field | value |", "|---|---|", *rows])
