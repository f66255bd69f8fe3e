"""The text of a sampled turn, with the places where real control tokens stand."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from toolroll.rollout.chat.vocabulary import Vocabulary


@dataclass(frozen=True)
class TurnText:
    """Text decoded from ids.

    If the vocabulary has a token for a marker, only that token is the marker: text that spells it is text.
    """

    text: str
    control_tokens: Collection[str]
    """Texts of the vocabulary's control tokens."""
    token_starts: frozenset[int]
    """Positions of the control tokens that the model sampled."""
    _positions: dict[str, list[int]] = field(default_factory=dict)
    """Positions of the markers that were searched before, so that parsing takes linear time."""

    @classmethod
    def decode(cls, vocabulary: Vocabulary, ids: Sequence[int]) -> TurnText:
        """Decode the ids of a turn."""
        text_by_id = vocabulary.control_token_texts
        parts: list[str] = []
        starts: list[int] = []
        length = start = 0
        for index in [*(index for index, token_id in enumerate(ids) if token_id in text_by_id), len(ids)]:
            if index > start:
                parts.append(vocabulary.decode(ids[start:index]))
                length += len(parts[-1])
            start = index + 1
            if index < len(ids):
                starts.append(length)
                parts.append(text_by_id[ids[index]])
                length += len(parts[-1])
        return cls("".join(parts), vocabulary.control_tokens, frozenset(starts))

    def has_marker(self, marker: str, position: int) -> bool:
        """Return True if the marker, and not text that spells it, is at the position."""
        is_real = marker not in self.control_tokens or position in self.token_starts
        return is_real and self.text.startswith(marker, position)

    def find(self, marker: str, start: int = 0) -> int | None:
        """Return the first position of a marker from a position on, or None."""
        positions = self._positions.get(marker)
        if positions is None:
            positions = self._positions[marker] = []
            position = self.text.find(marker)
            while position >= 0:
                if self.has_marker(marker, position):
                    positions.append(position)
                position = self.text.find(marker, position + 1)
        index = bisect_left(positions, start)
        return positions[index] if index < len(positions) else None
