"""Summary of a sample, as shown in lists."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """Summary of one sample. A field is None if it is unknown, as many fields are in verl dumps."""

    step: int | None
    score: float | None
    turns: int
    """Number of model turns."""
    calls: int
    """Number of tool calls."""
    policy_faults: int
    """Tool calls that failed with a policy fault."""
    infra_faults: int
    """Tool calls that failed with an infra fault."""
    failed_programs: int
    """Programs that ended with an error, a timeout or too much memory. That is a result, and not a failed call."""
    finish_reason: str | None
    outcome: str | None
    fidelity: str | None
    group: str | None
    sample: int | None
    request_id: str | None
    tokens: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class UnreadableLine:
    """A line that cannot be read."""

    path: str
    """Path of the file."""
    number: int
    """Line number in the file, from 1."""
    problem: str
    """Error message."""
