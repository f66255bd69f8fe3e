"""TrainerRollout: our rollout loop as the `rollout_func` of TRL's GRPOTrainer.

TRL calls it with the prompts of a batch and the trainer, and waits. It promises:

- Rows come back in the order of the prompts, whichever trajectory ended first. Groups are TRL's own: as many rows in
  a row as it samples per prompt, over all processes.
- Temperature, top_p and the like, the length of a completion and the template's settings are the trainer's, so that
  the log-probabilities are of the distribution that TRL computes its own of. Where an engine's can't be, it is refused
  before anything is sampled.
- Before anything is sampled the engine has the trainer's weights (weights.py).
- Nothing is in flight when it returns.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError
from toolroll.integrations.trl.batch import batch_of, fields_of, why_left_out
from toolroll.integrations.trl.loop_thread import LoopThread
from toolroll.integrations.trl.rows import Rows, plain
from toolroll.integrations.trl.settings import limits_of, sampling_params_of
from toolroll.integrations.trl.weights import Weights
from toolroll.records.writer import RecordWriter
from toolroll.rollout.collector import rare_full_collections
from toolroll.rollout.engines.engine import TokenEngine
from toolroll.rollout.limits import Limits
from toolroll.rollout.prompt import Prompt
from toolroll.rollout.reward import RewardFunction, RewardRule
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.trajectory import Trajectory
from toolroll.tools.base_tool import BaseTool

logger = logging.getLogger(__name__)

BY_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that TRL divides by the number of rows, masked ones among them."""
OTHERS = {"messages", "group"}
"""Columns that would be taken for what the prompt says itself."""


