"""Tokens on disk: ids and log-probabilities as base64 of little-endian numbers, and the spans, which give the mask.

    {"ids": int32, "logprobs": float32 of the sampled tokens only, or null, "spans": [{"author", "turn", …}, …]}

What is unpacked is bit for bit what was packed, NaN and infinities of log-probabilities too.
"""

from __future__ import annotations

import base64
import operator
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolroll.records.json_line import BadLine
from toolroll.rollout.tokens import Author, Span, TokenStream


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a sample. Ids, mask and log-probabilities are of one length."""

    ids: list[int]
    mask: list[int]
    """1 for what the model sampled."""
    logprobs: list[float] | None
    """0 where the token wasn't sampled; None where the engine gave none."""
    spans: list[Span]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that the model could sample."""
        return self.spans[0].end if self.spans and self.spans[0].author is Author.PROMPT else 0


def pack(stream: TokenStream) -> dict[str, Any]:
    """A stream as it is written."""
    logprobs = None
    if stream.has_logprobs:
        logprobs = array("f")
        for span in stream.spans:
            if span.author is Author.MODEL:
                logprobs += stream.logprobs[span.start : span.end]
    return {
        "ids": _base64(struct.pack(f"<{len(stream)}i", *stream.ids)),
        "logprobs": None if logprobs is None else _base64(_little(logprobs).tobytes()),
        "spans": stream.spans,
    }


def unpack(packed: Mapping[str, Any]) -> Tokens:
    """What `pack` wrote. Raises BadLine where it can't be."""
    try:
        spans = [_span(span) for span in packed["spans"]]
        ids = _numbers("i", packed["ids"])
        sampled = None if packed["logprobs"] is None else _numbers("f", packed["logprobs"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadLine(f"Its tokens can't be read: {type(error).__name__}: {error}.") from error
    mask, logprobs, end, taken = [0] * len(ids), [0.0] * len(ids), 0, 0
    for span in spans:
        length = span.end - span.start
        if span.start != end or length < 0:
            raise BadLine(f"Its tokens can't be read: the span {span.start} to {span.end} is out of place.")
        if span.author is Author.MODEL:
            mask[span.start : span.end] = [1] * length
            if sampled is not None:
                logprobs[span.start : span.end] = sampled[taken : taken + length].tolist()
            taken += length
        end = span.end
    if end != len(ids) or (sampled is not None and len(sampled) != taken):
        raise BadLine("Its tokens can't be read: ids, log-probabilities and spans don't agree on how many there are.")
    return Tokens(ids.tolist(), mask, None if sampled is None else logprobs, spans)


def _span(written: Mapping[str, Any]) -> Span:
    turn, start, end = (operator.index(written[key]) for key in ("turn", "start", "end"))
    return Span(Author(written["author"]), turn, start, end, written["weight_version"])


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _numbers(kind: str, text: str) -> array[Any]:
    return _little(array(kind, base64.b64decode(text, validate=True)))


def _little(numbers: array[Any]) -> array[Any]:
    """Between the machine's order of bytes and the file's."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
