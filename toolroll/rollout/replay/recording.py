"""Recorded trajectories, as a replay uses them.

A recorded tool call is used for a call of the same sample, turn, index and arguments, if the tool has the same
fingerprint. Recorded tokens are used for a turn with the same prompt.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from toolroll._internal.canonical import NotCanonical, canonical
from toolroll.errors import ReplayMiss
from toolroll.rollout.engines.base import FinishType, Generation, LogprobsMode
from toolroll.rollout.tokens import Author, Span, TokenStream
from toolroll.rollout.trajectory import INFRA_FINISH_REASONS, CallRecord, FinishReason, Trajectory, TurnRecord


@dataclass(frozen=True, kw_only=True)
class RecordedGeneration:
    """One response of the engine."""

    turn: int
    """Index of the assistant turn, from 0."""
    stream_ids: array[int]
    """The tokens of the stream that it belongs to. All generations of a stream share them."""
    prompt_length: int | None
    """Number of tokens before it. None if it has no tokens, so that records do not state where it was."""
    generation: Generation
    start: float | None = None
    """Time from the start of the trajectory to that of the generation, in seconds."""

    def follows(self, ids: array[int]) -> bool:
        """Return True if `ids` are the tokens before it, as far as they are known."""
        length = self.prompt_length
        return length is None or (len(ids) == length and ids == self.stream_ids[:length])


@dataclass(frozen=True, kw_only=True)
class RecordedTrajectory:
    """One recorded trajectory."""

    generations: Sequence[RecordedGeneration] | None
    """Responses of the engine, in order. None if the tokens were not recorded."""
    calls: Sequence[CallRecord]
    """Tool calls, in order."""
    assistant_messages: int
    """Number of messages of the assistant, including those of the prompt."""
    ends_with_responses: bool
    """True if the last message is a tool response."""
    tool_rewards: Mapping[str, float]
    """Result of each tool's `calc_reward`."""
    tool_versions: Mapping[str, str]
    """Fingerprint of each tool. Records of earlier versions of toolroll have none."""
    finish_reason: FinishReason
    is_scored: bool
    """True if the tools' rewards were computed."""
    error: str | None
    """Error message, without that of a reward function, because a replay calls the reward functions again."""
    _calls: dict[tuple[int, int], CallRecord] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        counts = Counter[int]()
        for call in self.calls:
            self._calls[call.turn, counts[call.turn]] = call
            counts[call.turn] += 1

    @classmethod
    def of(cls, trajectory: Trajectory) -> RecordedTrajectory:
        """Return what a replay uses of a trajectory.

        Args:
            trajectory: The trajectory. Its tokens are empty if they were not recorded.

        Raises:
            ValueError: If turns and tokens do not match.
        """
        roles = [message.role for message in trajectory.messages]
        has_tokens = len(trajectory.tokens) > 0 or not trajectory.turns
        streams = [*trajectory.earlier, trajectory.tokens]
        is_complete = trajectory.finish_reason not in INFRA_FINISH_REASONS and trajectory.rewards.has_tool_rewards
        failed_in_scoring = trajectory.outcome == "infra" and is_complete
        return cls(
            generations=list(_generations(trajectory.turns, streams)) if has_tokens else None,
            calls=trajectory.calls,
            assistant_messages=roles.count("assistant"),
            ends_with_responses=roles[-1:] == ["tool"],
            tool_rewards=trajectory.rewards.tools,
            tool_versions=trajectory.tool_versions,
            finish_reason=trajectory.finish_reason,
            is_scored=trajectory.rewards.has_tool_rewards,
            error=None if failed_in_scoring else trajectory.error,
        )

    def find_call(self, turn: int, index: int, tool: str | None, arguments: Any, version: str | None) -> CallRecord:
        """Return the record of a call.

        Args:
            turn: Index of the assistant turn, from 0.
            index: Index of the call in the turn, from 0.
            tool: Name of the tool.
            arguments: Arguments as the model wrote them.
            version: Fingerprint of the tool.

        Raises:
            ReplayMiss: If the call was not recorded, or with other arguments or another version of the tool.
        """
        found = self._calls.get((turn, index))
        where = f"call {index} of turn {turn}"
        if found is None:
            raise ReplayMiss(f"No recorded result of {tool!r}: {where} was not recorded.")
        if found.tool != tool or not _are_same(found.arguments, arguments):
            raise ReplayMiss(f"No recorded result of {tool!r}: {where} was recorded with other arguments.")
        if not self.has_tool(str(tool), version):
            raise ReplayMiss(f"No recorded result of {tool!r}: the tool has changed since it was recorded.")
        return found

    def has_tool(self, name: str, version: str | None) -> bool:
        """Return True unless the tool has changed since the trajectory was recorded.

        Args:
            name: Name of the tool.
            version: Fingerprint of the tool.
        """
        return self.tool_versions.get(name, version) == version


