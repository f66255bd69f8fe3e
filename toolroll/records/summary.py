"""Summary: what a list shows of a sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """One sample in short. None where it isn't known, as of verl's dumps much isn't."""

    step: int | None
    score: float | None
    turns: int
    """Of the model."""
    calls: int
    """Of tools."""
    policy_faults: int
    """Calls that failed by the model's own doing."""
    infra_faults: int
    """Calls that failed by the infrastructure's."""
    finish_reason: str | None
    outcome: str | None
    fidelity: str | None
    group: str | None
    sample: int | None
    request_id: str | None
    tokens: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Bad:
    """A line that can't be read."""

    path: str
    number: int
    """Of the line in its file, from 1."""
    problem: str
    """What is wrong with it, for a person to read."""
