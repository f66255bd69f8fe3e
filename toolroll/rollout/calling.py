"""What is done with the calls in one turn of the model's: which are carried out, and what the others are told.

Every call gets an answer: one that can't be read, one to a tool that there isn't, one too many. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolroll.errors import did_you_mean
from toolroll.rollout.limits import Limits

if TYPE_CHECKING:
    from toolroll.rollout.rendering import Parsed, ParsedCall


@dataclass(frozen=True)
class Planned:
    """A call, and what it is told where it isn't carried out."""

    call: ParsedCall
    refusal: str | None = None


def plan(parsed: Parsed, tools: Mapping[str, Any], limits: Limits, made: int) -> list[Planned]:
    """What to do with each call, in their order. `made` is how many the trajectory has made before."""
    planned, begun = [], 0
    left = None if limits.max_tool_calls is None else limits.max_tool_calls - made
    for call in parsed.calls:
        refusal = _refusal(call, tools)
        if refusal is None and left is not None and begun >= left:
            refusal = f"This call was not carried out: no more than {limits.max_tool_calls} are allowed in all."
        elif refusal is None and begun >= limits.max_parallel_calls:
            refusal = (
                f"This call was not carried out: no more than {limits.max_parallel_calls} are allowed at once. "
                "Make it again, by itself."
            )
        begun += refusal is None
        planned.append(Planned(call, refusal))
    if parsed.left_out:
        last = planned[-1]
        more = f"The {parsed.left_out} calls after it were not carried out either."
        planned[-1] = Planned(last.call, f"{last.refusal} {more}" if last.refusal else more)
    return planned


def _refusal(call: ParsedCall, tools: Mapping[str, Any]) -> str | None:
    if call.problem is not None:
        return call.problem
    if call.name is None or call.name not in tools:
        return f"There is no tool {call.name!r:.80}{did_you_mean(call.name or '', tools)}."
    return None
