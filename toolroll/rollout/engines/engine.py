"""What a rollout asks of an inference engine.

A `TokenEngine` takes ids and gives the ids that it sampled: what the trainer trains on is what the engine saw. A
`ChatEngine` takes and gives text; it is for evaluation, and nothing that comes of it pretends to have tokens.

Both promise: an answer or InfraFault by the deadline, whatever the server does; what failed before anything was sampled
is tried again where that can help; a cancelled call is aborted at the engine too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from toolroll.schemas import Message

SamplingParams = Mapping[str, Any]
"""As the engine names them: `temperature`, `top_p`, …. `max_new_tokens` is the same for all engines."""


class Finish(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    """A stop token, which is the last of the ids."""
    LENGTH = "length"
    """The most tokens that it was allowed."""
    ABORT = "abort"
    """It was told to. The ids so far are there."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """What the engine says of one call, in seconds; None where it doesn't."""

    total: float
    """By our own clock, over all attempts."""
    queue: float | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the engine's prefix cache."""
    attempts: int = 1


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What the engine sampled."""

    ids: list[int]
    logprobs: list[float] | None
    """Of each id; None where the engine gives none."""
    finish: Finish
    weight_version: str | None = None
    """Which weights sampled it, by the name that the trainer gave them. Where they changed, those of the first id."""
    weight_changes: tuple[tuple[int, str], ...] = ()
    """Where they changed on the way: from which of the ids on, and to which."""
    problem: str | None = None
    """Of an aborted call that no server answered: what kept them from it. Nothing is known of what was sampled."""
    endpoint: str = ""
    timings: Timings = field(default_factory=lambda: Timings(total=0.0))

    def by_weights(self) -> Iterator[tuple[list[int], list[float] | None, str | None]]:
        """Ids, log-probabilities and weights, in as many parts as there were weights."""
        parts: list[tuple[int, str | None]] = [(0, self.weight_version), *self.weight_changes]
        ends = [*(start for start, _ in parts[1:]), len(self.ids)]
        for (start, version), end in zip(parts, ends, strict=True):
            yield self.ids[start:end], None if self.logprobs is None else self.logprobs[start:end], version


@runtime_checkable
class TokenEngine(Protocol):
    """Ids in, ids out.

    It may have more: `abort_many(request_ids)`, where many are stopped with less than one by one;
    `context_length()`, how many ids a prompt and its answer may have together, so that no more is asked for; and
    `update_weights(model_path, version)`, by which a trainer gives it new weights from a directory.
    """

    logprobs_of: Literal["scaled", "raw"]
    """Whether log-probabilities are those of the distribution that was sampled from, or of the model's at T = 1."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> Generation:
        """Sample. `request_id` is this call's; calls of one `affinity` go to one server, whose cache has their prefix.

        `prompt_ids` is neither changed nor kept. `deadline` is on the clock of `time.monotonic()`.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a call. It ends with what it has, as ABORT. One that isn't there is no error."""
        ...

    async def close(self) -> None:
        """Close the connections of this event loop."""
        ...


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a chat server said."""

    message: Message
    finish: Finish
    timings: Timings


@runtime_checkable
class ChatEngine(Protocol):
    """Messages in, a message out."""

    async def chat(
        self,
        request_id: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> Reply:
        """Ask for the next message."""
        ...

    async def close(self) -> None:
        """Close the connections of this event loop."""
        ...
