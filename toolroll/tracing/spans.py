"""Compute the spans of a trajectory from the fields of its record. Pure functions.

    invoke_agent
      turn 0
        chat MODEL
          queue
        execute_tool NAME
          queue
          sandbox

Names and attributes follow the semantic conventions for generative AI of OpenTelemetry; attributes of toolroll start
with `toolroll.`. Texts of the conversation are left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolroll._internal.text import hide_credentials
from toolroll.tracing.context import call_span_id, span_id, trace_id

Fields = Mapping[str, Any]

MAX_SPAN_ERROR_CHARS = 200
MAX_SPAN_TOOL_CHARS = 64
"""The model may write any name."""
MAX_SPAN_TIME_S = 4e9
"""Maximum Unix time, which also fits into 64 bits as nanoseconds."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One operation of a trajectory."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start: float
    """Unix time in seconds."""
    end: float
    attributes: dict[str, Any]
    is_client: bool = False
    """Whether the operation is a request to a service."""
    error: str | None = None


@dataclass(slots=True)
class _Turn:
    generations: list[Fields] = field(default_factory=list)
    calls: list[Fields] = field(default_factory=list)


@dataclass(slots=True)
class _Interval:
    """The time of a turn or call, in seconds since the start of the trajectory."""

    start: float
    end: float


class SpanBuilder:
    """Builds the spans of one trajectory.

    Args:
        fields: Fields of the trajectory, as in its record.
        context: Attributes that all operations share: the model and the engine.
    """

    def __init__(self, fields: Fields, context: Fields) -> None:
        self._fields = fields
        self._context = context
        self._request_id = str(fields.get("request_id") or f"{fields.get('group')}/{fields.get('sample')}")
        self._trace_id = trace_id(self._request_id)
        seconds = _number(fields.get("seconds"))
        written_at = _number(fields.get("written_at"))
        started_at = fields.get("started_at")
        self._origin = _number(started_at) if started_at is not None else max(0.0, written_at - seconds)
        self._input_tokens = _input_tokens(fields)
        self._spans: list[TraceSpan] = []

    def build(self) -> list[TraceSpan]:
        """Return the spans. Each comes after its parent."""
        fields, root = self._fields, span_id(self._request_id)
        turns = _group_by_turn(fields)
        intervals = _intervals(turns)
        generations = [one for turn in turns.values() for one in turn.generations]
        end = max([_number(fields.get("seconds")), *(one.end for one in intervals.values())])
        is_infra = fields.get("outcome") == "infra"
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.usage.output_tokens": sum(int(_number(one.get("tokens"))) for one in generations),
            "error.type": "infra" if is_infra else None,
            "toolroll.group": fields.get("group"),
            "toolroll.sample": fields.get("sample"),
            "toolroll.step": fields.get("step"),
            "toolroll.finish_reason": fields.get("finish_reason"),
            "toolroll.outcome": fields.get("outcome"),
            "toolroll.fidelity": fields.get("fidelity"),
            "toolroll.reward": fields.get("score"),
        }
        error = str(fields.get("error") or "") if is_infra else None
        self._add("invoke_agent", root, None, _Interval(0.0, end), attributes, error=error)
        for number, turn in turns.items():
            self._add_turn(number, turn, root, intervals)
        return self._spans

    def _add_turn(self, number: int, turn: _Turn, root: str, intervals: Mapping[int, _Interval]) -> None:
        turn_id = span_id(self._request_id, "turn", number)
        whole = _Interval(
            min(intervals[id(one)].start for one in (*turn.generations, *turn.calls)),
            max(intervals[id(one)].end for one in (*turn.generations, *turn.calls)),
        )
        self._add(f"turn {number}", turn_id, root, whole, {"toolroll.turn": number})
        for index, generation in enumerate(turn.generations):
            self._add_generation(generation, number, index, turn_id, intervals[id(generation)])
        for index, call in enumerate(turn.calls):
            self._add_call(call, number, index, turn_id, intervals[id(call)])

    def _add_generation(self, generation: Fields, turn: int, index: int, parent: str, time: _Interval) -> None:
        path = ("generate", turn, index)
        timings = _mapping(generation.get("timings"))
        model = self._context.get("gen_ai.request.model")
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": self._input_tokens.get(turn) if index == 0 else None,
            "gen_ai.usage.output_tokens": generation.get("tokens"),
            "gen_ai.usage.cache_read.input_tokens": timings.get("cached_tokens"),
            "gen_ai.response.finish_reasons": [str(generation.get("finish"))],
            "toolroll.attempts": timings.get("attempts"),
            "toolroll.weight_version": generation.get("weight_version"),
        }
        own_id = span_id(self._request_id, *path)
        self._add(f"chat {model}" if model else "chat", own_id, parent, time, attributes, is_client=True)
        self._add_queue(path, own_id, time, timings.get("queue"))

    def _add_call(self, call: Fields, turn: int, index: int, parent: str, time: _Interval) -> None:
        own_id, metrics = call_span_id(self._request_id, turn, index), _mapping(call.get("metrics"))
        tool, fault = str(call.get("tool") or "")[:MAX_SPAN_TOOL_CHARS], call.get("fault")
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": tool,
            "gen_ai.tool.type": "function",
            "error.type": None if fault is None else str(fault),
            "toolroll.reward": call.get("reward"),
        }
        error = None if fault is None else str(call.get("error") or "")
        self._add(f"execute_tool {tool}".rstrip(), own_id, parent, time, attributes, error=error)
        waited = self._add_queue(("call", turn, index), own_id, time, metrics.get("queue_wait"))
        if metrics.get("execution_time") is not None or metrics.get("sandbox_wait") is not None:
            attributes = {
                "toolroll.sandbox.queue_seconds": metrics.get("sandbox_wait"),
                "toolroll.sandbox.run_seconds": metrics.get("execution_time"),
                "toolroll.sandbox.outcome": metrics.get("outcome"),
                "toolroll.attempts": metrics.get("attempts"),
            }
            sandbox_id = span_id(self._request_id, "call", turn, index, "sandbox")
            self._add("sandbox", sandbox_id, own_id, _Interval(waited, time.end), attributes, is_client=True)

    def _add_queue(self, path: tuple[str, int, int], parent: str, time: _Interval, wait: Any) -> float:
        """Add the time in a queue at the start of an operation. Return its end."""
        end = min(time.end, time.start + _number(wait))
        if wait is not None:
            self._add("queue", span_id(self._request_id, *path, "queue"), parent, _Interval(time.start, end), {})
        return end

    def _add(
        self,
        name: str,
        own_id: str,
        parent: str | None,
        time: _Interval,
        attributes: Fields,
        *,
        is_client: bool = False,
        error: str | None = None,
    ) -> None:
        shared = self._context if "gen_ai.operation.name" in attributes else {}
        known = {key: value for key, value in {**shared, **attributes}.items() if value is not None}
        start, end = self._origin + time.start, self._origin + max(time.start, time.end)
        error = None if error is None else hide_credentials(error)[:MAX_SPAN_ERROR_CHARS]
        self._spans.append(TraceSpan(name, self._trace_id, own_id, parent, start, end, known, is_client, error))