class TrainerRollout:
    """Give it to `GRPOTrainer(rollout_func=…)`.

    Args:
        engine: Where the model is sampled.
        tools: A tool config, or tools. `GRPOTrainer(tools=…)` stays empty.
        limits: What a trajectory may use, and its deadlines. `max_response_len` is TRL's `max_completion_length`,
            unless it is given here.
        rewards: How rewards are composed; or a function of the trajectory. The other columns of the prompt's row are
            its `extra`.
        weights_dir: Where the trainer's weights are saved for the engine, which must see it under the same path.
            Without it, somebody else sees to the engine's weights: TRL does of vLLM's, with `use_vllm`.
        rollout_data_dir: Where the trajectories of each step are written.
        sampling_params: As the engine names them, beside those that the trainer has.
        model_format: How the model's conversations are written; by default found from the tokenizer.
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
    ) -> None:
        if not isinstance(engine, TokenEngine):
            raise ConfigError(f"{engine!r:.80} gives no tokens to train on. Take e.g. SGLangEngine('http://…:30000').")
        self._engine = engine
        self._tools = tools
        self._limits = limits
        self._rewards = rewards
        self._weights = Weights(engine, weights_dir)
        self._brings_weights = weights_dir is not None
        self._data_dir = rollout_data_dir
        self._sampling_params = dict(sampling_params or {})
        self._model_format = model_format
        self._thread: LoopThread | None = None
        self._rollout: Rollout | None = None
        self._writer: RecordWriter | None = None
        self._rows: dict[str, Rows] = {}
        self._warned = False

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """A batch of trajectories, as TRL wants it."""
        rollout, thread = self._begin(trainer)
        step, training = trainer.state.global_step, trainer.model.training
        self._bring_weights(trainer)
        asked = self._read(prompts, trainer)
        with rare_full_collections():
            trajectories = thread.run(_all(rollout, asked))
        if training and self._writer is not None:
            thread.run(self._writer.write_all(trajectories, step + 1))
        fields = [fields_of(one, why_left_out(one)) for one in trajectories]
        self._count_stale(fields, step, trainer)
        self._warn_of(fields, trainer)
        return batch_of(trajectories, fields, filler=_tokenizer(trainer).eos_token_id or 0)

    def close(self) -> None:
        """Close the engine's connections and the records. It isn't needed where the process ends anyway."""
        if self._thread is not None and self._rollout is not None:
            self._thread.run(self._rollout.__aexit__(None, None, None))
            self._thread.close()
        if self._writer is not None:
            self._writer.close()
        self._thread = self._rollout = self._writer = None
        atexit.unregister(self.close)

    def _begin(self, trainer: Any) -> tuple[Rollout, LoopThread]:
        """With the first batch, all is made that needs to know the trainer."""
        if self._rollout is not None and self._thread is not None:
            return self._rollout, self._thread
        if getattr(trainer, "tools", None):
            raise ConfigError("The tools are rollout_func's: leave out GRPOTrainer(tools=…), whose loop would run too.")
        self._rollout = Rollout(
            engine=self._engine,
            tools=self._tools,
            tokenizer=_tokenizer(trainer),
            model_format=self._model_format,
            chat_template_kwargs=trainer.chat_template_kwargs,
            limits=limits_of(self._limits, trainer.args),
            sampling_params=sampling_params_of(self._sampling_params, trainer.args, self._engine.logprobs_of),
            rewards=self._rewards,
        )
        self._thread = LoopThread()
        self._thread.run(self._rollout.__aenter__())
        atexit.register(self.close)
        assert self._rollout.rendering is not None
        if self._data_dir is not None:
            several = trainer.accelerator.num_processes > 1
            name = f"rank-{trainer.accelerator.process_index}" if several else None
            self._writer = RecordWriter(self._data_dir, writer=name, decode=self._rollout.rendering.decode)
        if self._brings_weights:
            self._bring_the_last(trainer)
        return self._rollout, self._thread

    # Weights

    def _bring_weights(self, trainer: Any) -> None:
        """Where the engine hasn't the trainer's weights, it gets them. All processes do this, or none."""
        step = trainer.state.global_step
        if not self._weights.behind(step):
            return
        rollout, thread = self._begin(trainer)
        self._weights.save(trainer)
        if trainer.accelerator.is_main_process:
            thread.run(self._weights.give(rollout, step))
        trainer.accelerator.wait_for_everyone()
        self._weights.given(step)

    def _bring_the_last(self, trainer: Any) -> None:
        """When training ends, the engine has what came of it."""
        from transformers import TrainerCallback

        class BringsTheLast(TrainerCallback):  # type: ignore[misc,unused-ignore]
            def on_train_end(callback, *args: Any, **kwargs: Any) -> None:  # noqa: N805
                self._bring_weights(trainer)

        trainer.add_callback(BringsTheLast())

    def _count_stale(self, fields: Sequence[dict[str, Any]], step: int, trainer: Any) -> None:
        judged = self._brings_weights or not getattr(trainer, "use_vllm", False)  # TRL sees to vLLM's itself
        for one in fields:
            one["stale_tokens"] = self._weights.stale(one["weights"], step) if judged else None
        stale = sum(one["stale_tokens"] or 0 for one in fields)
        anywhere = bool(stale)
        if trainer.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            anywhere = any(gather_object([anywhere]))
        if anywhere:
            self._weights.were_stale(stale, sum(sum(one["weights"].values()) for one in fields), step)

    # Prompts

    def _read(self, prompts: Sequence[Any], trainer: Any) -> list[tuple[Prompt, int]]:
        """The prompts with what else their rows have, and which sample of its group each is."""
        training = trainer.model.training
        most = trainer.num_generations if training else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        name = "train_dataset" if training else "eval_dataset"
        rows = self._rows.setdefault(name, Rows(getattr(trainer, name)))
        read = []
        for number, prompt in enumerate(prompts, first):
            if isinstance(prompt, str):
                raise ConfigError(
                    f"The prompt {prompt!r:.60} is a text, and a model that calls tools is asked by messages. Give "
                    "the data set's prompts as [{'role': 'user', 'content': …}]."
                )
            others = {key: value for key, value in rows.of(prompt).items() if key not in OTHERS}
            group = str(number // most)
            asked = Prompt.read({**others, "messages": plain(prompt), "group": group}, group)
            read.append((asked, number % most))
        return read

    def _warn_of(self, fields: Sequence[Mapping[str, Any]], trainer: Any) -> None:
        """Say how many are left out; and, once, what TRL makes of that by some of its losses."""
        left_out = [one["left_out"] for one in fields if one["left_out"] is not None]
        if not left_out:
            return
        logger.warning("%d of %d samples are left out. The first: %s", len(left_out), len(fields), left_out[0])
        loss = trainer.args.loss_type
        if loss in BY_ROWS and not self._warned:
            self._warned = True
            logger.warning(
                "loss_type=%s: TRL divides by the number of rows, so what is learnt from the others is smaller by the "
                "share of those left out. With 'dapo' or 'bnpo' it isn't.",
                loss,
            )


def _tokenizer(trainer: Any) -> Any:
    """The trainer's, which may be within a processor."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


async def _all(rollout: Rollout, asked: Sequence[tuple[Prompt, int]]) -> list[Trajectory]:
    return await asyncio.gather(*(rollout.sample(prompt, sample=sample) for prompt, sample in asked))
