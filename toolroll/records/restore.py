"""Restore a trajectory from its record, so that it can be scored again or replayed.

A record has everything that a trajectory has, except for the bytes of images: an image part of a message is the mapping
of the record, with `hash`, `media_type`, `width` and `height`. Records of verl have only text: their trajectory has the
messages that can be parsed from it, no tokens and no calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from toolroll.errors import Fault
from toolroll.images import Image, ImageSpan
from toolroll.records.json_line import BadLine
from toolroll.records.packed_tokens import unpack
from toolroll.records.record import Record, number
from toolroll.rollout.engines.base import GenerationTimings
from toolroll.rollout.tokens import Author, TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, Rewards, Trajectory, TurnRecord
from toolroll.schemas import Message


def restore_trajectory(record: Record, read_image: Callable[[Image], Image] | None = None) -> Trajectory:
    """Return the trajectory of a record.

    Args:
        record: The record. Fields that it lacks are empty, `finish_reason` is "stop" and `outcome` is "ok".
        read_image: Function that returns an image of a tool call with its bytes. By default, images have no bytes.

    Returns:
        The trajectory. `extra["ground_truth"]` is the record's ground truth unless the prompt row had one.

    Raises:
        BadLine: If a field has an invalid value.
    """
    messages = record.fields.get("messages") if record.is_native else record.messages
    try:
        given: dict[str, Any] = {
            "request_id": record.request_id or "",
            "group": record.group or "",
            "sample": record.sample or 0,
            "messages": [Message.model_validate(message) for message in messages or ()],
            "tokens": _tokens(record.fields.get("tokens") if record.is_native else None),
            "earlier": [_tokens(tokens) for tokens in record.fields.get("earlier") or () if record.is_native],
            "finish_reason": FinishReason(record.finish_reason or FinishReason.STOP),
            "outcome": record.outcome or "ok",
            "error": record.error,
            "fidelity": Fidelity(record.fidelity or Fidelity.TEXT),
            "logprobs_mode": record.fields.get("logprobs_mode"),
            "rewards": _rewards(record),
            "turns": [_turn(turn) for turn in record.turns],
            "calls": [_call(call, read_image) for call in record.calls],
            "seconds": record.seconds or 0.0,
            "extra": _extra(record),
        }
        return Trajectory(**_known_fields(Trajectory, record.fields if record.is_native else {}, given))
    except ValidationError as error:
        raise BadLine(f"Invalid message: {error.errors()[0]['msg']}.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadLine(f"Invalid field: {type(error).__name__}: {error}.") from error


def _tokens(packed: Mapping[str, Any] | None) -> TokenStream:
    if packed is None:
        return TokenStream([])
    tokens = unpack(packed)
    images = [ImageSpan(_image(span["image"]), span["start"], span["end"]) for span in packed.get("images") or ()]
    prompt = tokens.prompt_length
    stream = TokenStream(tokens.ids[:prompt], [span for span in images if span.end <= prompt])
    for span in tokens.spans:
        ids = tokens.ids[span.start : span.end]
        if span.author is Author.MODEL:
            logprobs = None if tokens.logprobs is None else tokens.logprobs[span.start : span.end]
            stream.append_sampled(ids, logprobs, turn=span.turn, weight_version=span.weight_version)
        elif span.author is Author.TOOL:
            inside = [one.shifted(-span.start) for one in images if span.start <= one.start < span.end]
            stream.append_unsampled(ids, turn=span.turn, images=inside)
    return stream


def _rewards(record: Record) -> Rewards:
    steps, tools, functions = (record.rewards.get(name) for name in ("steps", "tools", "functions"))
    return Rewards(
        total=record.score,
        steps=tuple(number(step) or 0.0 for step in steps or ()),
        tools={name: number(value) or 0.0 for name, value in (tools or {}).items()},
        functions=functions or {},
    )


def _turn(turn: Mapping[str, Any]) -> TurnRecord:
    timings = turn.get("timings") or {}
    given = {
        "timings": GenerationTimings(**_known_fields(GenerationTimings, timings, {"total": timings["total"] or 0.0}))
    }
    return TurnRecord(**_known_fields(TurnRecord, turn, given))


def _call(call: Mapping[str, Any], read_image: Callable[[Image], Image] | None) -> CallRecord:
    fault = call.get("fault")
    images = map(_image, call.get("images") or ())
    given = {
        "turn": call.get("turn", 0),
        "tool": call.get("tool"),
        "arguments": call.get("arguments"),
        "answer": call.get("answer") or "",
        "images": tuple(images if read_image is None else map(read_image, images)),
        "fault": None if fault is None else Fault(fault),
        "seconds": call.get("seconds") or 0.0,
        "metrics": call.get("metrics") or {},
    }
    return CallRecord(**_known_fields(CallRecord, call, given))


def _known_fields(model: type[Any], recorded: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass: the given ones, and all others that were recorded."""
    return {**{name: recorded[name] for name in model.__dataclass_fields__ if name in recorded}, **given}


def _image(image: Mapping[str, Any]) -> Image:
    return Image(image["hash"], image["media_type"], image["width"], image["height"])


def _extra(record: Record) -> dict[str, Any]:
    if not record.is_native:
        return {**record.fields, "ground_truth": record.gts}
    extra = record.fields.get("extra")
    extra = dict(extra) if isinstance(extra, dict) else {}
    if record.gts is not None:
        extra.setdefault("ground_truth", record.gts)
    return extra