class Recording(Protocol):
    """A source of recorded trajectories."""

    logprobs_mode: LogprobsMode | None
    """Distribution of the log-probabilities."""

    def find(self, group: str, sample: int) -> RecordedTrajectory:
        """Return a recorded trajectory.

        Args:
            group: Group of the trajectory.
            sample: Index of the sample in its group.

        Raises:
            ReplayMiss: If it was not recorded.
        """


@dataclass(frozen=True)
class Replay:
    """How a rollout uses a recording.

    Args:
        recording: The recorded trajectories.
        on_miss: "error" for an infra fault if a call was not recorded, or "call" to call the tool.
        engine: Whether the tokens come from the recording, too, so that there is no engine.
    """

    recording: Recording
    on_miss: Literal["error", "call"] = "error"
    engine: bool = True
    _running: dict[str, RecordedTrajectory | None] = field(default_factory=dict)

    def begin(self, request_id: str, group: str, sample: int) -> None:
        """Load the record of a sample.

        Args:
            request_id: Id of the request that replays it.
            group: Group of the sample.
            sample: Index of the sample in its group.

        Raises:
            ReplayMiss: If it was not recorded and is required.
        """
        try:
            self._running[request_id] = self.recording.find(group, sample)
        except ReplayMiss:
            if self.engine or self.on_miss == "error":
                raise
            self._running[request_id] = None

    def end(self, request_id: str) -> None:
        """Forget the record of a sample.

        Args:
            request_id: Id of the request that replayed it.
        """
        self._running.pop(request_id, None)

    def recorded(self, request_id: str) -> RecordedTrajectory | None:
        """Return the record of a running request, or None if its sample was not recorded.

        Args:
            request_id: Id of the request.
        """
        return self._running[request_id]


def _generations(turns: Sequence[TurnRecord], streams: Sequence[TokenStream]) -> Iterator[RecordedGeneration]:
    """Yield the responses of the engine. Each has the spans that follow those of the one before it."""
    spans = iter([(stream, span) for stream in streams for span in stream.spans if span.author is Author.MODEL])
    stream = streams[0]
    for turn in turns:
        own: list[Span] = []
        while sum(span.end - span.start for span in own) < turn.tokens:
            try:
                stream, span = next(spans)
            except StopIteration:
                raise ValueError(f"the tokens of turn {turn.turn} are missing") from None
            own.append(span)
        yield RecordedGeneration(
            turn=turn.turn,
            stream_ids=stream.ids,
            prompt_length=own[0].start if own else None,
            generation=_generation(turn, stream, own),
            start=turn.start,
        )


def _generation(turn: TurnRecord, stream: TokenStream, spans: Sequence[Span]) -> Generation:
    start, end = (spans[0].start, spans[-1].end) if spans else (0, 0)
    changes = [(span.start - start, span.weight_version) for span in spans]
    return Generation(
        ids=stream.ids[start:end].tolist(),
        logprobs=stream.logprobs[start:end].tolist() if stream.has_logprobs else None,
        finish=FinishType(turn.finish),
        weight_version=turn.weight_version,
        weight_changes=tuple((at, one or "") for at, one in changes if at > 0 or one != turn.weight_version),
        timings=turn.timings,
    )


def _are_same(recorded: Any, arguments: Any) -> bool:
    try:
        return _comparable(recorded) == _comparable(arguments)
    except (NotCanonical, RecursionError):  # nested too deeply
        return False


def _comparable(arguments: Any) -> str:
    """Return arguments in a canonical form, with the numbers that records cannot contain replaced by null."""
    return canonical(json.loads(json.dumps(arguments), parse_constant=lambda _: None))
