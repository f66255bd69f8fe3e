"""JSON Schema of a record line, from which docs/records.schema.json is generated.

The classes only define the schema. Lines are written and read without them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from toolroll.errors import Fault
from toolroll.records.record import FORMAT
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import Fidelity, FinishReason
from toolroll.schemas import ToolCall

Base64 = Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]


class _ExactModel(BaseModel, extra="forbid", use_attribute_docstrings=True):
    """An object with exactly these fields."""


class SpanLine(_ExactModel):
    """A range of tokens with one author."""

    author: Author
    """Author of the tokens. `model` tokens were sampled and have mask 1; all others have mask 0."""
    turn: int
    """Index of the model turn that the span belongs to, from 0."""
    start: int
    """Index of the first token."""
    end: int
    """Index after the last token."""
    weight_version: str | None
    """Version of the weights that sampled the tokens."""


class ImageLine(_ExactModel):
    """An image, which is in the file `{rollout_data_dir}/images/{hash}.{png, jpeg or webp}`."""

    hash: str
    """SHA-256 of the file."""
    media_type: str
    """For example `image/png`."""
    width: int
    height: int


class ImageSpanLine(_ExactModel):
    """A range of tokens that stands for an image."""

    image: ImageLine
    start: int
    """Index of the first token."""
    end: int
    """Index after the last token."""


class TokensLine(_ExactModel):
    """A sequence of tokens."""

    ids: Base64
    """Token ids as little-endian 32-bit integers."""
    logprobs: Base64 | None
    """Log-probabilities of the sampled tokens as little-endian 32-bit floats; null if the engine returned none."""
    spans: list[SpanLine]
    """Spans that cover the ids without gaps or overlaps."""
    images: list[ImageSpanLine] = []
    """Ranges of images."""


class TimingsLine(_ExactModel):
    """Timings of one answer of the engine."""

    total: float | None
    """Duration of the request in seconds, including all attempts, measured by the client."""
    queue: float | None
    """Time in the engine's queue in seconds, if the engine reports it."""
    cached_tokens: int | None
    """Number of prompt tokens found in the engine's prefix cache."""
    attempts: int
    """Number of attempts."""


class TurnLine(_ExactModel):
    """One answer of the engine. An interrupted turn has several."""

    turn: int
    """Index of the model turn, from 0."""
    tokens: int
    """Number of sampled tokens."""
    finish: str
    """Reason why the engine stopped."""
    weight_version: str | None
    """Version of the weights."""
    start: float | None = None
    """Time from the start of the trajectory, in seconds."""
    timings: TimingsLine


class CacheHit(_ExactModel):
    """Origin of a result that was cached."""

    age_s: float
    """Time since the call that produced it, in seconds."""
    origin: str
    """`request_id` of the trajectory that made the call."""


class CallMetrics(BaseModel, extra="allow", use_attribute_docstrings=True):
    """Metrics that a tool reported for a call. Other keys are allowed."""

    queue_wait: float | None = None
    """Time until the limiter granted a slot, in seconds."""
    sandbox_wait: float | None = None
    """Time in the sandbox's queue, in seconds."""
    execution_time: float | None = None
    """Run time of the program, in seconds."""
    attempts: int | None = None
    """Number of attempts."""
    malformed: bool | None = None
    """True if the call was not executed because it could not be read, or its tool or arguments do not exist."""
    cache: CacheHit | None = None
    """Set if the result was cached."""
    replayed: bool | None = None
    """True if the result came from a recording."""


class CallLine(_ExactModel):
    """One tool call."""

    turn: int
    """Index of the model turn, from 0."""
    tool: str | None
    """Name of the tool, as written by the model."""
    arguments: str | dict[str, Any] | None
    """Arguments, as written by the model."""
    answer: str
    """Text that was returned to the model."""
    images: list[ImageLine] = []
    """Images that were returned to the model."""
    fault: Fault | None
    """Fault attribution, if the call failed."""
    error: str | None
    """Error message, if the call failed."""
    reward: float | None
    """Reward that the tool assigned to the call."""
    start: float | None = None
    """Time from the start of the trajectory, in seconds."""
    seconds: float | None
    """Duration of the whole call, in seconds."""
    metrics: CallMetrics


class RewardsLine(_ExactModel):
    """Reward of a trajectory and its components."""

    total: float | None
    """Same as `score`."""
    steps: list[float | None]
    """Rewards by turn."""
    tools: dict[str, float | None]
    """Rewards by tool."""
    functions: dict[str, float | None]
    """Rewards by reward function."""


class MessageLine(BaseModel, extra="allow"):
    """A chat message, as chat templates expect it. Other keys are allowed."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class RecordLine(_ExactModel):
    """One line of `{rollout_data_dir}/{step}.jsonl`. Numbers that are not finite are null."""

    input: str
    """Text of the prompt."""
    output: str
    """Text after the prompt: the model's turns and the tool responses."""
    gts: Any
    """Ground truth."""
    score: float | None
    """Reward; null if there is none because of an infra fault."""
    step: int
    """The trainer's step."""
    uid: str
    """`{group}_{sample}_0`."""
    format: Literal["toolroll/1"]
    """Version of the format."""
    written_at: float
    """Time of writing, in seconds since 1970 (UTC)."""
    request_id: str
    """Unique id of the trajectory."""
    group: str
    """Id that all samples of one prompt share."""
    sample: int
    """Index of the sample in its group, from 0."""
    finish_reason: FinishReason
    """Reason why the trajectory ended."""
    outcome: Literal["ok", "infra"]
    """`infra` if the sample must be excluded from the loss."""
    error: str | None
    """Error message, if the trajectory failed."""
    fidelity: Fidelity
    """Fidelity of the tokens."""
    started_at: float | None = None
    """Time at which the trajectory started, in seconds since 1970 (UTC)."""
    seconds: float | None
    """Duration of the trajectory, in seconds."""
    rewards: RewardsLine
    turns: list[TurnLine]
    """Answers of the engine."""
    calls: list[CallLine]
    """Tool calls."""
    tool_versions: dict[str, str] = {}
    """Fingerprint of each tool. Records of earlier versions have none."""
    messages: list[MessageLine]
    """The conversation."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] | None
    """Distribution that the log-probabilities refer to."""
    tokens: TokensLine | None
    """Tokens; null if there are none or if they were not written."""
    earlier: list[TokensLine]
    """Token sequences from before each point where the template rendered an earlier turn differently."""
    extra: dict[str, Any]
    """Other fields of the prompt row."""
    rescored: dict[str, float | None] = {}
    """Scores that `toolroll records rescore` has added, by name; null if a record could not be scored."""


def json_schema() -> str:
    """Return the JSON Schema of a line, as in docs/records.schema.json."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": FORMAT}
    return json.dumps(head | RecordLine.model_json_schema() | head, indent=2, ensure_ascii=False) + "\n"
