"""TokenStream: the tokens of a trajectory, exactly as the engine saw and sampled them.

Invariants, at every moment:

- It only grows. What was appended is never changed, and never encoded anew.
- Ids, mask and log-probabilities are of one length.
- The mask is 1 for what the engine sampled, and 0 for everything else.
- The spans divide it without gap or overlap, in order, and say who wrote each part, in which turn, with which weights.
- The log-probability of a token that wasn't sampled is 0. They are there for all sampled tokens or for none.

The ids are passed to the engine as they are, without a copy, so that a turn costs the same however long the trajectory
is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Author(StrEnum):
    """Who wrote a span."""

    PROMPT = "prompt"
    """The data set, and the template around it."""
    MODEL = "model"
    """Sampled."""
    TOOL = "tool"
    """The tools' answers, and the template around them up to where the model goes on."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of tokens by one author, `start` to `end` (exclusive)."""

    author: Author
    turn: int
    """Which of the model's turns it belongs to, from 0; a tool's answer belongs to the turn that called it."""
    start: int
    end: int
    weight_version: str | None = None


class TokenStream:
    """The tokens of one trajectory.

    >>> stream = TokenStream([1, 2, 3])
    >>> stream.sampled([4, 5], [-0.1, -0.2], turn=0)
    >>> stream.given([6], turn=0)
    >>> list(stream.mask), stream.response_ids
    ([0, 0, 0, 1, 1, 0], [4, 5, 6])
    """

    __slots__ = ("_has_logprobs", "ids", "logprobs", "mask", "spans")

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids = array("q")
        self.mask = bytearray()
        self.logprobs = array("f")
        self.spans: list[Span] = []
        self._has_logprobs: bool | None = None
        self._append(prompt_ids, None, Author.PROMPT, 0, None)

    def __len__(self) -> int:
        return len(self.ids)

    def sampled(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, *, turn: int, weight_version: str | None = None
    ) -> None:
        """Append what the engine sampled."""
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(
                f"{len(ids)} ids came with {len(logprobs)} log-probabilities: each id has one, or none has."
            )
        if ids:
            if self._has_logprobs is None:
                self._has_logprobs = logprobs is not None
            elif self._has_logprobs != (logprobs is not None):
                raise ValueError("Some of the engine's answers have log-probabilities, and some have none.")
        self._append(ids, logprobs, Author.MODEL, turn, weight_version)

    def given(self, ids: Sequence[int], *, turn: int) -> None:
        """Append what the engine did not sample: the tools' answers with the template around them."""
        self._append(ids, None, Author.TOOL, turn, None)

    @property
    def has_logprobs(self) -> bool:
        """Whether sampled tokens have log-probabilities."""
        return bool(self._has_logprobs)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that the model could sample."""
        return self.spans[0].end if self.spans and self.spans[0].author is Author.PROMPT else 0

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, the tools' answers among them."""
        return len(self.ids) - self.prompt_length

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt, as a list of its own."""
        return self.ids[: self.prompt_length].tolist()

    @property
    def response_ids(self) -> list[int]:
        """Everything after the prompt, as a list of its own."""
        return self.ids[self.prompt_length :].tolist()

    @property
    def response_mask(self) -> list[int]:
        """The mask of `response_ids`."""
        return list(self.mask[self.prompt_length :])

    @property
    def response_logprobs(self) -> list[float] | None:
        """The log-probabilities of `response_ids`; None where the engine gave none."""
        return self.logprobs[self.prompt_length :].tolist() if self._has_logprobs else None

    def _append(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        author: Author,
        turn: int,
        weight_version: str | None,
    ) -> None:
        if not ids:
            return
        start = len(self.ids)
        self.ids.extend(ids)
        self.mask.extend((b"\1" if author is Author.MODEL else b"\0") * len(ids))
        self.logprobs.extend(logprobs if logprobs is not None else bytes(len(ids)))
        self.spans.append(Span(author, turn, start, len(self.ids), weight_version))
