"""A sample as Markdown, to be kept or sent around.

Whatever the sample's text holds, it stays text: it is fenced by more backticks than it has in a row, and titles are
written as code.
"""

from __future__ import annotations

import re

from toolroll.records.record import Record
from toolroll.records.summary import Summary
from toolroll.viewer import figures
from toolroll.viewer.conversation import conversation
from toolroll.viewer.document import Block, Kind
from toolroll.viewer.harmless import one_line

_BACKTICKS = re.compile("`+")


def markdown(record: Record, title: str) -> str:
    """The sample under a heading."""
    parts = [f"# {code(title)}", _facts(record.summary())]
    for block in conversation(record).blocks:
        level = "###" if block.beside or block.kind is Kind.CALL else "##"
        heading = f"{level} {code(block.title)}"
        detail = block.detail.replace("\u00a0", " ")
        parts.append(f"{heading} ({detail})" if detail else heading)
        if block.text:
            parts.append(fenced(block.text, _language(block)))
    return "\n\n".join(parts) + "\n"


def fenced(text: str, language: str = "") -> str:
    """A text that can't get out of its fence."""
    longest = max((len(found) for found in _BACKTICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def code(text: str) -> str:
    """A short text as code in a line."""
    longest = max((len(found) for found in _BACKTICKS.findall(text)), default=0)
    mark = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{mark}{space}{text}{space}{mark}"


def _language(block: Block) -> str:
    word = block.language or ""
    return word if re.fullmatch(r"[\w+#-]{1,20}", word) else "text"


def _facts(summary: Summary) -> str:
    facts = {
        "score": figures.score(summary.score),
        "turns": figures.count(summary.turns),
        "tool calls": figures.count(summary.calls),
        "the model's faults": figures.count(summary.policy_faults),
        "the infrastructure's faults": figures.count(summary.infra_faults),
        "tokens": figures.count(summary.tokens),
        "time": figures.seconds(summary.seconds),
        "finish reason": summary.finish_reason,
        "outcome": summary.outcome,
        "fidelity": summary.fidelity,
        "group": summary.group,
        "sample": None if summary.sample is None else str(summary.sample),
        "request id": summary.request_id,
    }
    rows = [f"| {name} | {code(_cell(value))} |" for name, value in facts.items() if value not in (None, "")]
    return "\n".join(["| | |", "|---|---|", *rows])


def _cell(text: str | None) -> str:
    return one_line(text or "").replace("|", "\\|")
