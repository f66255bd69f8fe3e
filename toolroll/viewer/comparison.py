"""Two samples of one prompt, side by side: what is the same, and what isn't. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from toolroll.records.index import StepFile
from toolroll.records.summary import Bad, Summary
from toolroll.viewer import figures
from toolroll.viewer.document import Block, Document, Kind
from toolroll.viewer.harmless import one_line


class Fact(NamedTuple):
    """One thing that is known of both."""

    name: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        """Whether they aren't the same in this."""
        return self.left != self.right


def facts(left: Summary, right: Summary) -> list[Fact]:
    """What a list shows of each."""
    return [Fact(name, one, other) for (name, one), (_, other) in zip(_shown(left), _shown(right), strict=True)]


def group_rows(step: StepFile, row: int) -> list[int]:
    """The samples of the same prompt in the same step, this one among them, in the order of the file."""
    column = step.column("group")
    group = column[row]
    if group is None:
        return [row]
    return [other for other in range(len(step)) if column[other] == group and not isinstance(step.summary(other), Bad)]


def fold_shared(left: Document, right: Document) -> tuple[Document, Document]:
    """Both, with the beginning that they have in common as one folded block."""
    shared = 0
    for one, other in zip(left.blocks, right.blocks, strict=False):
        if (one.kind, one.title, one.text) != (other.kind, other.title, other.text):
            break
        shared += 1
    return _folded(left, shared), _folded(right, shared)


def _folded(document: Document, shared: int) -> Document:
    if not shared:
        return document
    text = "\n\n".join(f"{block.title}\n{block.text}".strip() for block in document.blocks[:shared])
    title = f"the first {shared} parts are the same" if shared > 1 else "the first part is the same"
    rest = list(document.blocks[shared:])
    if rest and rest[0].beside:
        rest[0] = replace(rest[0], beside=False)
    return Document([Block(Kind.NOTE, title, text, folded=True), *rest])


def _shown(summary: Summary) -> Sequence[tuple[str, str]]:
    return (
        ("score", figures.score(summary.score)),
        ("turns", figures.count(summary.turns)),
        ("calls", figures.count(summary.calls)),
        ("faults", _faults(summary)),
        ("tokens", figures.count(summary.tokens)),
        ("time", figures.seconds(summary.seconds)),
        ("finish", one_line(summary.finish_reason or figures.UNKNOWN, 20)),
    )


def _faults(summary: Summary) -> str:
    infra = f" + {summary.infra_faults} infra" if summary.infra_faults else ""
    return f"{summary.policy_faults or 0}{infra}"
