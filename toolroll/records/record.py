"""Record: one line of a dump, whoever wrote it.

Our own lines say everything. verl's (0.6 to 0.9) say `input, output, gts, score, step` and what the reward function
gave beside the score; the newer trainer's add `uid`, `{group}_{sample}_{part}`. What isn't said is None or empty, and
the conversation is read out of the text (conversation.py). The line as it was parsed is in `fields`.

Text may have lone surrogates: models write them. Who encodes it must say what becomes of them.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

from toolroll.errors import Fault
from toolroll.records.conversation import messages_of, turns_and_calls
from toolroll.records.json_line import BadLine, decode
from toolroll.records.packed import Tokens, unpack
from toolroll.records.summary import Summary

FORMAT = "toolroll/1"
"""What our lines say that they are. The number changes when what a reader of it relies on does."""


@dataclass(frozen=True, slots=True)
class Record:
    """One sample."""

    step: int | None
    score: float | None
    input: str
    output: str
    gts: Any
    """The ground truth."""
    request_id: str | None
    group: str | None
    """The same for all samples of one prompt; of verl's lines that don't say, a mark of the prompt's text."""
    sample: int | None
    calls: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    rewards: dict[str, Any]
    finish_reason: str | None
    outcome: str | None
    fidelity: str | None
    error: str | None
    seconds: float | None
    fields: dict[str, Any]
    """The whole line."""

    @classmethod
    def parse(cls, line: bytes) -> Record:
        """Read a line. Raises BadLine, which says what is wrong with it."""
        fields = decode(line)
        form = fields.get("format")
        if isinstance(form, str) and form.startswith("toolroll/") and form != FORMAT:
            raise BadLine(f"It was written by another toolroll, in the form {form}; this one reads {FORMAT}.")
        group, sample = _group(fields)
        return cls(
            step=_int(fields.get("step")),
            score=number(fields.get("score")),
            input=_text(fields.get("input")) or "",
            output=_text(fields.get("output")) or "",
            gts=fields.get("gts"),
            request_id=_text(fields.get("request_id")),
            group=group,
            sample=sample,
            calls=_objects(fields.get("calls")),
            turns=_objects(fields.get("turns")),
            rewards=rewards if isinstance(rewards := fields.get("rewards"), dict) else {},
            finish_reason=_text(fields.get("finish_reason")),
            outcome=_text(fields.get("outcome")),
            fidelity=_text(fields.get("fidelity")),
            error=_text(fields.get("error")),
            seconds=number(fields.get("seconds")),
            fields=fields,
        )

    @property
    def is_ours(self) -> bool:
        """Whether toolroll wrote it, and everything is said."""
        return self.fields.get("format") == FORMAT

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation: as it was written, or read out of the text."""
        return _objects(self.fields.get("messages")) or messages_of(self.input, self.output)

    @property
    def tokens(self) -> Tokens | None:
        """The tokens, where they were written. Raises BadLine where they can't be read."""
        packed = self.fields.get("tokens")
        return unpack(packed) if self.is_ours and isinstance(packed, dict) else None

    @property
    def earlier(self) -> list[Tokens]:
        """Where the template wrote an earlier turn anew: the tokens up to there, each a sequence of its own."""
        return [unpack(packed) for packed in _objects(self.fields.get("earlier"))] if self.is_ours else []

    def summary(self) -> Summary:
        """What a list shows of it."""
        turns, calls = len({str(turn.get("turn")) for turn in self.turns}), len(self.calls)
        if not self.is_ours:
            turns, calls = turns_and_calls(self.input, self.output)
        faults = [call.get("fault") for call in self.calls]
        return Summary(
            step=self.step,
            score=self.score,
            turns=turns,
            calls=calls,
            policy_faults=faults.count(Fault.POLICY.value),
            infra_faults=faults.count(Fault.INFRA.value),
            finish_reason=self.finish_reason,
            outcome=self.outcome,
            fidelity=self.fidelity,
            group=self.group,
            sample=self.sample,
            request_id=self.request_id,
            tokens=self._length(),
            seconds=self.seconds,
        )

    def _length(self) -> int | None:
        """How many tokens, without unpacking them."""
        packed = self.fields.get("tokens")
        spans = _objects(packed.get("spans")) if self.is_ours and isinstance(packed, dict) else []
        return _int(spans[-1].get("end")) if spans else None


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, int | float):
        try:
            return float(value) if math.isfinite(value) else None
        except OverflowError:
            return None
    return None


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) or value is None else str(value)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _group(fields: dict[str, Any]) -> tuple[str | None, int | None]:
    """Which prompt it is of, and which of its samples it is."""
    if "group" in fields:
        return _text(fields["group"]), _int(fields.get("sample"))
    uid = fields.get("uid")
    if isinstance(uid, str):
        parts = uid.rsplit("_", 2)
        if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
            return parts[0], int(parts[1])
        return uid, None
    prompt = fields.get("input")
    if isinstance(prompt, str):
        return f"#{zlib.crc32(prompt.encode('utf-8', 'surrogatepass')):08x}", None
    return None, None
