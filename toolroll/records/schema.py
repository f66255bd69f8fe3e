"""The JSON Schema of a line, which docs/records.schema.json holds.

It is made from the classes here, so that what each field is stands in one place. They are for the schema only: a line
is written and read without them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from toolroll.errors import Fault
from toolroll.records.record import FORMAT
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import Fidelity, FinishReason
from toolroll.schemas import ToolCall

Base64 = Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]


class _Exactly(BaseModel):
    """An object that has these fields, all of them, and no others."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class SpanLine(_Exactly):
    """A range of tokens by one author."""

    author: Author
    """Who wrote it: `model` is what was sampled, and has mask 1; all else has 0."""
    turn: int
    """Which of the model's turns it belongs to, from 0."""
    start: int
    end: int
    """Exclusive."""
    weight_version: str | None
    """Which weights sampled it."""


class TokensLine(_Exactly):
    """A sequence of tokens."""

    ids: Base64
    """Little-endian 32-bit integers."""
    logprobs: Base64 | None
    """Little-endian 32-bit floats, of the sampled tokens only; null where the engine gave none."""
    spans: list[SpanLine]
    """They divide the ids without gap or overlap."""


class TimingsLine(_Exactly):
    """What the engine took for one answer."""

    total: float | None
    """Seconds, by our own clock, over all attempts."""
    queue: float | None
    """Seconds in the engine's queue, where it says."""
    cached_tokens: int | None
    """Tokens of the prompt that were in the engine's prefix cache."""
    attempts: int


class TurnLine(_Exactly):
    """One answer of the engine. A turn that was interrupted has several."""

    turn: int
    tokens: int
    finish: str
    weight_version: str | None
    timings: TimingsLine


class CallMetrics(BaseModel):
    """What a tool says of a call. Any other keys may be there."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    queue_wait: float | None = None
    """Seconds until the limiter gave a slot."""
    sandbox_wait: float | None = None
    """Seconds in the sandbox's own queue."""
    execution_time: float | None = None
    """Seconds that the program ran."""
    attempts: int | None = None


class CallLine(_Exactly):
    """One call of a tool."""

    turn: int
    tool: str | None
    """As the model named it."""
    arguments: str | dict[str, Any] | None
    """As the model wrote them."""
    answer: str
    """What the model was told."""
    fault: Fault | None
    """Whose fault it was that it failed, if it did."""
    error: str | None
    reward: float | None
    seconds: float | None
    """Of the whole call."""
    metrics: CallMetrics


class RewardsLine(_Exactly):
    """What it earned."""

    total: float | None
    """The same as `score`."""
    steps: list[float | None]
    """By turn."""
    tools: dict[str, float | None]
    functions: dict[str, float | None]


class MessageLine(BaseModel):
    """A message, as chat templates read it. Any other keys may be there."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Line(_Exactly):
    """One line of `{rollout_data_dir}/{step}.jsonl`, as toolroll writes it. A number that isn't finite is null."""

    input: str
    """The prompt's text."""
    output: str
    """All that came after it: the model's turns and the tools' answers."""
    gts: Any
    """The ground truth."""
    score: float | None
    """The reward; null where there is none, as the infrastructure failed."""
    step: int
    """The trainer's."""
    uid: str
    """`{group}_{sample}_0`."""
    format: Literal["toolroll/1"]
    """Which form this is."""
    written_at: float
    """Seconds since 1970, UTC."""
    request_id: str
    group: str
    """The same for all samples of one prompt."""
    sample: int
    """Which of these it is, from 0."""
    finish_reason: FinishReason
    outcome: Literal["ok", "infra"]
    """`infra`: keep it out of the loss."""
    error: str | None
    """What failed, where something did."""
    fidelity: Fidelity
    """How far the tokens can be trusted."""
    seconds: float | None
    """From its begin to its end."""
    rewards: RewardsLine
    turns: list[TurnLine]
    calls: list[CallLine]
    messages: list[MessageLine]
    logprobs_of: Literal["scaled", "raw"] | None
    """Which distribution the log-probabilities are of."""
    tokens: TokensLine | None
    """Null where there are none, or they were left out."""
    earlier: list[TokensLine]
    """Where the template wrote an earlier turn anew: the tokens up to there, each a sequence of its own."""
    extra: dict[str, Any]
    """What else the prompt's row carried."""


def json_schema() -> str:
    """The schema, as the file has it."""
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": FORMAT, **Line.model_json_schema()}
    return json.dumps({**made, "title": FORMAT}, indent=2, ensure_ascii=False) + "\n"
