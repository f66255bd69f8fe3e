"""Weights: the trainer's, at the engine.

Before a batch is sampled, and when training ends, the engine gets the weights of the trainer's step, if it hasn't them:
they are saved to a directory, all generations are paused, and the engine's servers load them, under the name
`step-<n>`. It is done before the first batch too: who knows what a server that is up serves. It promises:

- A batch isn't sampled before every server has said that it has the new weights.
- What was sampled by others all the same (a server that was restarted meanwhile, say) is counted, and a warning says
  so; the weights are given anew before the next batch then.
- Where nobody gives the engine new weights, that is counted too: a version that an earlier step saw already is stale.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError
from toolroll.rollout.rollout import Rollout

logger = logging.getLogger(__name__)


class Weights:
    """Which the engine has, and which it should have.

    Args:
        engine: Which takes them by `update_weights`.
        directory: Where they are saved, each time over the last; the servers must see it under the same path. None:
            somebody else sees to the engine's weights.
    """

    def __init__(self, engine: Any, directory: str | Path | None) -> None:
        if directory is not None and not hasattr(engine, "update_weights"):
            raise ConfigError(
                f"weights_dir is given, and {type(engine).__name__} loads no weights from a directory. SGLangEngine "
                "does; of vLLM TRL's own server mode has it: GRPOConfig(use_vllm=True, vllm_mode='server')."
            )
        self._engine = engine
        self._directory = None if directory is None else Path(directory).resolve()
        self._step: int | None = None
        """The step whose weights the engine has; None where it isn't known to have any."""
        self._seen: dict[str, int] = {}
        """In which step each version was seen first."""

    def behind(self, step: int) -> bool:
        """Whether the engine is to be given the weights of this step."""
        return self._directory is not None and self._step != step

    def save(self, trainer: Any) -> None:
        """Save the trainer's weights. All processes take part: each may have a part of the model."""
        if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
            raise ConfigError(
                "weights_dir: of a model with adapters only these would be saved, and an engine can't load them as its "
                "weights. Train the whole model, or let TRL give vLLM the weights: GRPOConfig(use_vllm=True)."
            )
        trainer.save_model(str(self._directory), _internal_call=True)  # no push to a hub

    async def give(self, rollout: Rollout, step: int) -> None:
        """Have the engine load what was saved. Raises EngineUnavailable where a server didn't."""
        async with rollout.paused():
            await self._engine.update_weights(self._directory, _version(step))
        logger.info("the engine has the weights of step %d", step)

    def given(self, step: int) -> None:
        """The engine has the weights of this step."""
        self._step = step

    def stale(self, sampled_by: Mapping[str | None, int], step: int) -> int:
        """How many of a sample's tokens other weights than those of this step sampled.

        Those whose weights nobody knows aren't among them.
        """
        versions = {version: tokens for version, tokens in sampled_by.items() if version is not None}
        if self._directory is not None:
            return sum(tokens for version, tokens in versions.items() if version != _version(step))
        for version in versions:
            self._seen.setdefault(version, step)
        return sum(tokens for version, tokens in versions.items() if self._seen[version] < step)

    def were_stale(self, tokens: int, of: int, step: int) -> None:
        """Some of a batch were sampled by stale weights, in this process or another: the next batch gets new ones."""
        self._step = None
        remedy = "it is given them anew" if self._directory else "give rollout_func(weights_dir=…), or update it"
        logger.warning(
            "%d of %d tokens of step %d were sampled by stale weights of the engine: %s", tokens, of, step + 1, remedy
        )


def _version(step: int) -> str:
    return f"step-{step}"
