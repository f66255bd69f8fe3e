"""What the loop asks of the side that writes: the model behind an engine, with its tokens or only with its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from toolroll.rollout.clock import Clock
from toolroll.rollout.engines.engine import Finish
from toolroll.rollout.request import AsyncRolloutRequest
from toolroll.schemas import Message

if TYPE_CHECKING:
    from toolroll.rollout.rendering import Parsed

GRACE = 10.0
"""Seconds beyond its deadline in which an engine may give what it has: told to stop, it first ends what it computes."""


@dataclass(frozen=True)
class Written:
    """What the model wrote in one turn."""

    message: Message
    parsed: Parsed
    finish: Finish
    in_time: bool
    """Whether it had ended by its deadline, and wasn't stopped there."""


class Writer(Protocol):
    """One for all trajectories of a rollout."""

    logprobs_of: Literal["scaled", "raw"] | None

    async def begin(self, request: AsyncRolloutRequest) -> None:
        """Make the prompt. The request goes on to GENERATING, or ends."""
        ...

    async def write(self, request: AsyncRolloutRequest, clock: Clock) -> Written | None:
        """Have the model write its turn. None: it was interrupted, and goes on from there when asked again."""
        ...

    def go_on(self, request: AsyncRolloutRequest, new: Sequence[Message]) -> None:
        """The tools have answered. The request goes on to GENERATING, or ends."""
        ...

    def cut(self, text: str, request: AsyncRolloutRequest) -> str:
        """A tool's answer, no longer than it may be."""
        ...
