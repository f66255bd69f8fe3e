"""WeightSync: keep the engine's weights equal to the trainer's.

Before a batch is sampled, and when training ends, the engine receives the weights of the trainer's step unless it
already has them. The trainer saves them to a directory, all generations are paused, and the engine's servers load them
under the version `step-<n>`. This includes the first batch, because a running server may serve any weights.

Invariants:

- No batch is sampled before every server has confirmed the new weights.
- Tokens that were sampled with other weights, for example by a server that was restarted, are counted and logged, and
  the weights are sent again before the next batch.
- If no weights directory is configured, tokens of a version that was already used in an earlier step count as stale.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolroll._internal.event_loop_thread import EventLoopThread
from toolroll.errors import ConfigError
from toolroll.rollout.rollout import Rollout

logger = logging.getLogger(__name__)


class WeightSync:
    """State of the engine's weights.

    Args:
        engine: Engine with a method `update_weights`.
        directory: Directory for the weights, overwritten each time. The servers must see it under the same path. None
            if toolroll does not update the engine's weights.

    Raises:
        ConfigError: If a directory is given and the engine cannot load weights from one.
    """

    def __init__(self, engine: Any, directory: str | Path | None) -> None:
        if directory is not None and not hasattr(engine, "update_weights"):
            remedy = "Use SGLangEngine, or let TRL update vLLM: GRPOConfig(use_vllm=True, vllm_mode='server')."
            raise ConfigError(f"weights_dir: {type(engine).__name__} cannot load weights from a directory. {remedy}")
        self._engine = engine
        self.directory = None if directory is None else Path(directory).resolve()
        self._engine_step: int | None = None
        """Step whose weights the engine has, or None if unknown."""
        self._first_step_of: dict[str, int] = {}
        """First step in which each weight version was seen."""

    def update(self, trainer: Any, rollout: Rollout, thread: EventLoopThread) -> None:
        """Send the trainer's weights to the engine if it does not have them.

        All processes must call it, because each may hold a part of the model.

        Args:
            trainer: TRL's GRPOTrainer.
            rollout: Rollout that uses the engine. Its generations are paused during the update.
            thread: Event loop thread of the rollout.

        Raises:
            ConfigError: If the model has adapters.
            EngineUnavailable: If a server did not load the weights.
        """
        step = trainer.state.global_step
        if self.directory is None or self._engine_step == step:
            return
        if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            raise ConfigError(
                "weights_dir: a model with adapters (PEFT) is not supported, because only the adapters would be saved. "
                "Train the full model, or let TRL update vLLM: GRPOConfig(use_vllm=True)."
            )
        trainer.save_model(str(self.directory), _internal_call=True)  # does not push to the hub
        if trainer.accelerator.is_main_process:
            thread.run(self._load_into_engine(rollout, step))
        trainer.accelerator.wait_for_everyone()
        self._engine_step = step

    async def _load_into_engine(self, rollout: Rollout, step: int) -> None:
        async with rollout.paused():
            await self._engine.update_weights(self.directory, _version(step))
        logger.info("Engine has loaded the weights of step %d", step)

    def count_stale_tokens(self, fields: Sequence[dict[str, Any]], step: int, trainer: Any) -> None:
        """Add `stale_tokens` to the fields of each sample: tokens that were not sampled with the weights of this step.

        If any process received such tokens, the weights are sent again before the next batch.

        Args:
            fields: Fields of the samples of this process.
            step: The trainer's step.
            trainer: TRL's GRPOTrainer.
        """
        is_counted = self.directory is not None or not getattr(trainer, "use_vllm", False)  # TRL updates vLLM itself
        for one in fields:
            one["stale_tokens"] = self._count_stale(one["weights"], step) if is_counted else None
        stale = sum(one["stale_tokens"] or 0 for one in fields)
        is_stale_anywhere = bool(stale)
        if trainer.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            is_stale_anywhere = any(gather_object([is_stale_anywhere]))
        if is_stale_anywhere:
            self._engine_step = None
            tokens = sum(sum(one["weights"].values()) for one in fields)
            manual = "pass rollout_func(weights_dir=…), or update the engine"
            remedy = "sending them again" if self.directory else manual
            message = "%d of %d tokens of step %d were sampled with stale weights: %s"
            logger.warning(message, stale, tokens, step + 1, remedy)

    def _count_stale(self, tokens_by_version: Mapping[str | None, int], step: int) -> int:
        """Return the number of a sample's stale tokens. Tokens of unknown version are not counted."""
        versions = {version: tokens for version, tokens in tokens_by_version.items() if version is not None}
        if self.directory is not None:
            return sum(tokens for version, tokens in versions.items() if version != _version(step))
        for version in versions:
            self._first_step_of.setdefault(version, step)
        return sum(tokens for version, tokens in versions.items() if self._first_step_of[version] < step)


def _version(step: int) -> str:
    return f"step-{step}"
