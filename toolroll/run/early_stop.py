"""Decide that a run makes no sense to continue: everything fails in the same way. Pure, without clock or I/O."""

from __future__ import annotations

import re

from toolroll.run.aggregates import SampleOutcome

MAX_SAME_ERRORS = 32
"""Number of trajectories, from the start of a run, that may all fail with the same error."""
MAX_SAME_BUGS = 4
"""The same for an exception in a reward function or tool, which another attempt would not avoid."""
_VARYING = re.compile(r"[0-9a-f]{8,}|\d+(\.\d+)?")
"""Ids and numbers, such as attempts and seconds."""


class EarlyStop:
    """Watches the outcomes of a run from its start.

    Attributes:
        failure: Why the run should stop, or None.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._count = 0
        self._kind: str | None = None
        self._is_over = False
        """True if a trajectory has succeeded or failed in another way, so that the run is worth continuing."""

    def add(self, outcome: SampleOutcome) -> None:
        """Add the outcome of a trajectory."""
        if self._is_over or self.failure is not None:
            return
        kind = None if outcome.error is None else _VARYING.sub("#", outcome.error)
        if kind is None or self._kind not in (None, kind):
            self._is_over = True
            return
        self._kind, self._count = kind, self._count + 1
        if self._count >= (MAX_SAME_ERRORS if outcome.retryable else MAX_SAME_BUGS):
            self.failure = (
                f"The first {self._count} trajectories failed with the same error: {outcome.error} Fix it and run the "
                "same command again: failed samples are attempted again."
            )
