"""Generate assistant turns from a recording, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolroll.errors import EngineRefused, InfraFault, ReplayMiss
from toolroll.images import ImageSpan
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.engines.base import FinishType, Generation, LogprobsMode, SamplingParams
from toolroll.rollout.generation import GeneratedTurn, TokenGenerator, append_generation
from toolroll.rollout.pause import Deadlines, Pause
from toolroll.rollout.replay.recording import RecordedGeneration, RecordedTrajectory, Replay
from toolroll.rollout.request import AsyncRolloutRequest, RequestState
from toolroll.rollout.trajectory import FinishReason
from toolroll.schemas import Message

ENDS_WITHOUT_TURN = (FinishReason.DEADLINE, FinishReason.LENGTH, FinishReason.ABORTED)
"""Finish reasons that depend on time or on the engine, and which a replay takes from the record."""


class ReplayEngine:
    """The engine of a replay, which samples nothing.

    Args:
        logprobs_mode: Distribution of the recorded log-probabilities.
    """

    def __init__(self, logprobs_mode: LogprobsMode | None) -> None:
        self.logprobs_mode: LogprobsMode = logprobs_mode or "processed_logprobs"

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Generation:
        """Raise EngineRefused."""
        raise EngineRefused("A replay has no engine.")

    async def abort(self, request_id: str) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class ReplayGenerator(TokenGenerator):
    """Generates the turns that were recorded.

    The prompt of each turn must be the recorded one, so that the tokens are either identical or an error.

    Args:
        replay: The recording.
        rendering: Conversion between messages and tokens.
        tools: Schemas of the tools.
        pause: Pause of the rollout.
    """

    def __init__(self, replay: Replay, rendering: Rendering, tools: Sequence[dict[str, Any]], pause: Pause) -> None:
        super().__init__(ReplayEngine(replay.recording.logprobs_mode), rendering, tools, pause)
        self._replay = replay

    async def start(self, request: AsyncRolloutRequest) -> None:
        """Render the prompt, and finish the request if it was too long for the engine."""
        await super().start(request)
        _, generations = self._recorded(request)
        if request.state is RequestState.GENERATING and not generations:
            self._end(request)

    async def generate_turn(self, request: AsyncRolloutRequest, deadlines: Deadlines) -> GeneratedTurn | None:
        """Append the recorded tokens of a turn. None means that the recorded trajectory ended before it."""
        recorded, generations = self._recorded(request)
        turn = [one for one in generations[len(request.turns) :] if one.turn == request.turn]
        if not turn:
            self._end(request)
            return None
        if not turn[0].follows(request.tokens.ids):
            raise ReplayMiss(f"The prompt of turn {request.turn} differs from the recorded one.")
        deadlines.start_turn(request.turn)
        for one in turn:
            append_generation(request, one.generation, one.start)
        assistant_messages = sum(message.role == "assistant" for message in request.messages)
        if recorded.assistant_messages <= assistant_messages:  # it ended after an interruption of this turn
            self._end(request)
            return None
        finish, in_time = turn[-1].generation.finish, True
        if finish is FinishType.ABORT:
            in_time = recorded.finish_reason is not FinishReason.DEADLINE
            finish = FinishType.LENGTH if recorded.finish_reason is FinishReason.LENGTH else finish
        return self._parse_turn(request, finish, in_time)

    def append_tool_responses(self, request: AsyncRolloutRequest, responses: Sequence[Message]) -> None:
        """Append the responses, unless they were too long for the engine."""
        recorded, generations = self._recorded(request)
        if recorded.finish_reason is FinishReason.LENGTH and len(generations) == len(request.turns):
            request.finish(FinishReason.LENGTH, recorded.error)
        else:
            super().append_tool_responses(request, responses)

    def _recorded(self, request: AsyncRolloutRequest) -> tuple[RecordedTrajectory, Sequence[RecordedGeneration]]:
        recorded = self._replay.recorded(request.request_id)
        assert recorded is not None, "a replay of the engine's output requires the record"
        if recorded.generations is None:
            raise ReplayMiss("The record has no tokens. Set replay.engine=false to use an engine.")
        return recorded, recorded.generations

    def _end(self, request: AsyncRolloutRequest) -> None:
        """Finish a request as it was recorded.

        Raises:
            InfraFault: If the recorded trajectory ended with one.
            ReplayMiss: If the recorded trajectory ended for another reason, which did not occur now.
        """
        recorded, _ = self._recorded(request)
        if recorded.finish_reason is FinishReason.INFRA:
            raise InfraFault(recorded.error or "The recorded trajectory ended with an infra fault.")
        if recorded.finish_reason not in ENDS_WITHOUT_TURN:
            raise ReplayMiss(
                f"Turn {request.turn} was not recorded: the trajectory ended before it ({recorded.finish_reason})."
            )
        request.finish(recorded.finish_reason, recorded.error)
