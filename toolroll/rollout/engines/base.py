"""Interfaces between a rollout and an inference engine.

A `TokenEngine` takes token ids and returns the sampled ids, so the trainer sees exactly the tokens of the engine. A
`ChatEngine` takes and returns messages. It is meant for evaluation: its trajectories contain no tokens.

Invariants of both:

- Every call returns or raises an `InfraFault` by its deadline, even if the server never responds.
- Failures before the sampling are retried if a retry can help.
- A cancelled call is aborted at the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal, Protocol, runtime_checkable

from toolroll.schemas import Message

SamplingParams = Mapping[str, Any]
"""Sampling parameters by the engine's names, such as `temperature`. `max_new_tokens` is the same for all engines."""
LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
"""Distribution of the log-probabilities, by vLLM's names.

`processed_logprobs` are those of the distribution that was sampled from, after temperature and top_p. `raw_logprobs`
are those of the model at temperature 1.
"""


class FinishType(StrEnum):
    """Reason why the engine stopped sampling."""

    STOP = "stop"
    """A stop token, which is the last of the ids."""
    LENGTH = "length"
    """The maximum number of tokens."""
    ABORT = "abort"
    """An abort. The result has the ids sampled so far."""


@dataclass(frozen=True, kw_only=True)
class GenerationTimings:
    """Timings of one call."""

    total: float
    """Duration of all attempts in seconds, measured by the client."""
    queue: float | None = None
    """Time in the engine's queue in seconds. None if the engine does not report it."""
    cached_tokens: int | None = None
    """Number of prompt tokens found in the engine's prefix cache. None if the engine does not report it."""
    attempts: int = 1


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Tokens sampled by one call."""

    ids: list[int]
    logprobs: list[float] | None
    """Log-probability of each id. None if the engine does not return them."""
    finish: FinishType
    weight_version: str | None = None
    """Version of the weights that sampled the first id, as named by the trainer."""
    weight_changes: tuple[tuple[int, str], ...] = ()
    """Changes of the weights during the call: index of the first id sampled by the new weights, and their version."""
    problem: str | None = None
    """Reason why an aborted call has no response from a server. The ids sampled by the server are unknown."""
    endpoint: str = ""
    timings: GenerationTimings = field(default_factory=lambda: GenerationTimings(total=0.0))

    def by_weights(self) -> Iterator[tuple[list[int], list[float] | None, str | None]]:
        """Split the generation where the weights changed.

        Yields:
            Ids, log-probabilities and weight version of each part.
        """
        bounds = [(0, self.weight_version), *self.weight_changes, (len(self.ids), None)]
        for (start, version), (end, _) in pairwise(bounds):
            yield self.ids[start:end], None if self.logprobs is None else self.logprobs[start:end], version


@runtime_checkable
class TokenEngine(Protocol):
    """Engine that takes token ids and returns sampled ids.

    An engine can have further methods, which a rollout uses if they exist:

    - `abort_many(request_ids)` aborts several calls at once.
    - `context_length()` returns the maximum number of ids of a prompt and its completion, or None.
    - `update_weights(model_path, version)` loads new weights from a directory.

    Example:
        engine = SGLangEngine("http://127.0.0.1:30000")
        generation = await engine.generate("t7/0", prompt_ids, {"max_new_tokens": 512}, affinity="t7")
    """

    logprobs_mode: LogprobsMode
    """Distribution of the log-probabilities."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> Generation:
        """Sample a completion of a prompt.

        An engine for models with vision has another keyword argument, `images: Sequence[ImageSpan] = ()`, the ranges of
        images in the prompt. It is passed only if there are any.

        Args:
            request_id: Id of this call, for `abort` and for messages.
            prompt_ids: Token ids of the prompt. They are neither modified nor kept.
            sampling_params: Sampling parameters, including `max_new_tokens`.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`.
            affinity: Calls with the same affinity go to the same server, whose cache contains their common prefix.

        Returns:
            The sampled tokens.

        Raises:
            EngineUnavailable: If no server returned a completion before the retries or the deadline were exhausted.
            EngineRefused: If the prompt or a parameter is invalid.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a call, which then returns the ids sampled so far with `FinishType.ABORT`.

        Args:
            request_id: Id of the call. Unknown ids are ignored.
        """
        ...

    async def close(self) -> None:
        """Close the connections of this event loop. The engine can be used again."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """Message returned by a chat server."""

    message: Message
    finish: FinishType
    timings: GenerationTimings
    tokens: int | None = None
    """Number of tokens of the prompt and the message. None if the server does not report it."""


@runtime_checkable
class ChatEngine(Protocol):
    """Engine that takes messages and returns a message.

    Example:
        engine = OpenAIEngine("http://127.0.0.1:30000", model="Qwen/Qwen3-8B")
        reply = await engine.chat("t7/0", [Message(role="user", content="Hello")], tools=[], sampling_params={})
    """

    async def chat(
        self,
        request_id: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> ChatReply:
        """Generate the next message of a conversation.

        Args:
            request_id: Id of this call, for messages.
            messages: Conversation so far.
            tools: Schemas of the available tools.
            sampling_params: Sampling parameters.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`.
            affinity: Calls with the same affinity go to the same server.

        Returns:
            The message of the assistant.

        Raises:
            EngineUnavailable: If no server returned a message before the retries or the deadline were exhausted.
            EngineRefused: If a message or a parameter is invalid.
        """
        ...

    async def close(self) -> None:
        """Close the connections of this event loop. The engine can be used again."""
        ...
