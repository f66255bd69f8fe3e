"""One line of a dump, written by toolroll or by verl.

toolroll's lines have all fields. verl's lines (0.6 to 0.9) have `input, output, gts, score, step` and the extra values
of the reward function; its newer trainer adds `uid`, `{group}_{sample}_{part}`. Missing fields are None or empty, and
the conversation is parsed from the text (conversation.py). `fields` has the parsed line.

Strings may contain lone surrogates, because models write them. Code that encodes them needs an error handler.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolroll.errors import Fault
from toolroll.records.conversation import count_turns_and_calls, parse_messages
from toolroll.records.json_line import BadLine, decode
from toolroll.records.packed_tokens import PackedTokens, unpack
from toolroll.records.summary import SampleSummary

PROGRAM_OK = "ok"
"""Outcome of a program that ended without an error."""
FORMAT = "toolroll/1"
"""Value of the `format` field. The number changes with incompatible changes of the format."""
RESCORED_FIELD = "rescored"
"""Field of the scores that were added to a record."""


@dataclass(frozen=True, slots=True)
class Record:
    """One sample, as read from a dump."""

    step: int | None
    """The trainer's step."""
    score: float | None
    """Reward."""
    input: str
    """Text of the prompt."""
    output: str
    """Text after the prompt."""
    gts: Any
    """Ground truth."""
    request_id: str | None
    """Id of the trajectory."""
    group: str | None
    """Id that all samples of one prompt share. For verl's lines without one, a hash of the prompt."""
    sample: int | None
    """Index of the sample in its group."""
    calls: list[dict[str, Any]]
    """Tool calls."""
    turns: list[dict[str, Any]]
    """Answers of the engine."""
    rewards: dict[str, Any]
    """Components of the reward."""
    finish_reason: str | None
    """Reason why the trajectory ended."""
    outcome: str | None
    """`ok`, or `infra` if the sample must be excluded from the loss."""
    fidelity: str | None
    """Fidelity of the tokens."""
    error: str | None
    """Error message, if the trajectory failed."""
    seconds: float | None
    """Duration of the trajectory."""
    fields: dict[str, Any]
    """All fields of the line."""

    @classmethod
    def parse(cls, line: bytes) -> Record:
        """Parse a line.

        Raises:
            BadLine: If the line is not a JSON object, or has an unsupported format.
        """
        fields = decode(line)
        form = fields.get("format")
        if isinstance(form, str) and form.startswith("toolroll/") and form != FORMAT:
            raise BadLine(f"Unsupported format {form}. This version of toolroll reads {FORMAT}.")
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
    def is_native(self) -> bool:
        """Whether toolroll wrote the line, so that all fields are known."""
        return self.fields.get("format") == FORMAT

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation, parsed from the text if the line has no messages."""
        return _objects(self.fields.get("messages")) or parse_messages(self.input, self.output)

    @property
    def tokens(self) -> PackedTokens | None:
        """The tokens, or None if they were not written. Raises BadLine if they are damaged."""
        packed = self.fields.get("tokens")
        return unpack(packed) if self.is_native and isinstance(packed, dict) else None

    @property
    def earlier(self) -> list[PackedTokens]:
        """Token sequences from before each point where the template rendered an earlier turn differently."""
        return [unpack(packed) for packed in _objects(self.fields.get("earlier"))] if self.is_native else []

    @property
    def rescored(self) -> dict[str, float | None]:
        """Scores that `toolroll records rescore` has added, by name."""
        scores = self.fields.get(RESCORED_FIELD)
        return {name: number(score) for name, score in scores.items()} if isinstance(scores, dict) else {}

    def summary(self) -> SampleSummary:
        """Return the summary that lists show."""
        turns, calls = len({str(turn.get("turn")) for turn in self.turns}), len(self.calls)
        if not self.is_native:
            turns, calls = count_turns_and_calls(self.input, self.output)
        faults = [call.get("fault") for call in self.calls]
        packed = self.fields.get("tokens")  # counted without unpacking
        spans = _objects(packed.get("spans")) if self.is_native and isinstance(packed, dict) else []
        return SampleSummary(
            step=self.step,
            score=self.score,
            turns=turns,
            calls=calls,
            policy_faults=faults.count(Fault.POLICY.value),
            infra_faults=faults.count(Fault.INFRA.value),
            failed_programs=sum(outcome != PROGRAM_OK for outcome in map(program_outcome, self.calls) if outcome),
            finish_reason=self.finish_reason,
            outcome=self.outcome,
            fidelity=self.fidelity,
            group=self.group,
            sample=self.sample,
            request_id=self.request_id,
            tokens=_int(spans[-1].get("end")) if spans else None,
            seconds=self.seconds,
        )


def program_outcome(call: Mapping[str, Any]) -> str | None:
    """Return the outcome of the program that a call ran, e.g. "timeout", or None if it ran none.

    A call whose result is that of an earlier one, from the cache, ran none.
    """
    metrics = call.get("metrics")
    if not isinstance(metrics, Mapping) or isinstance(metrics.get("cache"), Mapping):
        return None
    outcome = metrics.get("outcome")
    return outcome if isinstance(outcome, str) else None


def number(value: Any) -> float | None:
    """Return a value as a float, or None if it is not a finite number."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer that is too large
        return None


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) or value is None else str(value)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _group(fields: dict[str, Any]) -> tuple[str | None, int | None]:
    """Return the group and the index of the sample in it."""
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
