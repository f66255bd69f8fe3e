"""Results of tools as bytes, and back."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

from toolroll.errors import InvalidArguments, PolicyFault, ToolrollError
from toolroll.images import read_image
from toolroll.schemas import ToolResponse
from toolroll.tools.base_tool import ToolResult

ENCODING_VERSION = 1
"""Version of the encoding. It is part of the keys, so that another version of toolroll does not read these results."""
TIMING_METRICS = frozenset({"queue_wait", "sandbox_wait", "execution_time", "attempts"})
"""Metrics that describe the original call, and are omitted from a hit."""


class NotStorable(ToolrollError):
    """Raised when a result cannot be stored."""


def encode_outcome(outcome: ToolResult | PolicyFault) -> bytes:
    """Return the bytes of a result or of a policy fault.

    Raises:
        NotStorable: If the result has a video.
        ConfigError: If an image cannot be read.
    """
    if isinstance(outcome, PolicyFault):
        fields: dict[str, Any] = {"fault": str(outcome), "is_invalid": isinstance(outcome, InvalidArguments)}
        return _to_bytes({**fields, "metrics": dict(outcome.metrics)})
    response, reward, metrics = outcome
    if response.video:
        raise NotStorable("Videos cannot be stored.")
    images = None if response.image is None else [read_image(image).url for image in response.image]
    return _to_bytes({"text": response.text, "images": images, "reward": reward, "metrics": metrics})


def decode_outcome(value: bytes, hit: dict[str, Any]) -> ToolResult:
    """Return the result of its bytes.

    Args:
        value: The bytes.
        hit: Age and origin of the result, which are added to the metrics.

    Raises:
        PolicyFault: If the call ended with it.
    """
    fields = json.loads(value)
    metrics = {name: metric for name, metric in fields["metrics"].items() if name not in TIMING_METRICS}
    metrics["cache"] = hit
    if "fault" in fields:
        error = (InvalidArguments if fields["is_invalid"] else PolicyFault)(fields["fault"])
        error.metrics = metrics
        raise error
    return ToolResult(ToolResponse(text=fields["text"], image=fields["images"]), fields["reward"], metrics)


def _to_bytes(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), default=_simplify).encode("ascii")


def _simplify(value: Any) -> Any:
    """Convert a metric that JSON does not support as the records do: numbers and arrays stay numbers."""
    if isinstance(value, Set):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)
