"""A record line with new scores: the bytes of the line as they were, and the field `rescored`. Pure.

    {"input":"…",…,"extra":{}}                          the line that a run wrote
    {"input":"…",…,"extra":{},"rescored":{"exact":1.0}} the same line with a score

Invariant: without the scores that were added, the line has the bytes of the original.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from toolroll.errors import ConfigError
from toolroll.records.json_line import BadLine, decode, encode
from toolroll.records.record import RESCORED_FIELD, Record, number

Scores = dict[str, float | None]
"""Score by name, None if there is none."""
SCORES_START = b'"rescored":{'
"""Start of the scores. A quote in a text is escaped, so the last occurrence in a line is that of the field."""


@dataclass(frozen=True, slots=True)
class LineFrame:
    """A line without its new scores."""

    before: bytes
    """Bytes before the new scores."""
    after: bytes
    """Bytes after the new scores, including the newline; empty for a line that is copied."""

    @classmethod
    def copied(cls, line: bytes) -> LineFrame:
        """Return the frame of a line that gets no scores, because it is not a record."""
        return cls(line, b"")

    @classmethod
    def of_record(cls, line: bytes, record: Record, names: Collection[str]) -> LineFrame:
        """Return the frame of a record's line.

        Args:
            line: The line, with or without a newline.
            record: The parsed line.
            names: Names of the new scores.

        Raises:
            ConfigError: If the line has one of these scores already, or a field `rescored` of another program.
        """
        text = line.rstrip()
        end = line[len(text) :]
        end = end if end.endswith(b"\n") else end + b"\n"
        if RESCORED_FIELD not in record.fields:
            comma = b"," if record.fields else b""
            return cls(text[:-1] + comma + b'"rescored":{', b"}}" + end)
        existing = record.fields[RESCORED_FIELD]
        if not isinstance(existing, dict) or not text.endswith(b'"rescored":' + encode(existing)[:-1] + b"}"):
            raise ConfigError(f"Unexpected field {RESCORED_FIELD!r} in a record. Rename the field.")
        if known := sorted(existing.keys() & set(names)):
            raise ConfigError(f"The records already have a score {known[0]!r}. Choose another name for the new one.")
        return cls(text[:-2] + (b"," if existing else b""), b"}}" + end)

    @property
    def head(self) -> bytes:
        """Bytes before all scores, including those of an earlier re-scoring. Empty for a line that is copied."""
        return self.before.rpartition(SCORES_START)[0] if self.after else b""

    def join(self, scores: Mapping[str, float | None]) -> bytes:
        """Return the line with scores."""
        return self.before + encode(dict(scores))[1:-2] + self.after if self.after else self.before

    def scores_in(self, line: bytes) -> Scores | None:
        """Return the scores in a line that `join` returned, or None if the line is of another record."""
        if not self.after:
            return {} if line == self.before else None
        if not line.startswith(self.before) or not line.endswith(self.after):
            return None
        try:
            scores = decode(b"{" + line[len(self.before) : len(line) - len(self.after)] + b"}")
        except BadLine:
            return None
        return {name: number(score) for name, score in scores.items()}
