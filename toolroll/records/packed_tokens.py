"""Tokens on disk: ids and log-probabilities as base64 of little-endian numbers, and the spans that give the mask.

    {"ids": int32, "logprobs": float32 of the sampled tokens only, or null, "spans": [{"author", "turn", …}, …]}

Tokens with images also have `"images": [{"image": {"hash", …}, "start", "end"}, …]`.

Packing is lossless, including NaN and infinite log-probabilities.
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
class PackedTokens:
    """Tokens of a sample, as read from a record. Ids, mask and log-probabilities have the same length."""

    ids: list[int]
    """Token ids."""
    mask: list[int]
    """1 for tokens that the model sampled, 0 for all others."""
    logprobs: list[float] | None
    """Log-probabilities, 0 for tokens that were not sampled; None if the engine returned none."""
    spans: list[Span]
    """Ranges of tokens by author."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return self.spans[0].end if self.spans and self.spans[0].author is Author.PROMPT else 0


def pack(stream: TokenStream) -> dict[str, Any]:
    """Return the JSON form of a token stream."""
    logprobs = array("f")
    for span in stream.spans:
        if span.author is Author.MODEL:
            logprobs += stream.logprobs[span.start : span.end]
    packed = {
        "ids": _base64(struct.pack(f"<{len(stream)}i", *stream.ids)),
        "logprobs": _base64(_swap_if_big_endian(logprobs).tobytes()) if stream.has_logprobs else None,
        "spans": stream.spans,
    }
    return {**packed, "images": stream.images} if stream.images else packed


def unpack(packed: Mapping[str, Any]) -> PackedTokens:
    """Return the tokens of their JSON form.

    Raises:
        BadLine: If the tokens are damaged.
    """
    try:
        spans = [_span(span) for span in packed["spans"]]
        ids = _array("i", packed["ids"])
        sampled = None if packed["logprobs"] is None else _array("f", packed["logprobs"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadLine(f"Invalid tokens: {type(error).__name__}: {error}.") from error
    mask, logprobs, end, used = [0] * len(ids), [0.0] * len(ids), 0, 0
    for span in spans:
        length = span.end - span.start
        if span.start != end or length < 0:
            raise BadLine(f"Invalid tokens: span {span.start} to {span.end} does not start at {end}.")
        if span.author is Author.MODEL:
            mask[span.start : span.end] = [1] * length
            if sampled is not None:
                logprobs[span.start : span.end] = sampled[used : used + length].tolist()
            used += length
        end = span.end
    if end != len(ids) or (sampled is not None and len(sampled) != used):
        raise BadLine("Invalid tokens: ids, log-probabilities and spans have different lengths.")
    return PackedTokens(ids.tolist(), mask, None if sampled is None else logprobs, spans)


def _span(fields: Mapping[str, Any]) -> Span:
    turn, start, end = (operator.index(fields[key]) for key in ("turn", "start", "end"))
    return Span(Author(fields["author"]), turn, start, end, fields["weight_version"])


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _array(typecode: str, text: str) -> array[Any]:
    return _swap_if_big_endian(array(typecode, base64.b64decode(text, validate=True)))


def _swap_if_big_endian(numbers: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
