"""TrainerRollout: toolroll's rollouts as a `rollout_func` for TRL's GRPOTrainer.

TRL calls it with the prompts of a batch and the trainer, and waits for the result.

Invariants:

- Rows are returned in the order of the prompts. Groups are those of TRL: consecutive rows, across all processes.
- Sampling parameters, the maximum completion length and the chat template's arguments are those of the trainer, so the
  log-probabilities are comparable with TRL's. An engine whose log-probabilities are not is rejected before sampling.
- The engine has the trainer's weights before a batch is sampled (see `weights`).
- No request is in flight when the call returns.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from toolroll._internal.event_loop_thread import EventLoopThread
from toolroll.errors import ConfigError
from toolroll.integrations.trl.batch import make_batch, sample_fields
from toolroll.integrations.trl.rows import DatasetRows, without_nulls
from toolroll.integrations.trl.settings import resolve_limits, resolve_sampling_params
from toolroll.integrations.trl.weights import WeightSync
from toolroll.records.writer import RecordWriter
from toolroll.rollout.chat.formats import ToolPrompt
from toolroll.rollout.chat.rendering import Thinking
from toolroll.rollout.engines.base import TokenEngine
from toolroll.rollout.limits import Limits
from toolroll.rollout.prompt import Prompt
from toolroll.rollout.reward import RewardFunction, RewardRule
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.trajectory import Trajectory
from toolroll.tools.base_tool import BaseTool

logger = logging.getLogger(__name__)

LOSSES_AVERAGED_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
"""`loss_type` values with which TRL divides by the number of rows, including masked ones."""
RESERVED_COLUMNS = {"messages", "group"}
"""Columns that would be mistaken for keys of a prompt."""


class TrainerRollout:
    """Rollout function for `GRPOTrainer(rollout_func=…)`. Exported as `rollout_func`.

    Args:
        engine: Inference engine, such as `SGLangEngine`.
        tools: Path of a tool config, or tools. `GRPOTrainer(tools=…)` must be empty.
        limits: Limits of a trajectory. `max_response_len` is TRL's `max_completion_length` by default.
        rewards: A RewardRule, or a function of the trajectory. The other columns of the prompt's row are in the
            trajectory's `extra`.
        weights_dir: Directory in which the trainer's weights are saved for the engine, which must see it under the same
            path. Without it, toolroll does not update the engine's weights; TRL does with `use_vllm`.
        rollout_data_dir: Directory for the records of each training step.
        sampling_params: Further sampling parameters under the engine's names.
        model_format: Chat format of the model. By default, it is found by the chat template.
        tool_prompt: "hermes" for a model whose chat template does not show tools.
        thinking: "keep" or "strip" the reasoning of earlier turns; by default as the chat template does it.

    Raises:
        ConfigError: If the engine does not return tokens, or cannot load weights from `weights_dir`.

    Example:
        >>> from toolroll.integrations.trl import rollout_func, trajectory_reward
        >>> from toolroll.rollout.engines.sglang import SGLangEngine
        >>> rollout = rollout_func(engine=SGLangEngine("http://127.0.0.1:30000"), tools="tools.yaml")

        Then pass it to the trainer: `GRPOTrainer(…, rollout_func=rollout, reward_funcs=trajectory_reward)`.
    """

    def __init__(
        self,
        *,
        engine: TokenEngine,
        tools: str | Path | BaseTool[Any] | Sequence[BaseTool[Any]] | None = (),
        limits: Limits | Mapping[str, Any] | None = None,
        rewards: RewardRule | RewardFunction | None = None,
        weights_dir: str | Path | None = None,
        rollout_data_dir: str | Path | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        model_format: str | None = None,
        tool_prompt: ToolPrompt | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        if not isinstance(engine, TokenEngine):
            remedy = "Use an engine such as SGLangEngine('http://127.0.0.1:30000')."
            raise ConfigError(f"{engine!r:.80} does not return tokens to train on. {remedy}")
        self._engine = engine
        self._options: dict[str, Any] = {
            "tools": tools,
            "rewards": rewards,
            "model_format": model_format,
            "tool_prompt": tool_prompt,
            "thinking": thinking,
        }
        self._limits = limits
        self._weights = WeightSync(engine, weights_dir)
        self._data_dir = rollout_data_dir
        self._sampling_params = dict(sampling_params or {})
        self._thread: EventLoopThread | None = None
        self._rollout: Rollout | None = None
        self._writer: RecordWriter | None = None
        self._rows: dict[str, DatasetRows] = {}
        self._warned_about_loss = False

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Sample a batch.

        Args:
            prompts: Prompts of this process, each a list of messages.
            trainer: TRL's GRPOTrainer.

        Returns:
            `prompt_ids`, `completion_ids`, `env_mask` and `logprobs` for TRL, and `toolroll` and `trajectory` for the
            reward functions.

        Raises:
            ConfigError: If a setting or a prompt is invalid.
            EngineUnavailable: If the engine did not load the weights.
        """
        rollout, thread = self._start(trainer)
        step, is_training = trainer.state.global_step, trainer.model.training
        self._weights.update(trainer, rollout, thread)
        requests = self._read_prompts(prompts, trainer)
        trajectories = thread.run(_sample_all(rollout, requests))
        if is_training and self._writer is not None:
            thread.run(self._writer.write_all(trajectories, step + 1))
        fields = [sample_fields(trajectory) for trajectory in trajectories]
        self._weights.count_stale_tokens(fields, step, trainer)
        self._warn_about_excluded(fields, trainer)
        return make_batch(trajectories, fields, filler=_tokenizer(trainer).eos_token_id or 0)

    def close(self) -> None:
        """Close the engine's connections and the record files. Called automatically at interpreter exit."""
        if self._thread is not None and self._rollout is not None:
            self._thread.run(self._rollout.aclose())
            self._thread.close()
        if self._writer is not None:
            self._writer.close()
        self._thread = self._rollout = self._writer = None
        atexit.unregister(self.close)

    def _start(self, trainer: Any) -> tuple[Rollout, EventLoopThread]:
        """Create everything that depends on the trainer, at the first batch."""
        if self._rollout is not None and self._thread is not None:
            return self._rollout, self._thread
        if getattr(trainer, "tools", None):
            raise ConfigError("Pass tools to rollout_func and not to GRPOTrainer(tools=…), whose loop would run too.")
        self._rollout = Rollout(
            engine=self._engine,
            **self._options,
            tokenizer=_tokenizer(trainer),
            chat_template_kwargs=trainer.chat_template_kwargs,
            limits=resolve_limits(self._limits, trainer.args),
            sampling_params=resolve_sampling_params(self._sampling_params, trainer.args, self._engine.logprobs_mode),
        )
        self._thread = EventLoopThread("toolroll-rollouts", uvloop.new_event_loop)
        atexit.register(self.close)
        assert self._rollout.rendering is not None
        if self._data_dir is not None:
            is_distributed = trainer.accelerator.num_processes > 1
            name = f"rank-{trainer.accelerator.process_index}" if is_distributed else None
            self._writer = RecordWriter(self._data_dir, writer=name, decode=self._rollout.rendering.decode)
        if self._weights.directory is not None:
            self._update_weights_at_end(trainer)
        return self._rollout, self._thread

    def _update_weights_at_end(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        class FinalWeightsCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
            def on_train_end(callback, *args: Any, **kwargs: Any) -> None:  # noqa: N805
                self._weights.update(trainer, *self._start(trainer))

        trainer.add_callback(FinalWeightsCallback())

    def _read_prompts(self, prompts: Sequence[Any], trainer: Any) -> list[tuple[Prompt, int]]:
        """Return each prompt with the other columns of its row, and its sample number within its group."""
        is_training = trainer.model.training
        group_size = trainer.num_generations if is_training else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        name = "train_dataset" if is_training else "eval_dataset"
        rows = self._rows.setdefault(name, DatasetRows(getattr(trainer, name)))
        requests = []
        for number, prompt in enumerate(prompts, first):
            if isinstance(prompt, str):
                raise ConfigError(
                    f"The prompt {prompt!r:.60} is text. Tool calling needs messages: use prompts such as "
                    "[{'role': 'user', 'content': '…'}] in the dataset."
                )
            columns = {key: value for key, value in rows.columns_for(prompt).items() if key not in RESERVED_COLUMNS}
            group = str(number // group_size)
            request = Prompt.read({**columns, "messages": without_nulls(prompt), "group": group}, group)
            requests.append((request, number % group_size))
        return requests

    def _warn_about_excluded(self, fields: Sequence[Mapping[str, Any]], trainer: Any) -> None:
        reasons = [one["left_out"] for one in fields if one["left_out"] is not None]
        if not reasons:
            return
        logger.warning("%d of %d samples are excluded. Reason of the first: %s", len(reasons), len(fields), reasons[0])
        loss_type = trainer.args.loss_type
        if loss_type in LOSSES_AVERAGED_OVER_ROWS and not self._warned_about_loss:
            self._warned_about_loss = True
            logger.warning(
                "loss_type=%s divides by the number of rows, so excluded samples reduce the gradient of the others in "
                "proportion. 'dapo' and 'bnpo' do not.",
                loss_type,
            )


def _tokenizer(trainer: Any) -> Any:
    """Return the trainer's tokenizer, which may be part of a processor."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


async def _sample_all(rollout: Rollout, requests: Sequence[tuple[Prompt, int]]) -> list[Trajectory]:
    return await asyncio.gather(*(rollout.sample(prompt, sample=sample) for prompt, sample in requests))
