"""The tokens of a trajectory, exactly as the engine received and sampled them.

Invariants of a `TokenStream`:

- It is append-only. Tokens are never changed and never re-encoded.
- Ids, mask and log-probabilities have the same length. Invalid values are rejected before anything is appended.
- The mask is 1 for sampled tokens and 0 for all others.
- The spans cover the stream in order, without gaps or overlaps.
- The log-probability of a token that was not sampled is 0. Either all sampled tokens have log-probabilities or none.
- An image is a range of placeholders, as many as the model sees. `images` has the ranges in order.

The ids are passed to the engine without a copy, so the cost of a turn does not depend on the length of the trajectory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from toolroll.images import ImageSpan


class Author(StrEnum):
    """The origin of a span."""

    PROMPT = "prompt"
    """The prompt, including the text of the chat template."""
    MODEL = "model"
    """Sampled by the engine."""
    TOOL = "tool"
    """Tool responses, including the text of the chat template up to the next assistant turn."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of tokens with one origin, from `start` to `end` (exclusive)."""

    author: Author
    turn: int
    """Index of the assistant turn, from 0. A tool response belongs to the turn that called the tool."""
    start: int
    end: int
    weight_version: str | None = None
    """Version of the weights that sampled the span."""


class TokenStream:
    """The tokens of one trajectory.

    Args:
        prompt_ids: Tokens of the prompt.
        images: Ranges of images in the prompt.

    Attributes:
        prompt_length: Number of tokens of the prompt.
        ids: All token ids, an `array("q")`.
        mask: The loss mask, a bytearray: 1 for sampled tokens, 0 for all others.
        logprobs: The log-probabilities, an `array("f")`; 0 for tokens that were not sampled.
        spans: The origin, turn and weight version of each range of tokens.
        images: The range of each image.

    Example:
        >>> stream = TokenStream([1, 2, 3])
        >>> stream.append_sampled([4, 5], [-0.1, -0.2], turn=0)
        >>> stream.append_unsampled([6], turn=0)
        >>> list(stream.mask), stream.response_ids
        ([0, 0, 0, 1, 1, 0], [4, 5, 6])
    """

    __slots__ = ("_has_logprobs", "ids", "images", "logprobs", "mask", "prompt_length", "spans")

    def __init__(self, prompt_ids: Sequence[int], images: Iterable[ImageSpan] = ()) -> None:
        self.prompt_length = len(prompt_ids)
        self.ids = array("q")
        self.mask = bytearray()
        self.logprobs = array("f")
        self.spans: list[Span] = []
        self.images = list(images)
        self._has_logprobs: bool | None = None
        self._append(prompt_ids, Author.PROMPT, 0, None, None)

    def __len__(self) -> int:
        return len(self.ids)

    def append_sampled(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, *, turn: int, weight_version: str | None = None
    ) -> None:
        """Append tokens that the engine sampled.

        Args:
            ids: Token ids.
            logprobs: Log-probability of each token, or None if the engine returned none.
            turn: Index of the assistant turn, from 0.
            weight_version: Version of the weights that sampled the tokens.

        Raises:
            ValueError: If the number of log-probabilities differs from the number of ids, or only some of the sampled
                tokens have log-probabilities.
            TypeError: If an id is not an integer or a log-probability is not a number.
        """
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(f"Expected one log-probability per token, got {len(logprobs)} for {len(ids)} tokens.")
        if ids:
            if self._has_logprobs not in (None, logprobs is not None):
                raise ValueError("The engine returned log-probabilities for only some of the sampled tokens.")
            self._has_logprobs = logprobs is not None
        self._append(ids, Author.MODEL, turn, logprobs, weight_version)

    def append_unsampled(self, ids: Sequence[int], *, turn: int, images: Iterable[ImageSpan] = ()) -> None:
        """Append tokens that the engine did not sample: tool responses and the template's text around them.

        Args:
            ids: Token ids.
            turn: Index of the assistant turn that called the tools, from 0.
            images: Ranges of images in `ids`.
        """
        start = len(self.ids)
        self._append(ids, Author.TOOL, turn, None, None)
        self.images += [span.shifted(start) for span in images]

    @property
    def has_logprobs(self) -> bool:
        """True if the sampled tokens have log-probabilities."""
        return bool(self._has_logprobs)

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt, including tool responses."""
        return len(self.ids) - self.prompt_length

    @property
    def prompt_ids(self) -> list[int]:
        """A copy of the prompt's ids."""
        return self.ids[: self.prompt_length].tolist()

    @property
    def response_ids(self) -> list[int]:
        """A copy of the ids after the prompt."""
        return self.ids[self.prompt_length :].tolist()

    @property
    def response_mask(self) -> list[int]:
        """The mask of `response_ids`."""
        return list(self.mask[self.prompt_length :])

    @property
    def response_logprobs(self) -> list[float] | None:
        """The log-probabilities of `response_ids`, or None if the engine returned none."""
        return self.logprobs[self.prompt_length :].tolist() if self._has_logprobs else None

    def _append(
        self, ids: Sequence[int], author: Author, turn: int, logprobs: Sequence[float] | None, version: str | None
    ) -> None:
        if not ids:
            return
        start = len(self.ids)
        new_ids = array("q", ids)  # an invalid value raises before anything is appended
        new_logprobs = array("f", bytes(4 * len(ids)) if logprobs is None else logprobs)
        self.ids.extend(new_ids)
        self.mask.extend((b"\1" if author is Author.MODEL else b"\0") * len(ids))
        self.logprobs.extend(new_logprobs)
        self.spans.append(Span(author, turn, start, len(self.ids), version))