def trajectory_spans(fields: Fields, context: Fields | None = None) -> list[TraceSpan]:
    """Return the spans of a trajectory. Each comes after its parent.

    Args:
        fields: Fields of the trajectory, as in its record. Times that are missing in older records are estimated: the
            operations are assumed to follow each other.
        context: Attributes of all operations, such as `gen_ai.request.model`.
    """
    return SpanBuilder(fields, context or {}).build()


def _group_by_turn(fields: Fields) -> dict[int, _Turn]:
    turns: defaultdict[int, _Turn] = defaultdict(_Turn)
    for generation in fields.get("turns") or ():
        turns[int(_number(generation.get("turn")))].generations.append(generation)
    for call in fields.get("calls") or ():
        turns[int(_number(call.get("turn")))].calls.append(call)
    return dict(sorted(turns.items()))


def _input_tokens(fields: Fields) -> dict[int, int]:
    """Return the number of tokens before each turn, as far as the record has tokens."""
    streams = [*(fields.get("earlier") or ()), fields.get("tokens")]
    spans = [span for stream in streams for span in _mapping(stream).get("spans") or ()]
    return {span["turn"]: span["start"] for span in reversed(spans) if span["author"] == "model"}


def _intervals(turns: Mapping[int, _Turn]) -> dict[int, _Interval]:
    """Return the time of each generation and call, by the identity of its fields."""
    intervals: dict[int, _Interval] = {}
    now = 0.0
    for turn in turns.values():
        for generation in turn.generations:
            now = _place(intervals, generation, now, _mapping(generation.get("timings")).get("total"))
        now = max([now, *(_place(intervals, call, now, call.get("seconds")) for call in turn.calls)])
    return intervals


def _place(intervals: dict[int, _Interval], operation: Fields, earliest: float, seconds: Any) -> float:
    start = operation.get("start")
    begin = earliest if start is None else _number(start)
    intervals[id(operation)] = _Interval(begin, begin + _number(seconds))
    return begin + _number(seconds)


def _number(value: Any) -> float:
    """Return a number of a record, or 0 if it is missing or invalid."""
    is_number = isinstance(value, int | float) and 0 < value < math.inf
    return float(min(value, MAX_SPAN_TIME_S)) if is_number else 0.0


def _mapping(value: Any) -> Fields:
    return value if isinstance(value, Mapping) else {}


def live_fields(trajectory: Any) -> dict[str, Any]:
    """Return the fields of a `Trajectory` that its spans need. Texts are left out, so that they can be freed."""
    names = ("request_id", "group", "sample", "started_at", "seconds", "finish_reason", "outcome", "fidelity", "error")
    fields = {name: getattr(trajectory, name) for name in names}
    fields["score"] = trajectory.rewards.total
    streams = [
        {"spans": [{"author": span.author, "turn": span.turn, "start": span.start} for span in stream.spans]}
        for stream in (*trajectory.earlier, trajectory.tokens)
    ]
    fields["earlier"], fields["tokens"] = streams[:-1], streams[-1]
    fields["turns"] = [{**vars(turn), "timings": vars(turn.timings)} for turn in trajectory.turns]
    call_names = ("turn", "start", "seconds", "tool", "fault", "error", "reward", "metrics")
    fields["calls"] = [{name: getattr(call, name) for name in call_names} for call in trajectory.calls]
    return fields
