"""Tests of the TRL adapter with a fake trainer."""

import ast
import asyncio
import importlib
import inspect
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doc_page
import pytest
import record_samples
from free_port import free_port
from rollout import small_tokenizer
from rollout.fake_servers import serving
from rollout.scripted_model import Counting, call

from toolroll import Limits, Trajectory
from toolroll.errors import ConfigError, EngineUnavailable
from toolroll.integrations.trl import TrainerRollout, rollout_func, scored, trajectory_reward
from toolroll.integrations.trl.batch import make_batch, sample_fields
from toolroll.integrations.trl.reward import batch_metrics
from toolroll.integrations.trl.rows import DatasetRows
from toolroll.integrations.trl.settings import resolve_limits, resolve_sampling_params
from toolroll.records.reader import read_records
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.rollout.engines.vllm import VLLMEngine
from toolroll.rollout.tokens import TokenStream

pytestmark = pytest.mark.virtual_time


class Table:
    """Minimal dataset."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.column_names = list(rows[0])

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]


class Engine(ScriptedEngine):
    """Engine that accepts weights."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.updates: list[tuple[str, str]] = []

    async def update_weights(self, model_path: Any, version: str) -> None:
        assert not self.running, "generations are paused during the update"
        self.updates.append((str(model_path), version))
        self.weight_version = version


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer.make(small_tokenizer.CHATML, small_tokenizer.MARKERS)


def question(number: int) -> list[dict[str, Any]]:
    # An Arrow table has every key of any message in all messages.
    return [{"role": "user", "content": f"Count to {number}.", "tool_calls": None, "name": None}]


def trainer_of(tokenizer: Any, rows: list[dict[str, Any]] | None = None, **more: Any) -> Any:
    """Return a fake trainer that samples twice per prompt."""
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    args |= {"max_completion_length": 200, "loss_type": "dapo"} | more.pop("args", {})
    process = {"process_index": 0, "num_processes": 1, "is_main_process": True, "wait_for_everyone": lambda: None}
    saved: list[str] = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(**args),
        processing_class=tokenizer,
        chat_template_kwargs={},
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(**process, unwrap_model=lambda model: model),
        num_generations=2,
        num_generations_eval=1,
        train_dataset=Table(rows or [{"prompt": question(number), "answer": str(number)} for number in range(20)]),
        eval_dataset=None,
        tools=[],
        callbacks=[],
        saved=saved,
        save_model=lambda folder, _internal_call: saved.append(folder),
    )
    trainer.add_callback = trainer.callbacks.append
    for key, value in more.items():
        setattr(trainer, key, value)
    return trainer


@pytest.fixture
def make(tokenizer: Any) -> Iterator[Any]:
    """Return a factory of rollouts whose model calls the tool as requested and then answers."""
    rollouts: list[TrainerRollout] = []

    def create(**more: Any) -> TrainerRollout:
        def script(request_id: str, prompt_ids: Any, turn: int) -> list[int]:
            asked = tokenizer.decode(prompt_ids).split("Count to ")[-1].split(".")[0]
            text = call("count", to=int(asked)) if turn == 0 else f"I counted to {asked}."
            return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

        more.setdefault("engine", Engine(script, weight_version="default"))
        rollouts.append(rollout_func(tools=[Counting()], model_format="chatml", **more))
        return rollouts[-1]

    yield create
    for rollout in rollouts:
        rollout.close()


def answer_reward(trajectory: Trajectory) -> float:
    return float(trajectory.extra["answer"])


def test_rows_have_prompt_order_and_equal_lengths(make: Any, tokenizer: Any) -> None:
    trainer = trainer_of(tokenizer)
    prompts = [question(number) for number in (9, 9, 2, 2, 5, 5)]
    batch = make(rewards=answer_reward)(prompts, trainer)
    assert set(batch) == {"prompt_ids", "completion_ids", "env_mask", "logprobs", "toolroll", "trajectory"}
    for prompt, ids, mask, logprobs, asked in zip(
        batch["prompt_ids"], batch["completion_ids"], batch["env_mask"], batch["logprobs"], prompts, strict=True
    ):
        assert asked[0]["content"] in tokenizer.decode(prompt)
        assert len(ids) == len(mask) == len(logprobs)
        assert {mask[0], mask[-1]} == {1}
        assert 0 in mask, "tool responses are masked"
        assert all((value == -1.0) == bool(sampled) for value, sampled in zip(logprobs, mask, strict=True))
    samples = [(one.group, one.sample, one.extra["answer"]) for one in batch["trajectory"]]
    assert samples == [("0", 0, "9"), ("0", 1, "9"), ("1", 0, "2"), ("1", 1, "2"), ("2", 0, "5"), ("2", 1, "5")]
    assert trajectory_reward(toolroll=batch["toolroll"]) == [2.5 + float(answer) for *_, answer in samples]


def test_groups_span_processes(make: Any, tokenizer: Any) -> None:
    second = {"process_index": 1, "num_processes": 1, "is_main_process": False}
    trainer = trainer_of(tokenizer, accelerator=SimpleNamespace(**second), num_generations=4)
    batch = make()([question(3)] * 2 + [question(4)] * 4, trainer)
    assert [(one.group, one.sample) for one in batch["trajectory"]] == [
        ("1", 2),
        ("1", 3),
        ("2", 0),
        ("2", 1),
        ("2", 2),
        ("2", 3),
    ]


def test_sample_with_infra_fault_is_masked_and_unscored(make: Any, tokenizer: Any, caplog: Any) -> None:
    trainer = trainer_of(tokenizer, args={"loss_type": "grpo"})
    batch = make(rewards=answer_reward)([question(13), question(5)], trainer)  # the tool fails at 13
    assert batch["toolroll"][0]["left_out"] == "the abacus is broken"
    assert sum(batch["env_mask"][0]) == 0
    assert len(batch["env_mask"][0]) == len(batch["completion_ids"][0]) == len(batch["logprobs"][0]) > 0
    assert trajectory_reward(toolroll=batch["toolroll"]) == [None, 7.5]

    @scored
    def mine(completions: Any, **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    @scored
    async def also_mine(completions: Any, **_: Any) -> list[float]:
        return [2.0 for _ in completions]

    assert mine(completions=["", ""], toolroll=batch["toolroll"]) == [None, 1.0]
    assert asyncio.run(also_mine(completions=["", ""], toolroll=batch["toolroll"])) == [None, 2.0]
    assert mine.__name__ == "mine", "TRL uses the name for its metrics"
    assert "1 of 2 samples are excluded" in caplog.text
    assert "loss_type=grpo divides by the number of rows" in caplog.text


def test_row_without_tokens_gets_filler(make: Any, tokenizer: Any) -> None:
    batch = make(limits={"max_prompt_len": 5})([question(3)] * 2, trainer_of(tokenizer))
    assert batch["completion_ids"] == [[tokenizer.eos_token_id]] * 2
    assert batch["env_mask"] == [[0], [0]]
    assert all("max_prompt_len is 5" in fields["left_out"] for fields in batch["toolroll"])


def test_sample_without_reward_is_excluded(make: Any, tokenizer: Any) -> None:
    batch = make(rewards=lambda trajectory: None)([question(3)] * 2, trainer_of(tokenizer))
    assert sum(map(sum, batch["env_mask"])) == 0
    assert trajectory_reward(toolroll=batch["toolroll"]) == [None, None]


def test_row_is_the_last_part_with_sampled_tokens() -> None:
    first, second, ended = TokenStream([1, 2]), TokenStream([1, 2, 30]), TokenStream([1, 2, 30, 60])
    first.append_sampled([3, 4], [-0.5, -0.5], turn=0)
    second.append_sampled([5], [-0.25], turn=1)
    one = record_samples.trajectory()
    one.tokens, one.earlier = ended, [first, second]
    fields = sample_fields(one)
    assert (fields["left_out"], fields["lost_tokens"]) == (None, pytest.approx(2 / 3))
    batch = make_batch([one], [fields], filler=0)
    assert (batch["prompt_ids"], batch["completion_ids"]) == ([[1, 2, 30]], [[5]])
    assert (batch["env_mask"], batch["logprobs"]) == ([[1]], [[-0.25]])


def test_batch_metrics_are_logged(make: Any, tokenizer: Any) -> None:
    batch = make()([question(3), question(3), question(-1), question(13)], trainer_of(tokenizer))
    logged: dict[str, float] = {}
    trajectory_reward(toolroll=batch["toolroll"], log_metric=logged.__setitem__)
    assert logged["toolroll/left_out"] == 0.25
    assert logged["toolroll/calls"] == 1.0
    assert (logged["toolroll/policy_faults"], logged["toolroll/infra_faults"]) == (0.25, 0.25)
    assert logged["toolroll/stale_tokens"] == 0.0


def test_records_are_written_per_step(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    rollout, trainer = make(rewards=answer_reward, rollout_data_dir=tmp_path), trainer_of(tokenizer)
    for trainer.state.global_step in (0, 1):
        rollout([question(4)] * 2, trainer)
    trainer.model.training = False
    trainer.eval_dataset = Table([{"prompt": question(4), "answer": "4"}])
    rollout([question(4)] * 2, trainer)
    assert [(record.step, record.score) for record in read_records(tmp_path)] == [
        (1, 6.5),
        (1, 6.5),
        (2, 6.5),
        (2, 6.5),
    ]


# Weights


def test_engine_gets_weights_of_each_step(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    trainer, rollout = trainer_of(tokenizer), make(weights_dir=tmp_path / "served")
    engine = rollout._engine
    for trainer.state.global_step, prompt in itertools.product((0, 1, 4), (question(2), question(3))):
        batch = rollout([prompt] * 2, trainer)
        assert [fields["weights"].keys() for fields in batch["toolroll"]] == [{f"step-{trainer.state.global_step}"}] * 2
        assert batch_metrics(batch["toolroll"])["stale_tokens"] == 0
    where = str(tmp_path / "served")
    assert engine.updates == [(where, "step-0"), (where, "step-1"), (where, "step-4")], "one update per step"
    trainer.state.global_step = 5
    [callback] = trainer.callbacks
    callback.on_train_end(None, None, None)
    assert engine.updates[-1] == (where, "step-5"), "the final weights when training ends"


def test_stale_server_is_reported_and_updated_again(make: Any, tokenizer: Any, tmp_path: Path, caplog: Any) -> None:
    trainer, rollout = trainer_of(tokenizer), make(weights_dir=tmp_path)
    rollout([question(2)] * 2, trainer)
    rollout._engine.weight_version = "default"
    batch = rollout([question(2)] * 2, trainer)
    assert batch_metrics(batch["toolroll"])["stale_tokens"] == 1.0
    assert "tokens of step 1 were sampled with stale weights: sending them again" in caplog.text
    batch = rollout([question(2)] * 2, trainer)
    assert batch_metrics(batch["toolroll"])["stale_tokens"] == 0.0


def test_unchanged_weights_are_stale_in_later_steps(make: Any, tokenizer: Any, caplog: Any) -> None:
    trainer, rollout = trainer_of(tokenizer), make()
    fractions = []
    for trainer.state.global_step, version in ((0, "a"), (1, "a"), (2, "b"), (3, None)):
        rollout._engine.weight_version = version
        metrics = batch_metrics(rollout([question(2)] * 2, trainer)["toolroll"])
        fractions.append((metrics["stale_tokens"], metrics["unknown_weights"]))
    assert fractions == [(0, 0), (1, 0), (0, 0), (0, 1)]
    assert "pass rollout_func(weights_dir=…)" in caplog.text


def test_staleness_is_not_counted_with_use_vllm(make: Any, tokenizer: Any) -> None:
    trainer, rollout = trainer_of(tokenizer, use_vllm=True), make()
    for trainer.state.global_step in (0, 1):
        batch = rollout([question(2)] * 2, trainer)
    assert "stale_tokens" not in batch_metrics(batch["toolroll"])


def test_generation_resumes_with_new_weights(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    ids_of_answer = [*tokenizer.encode("This is a long answer, in many words. " * 4), tokenizer.eos_token_id]
    engine = Engine([ids_of_answer], seconds_per_token=0.02)
    trainer, rollout = trainer_of(tokenizer), make(engine=engine, weights_dir=tmp_path)
    batches: list[Any] = []
    sampling = threading.Thread(target=lambda: batches.append(rollout([question(2)] * 2, trainer)))
    sampling.start()
    while len(engine.running) < 2:
        time.sleep(0.01)
    time.sleep(0.2)
    trainer.state.global_step = 1
    trainer.callbacks[0].on_train_end(None, None, None)
    sampling.join(30)
    [batch] = batches
    for ids, fields in zip(batch["completion_ids"], batch["toolroll"], strict=True):
        assert ids == ids_of_answer
        assert fields["weights"].keys() == {"step-0", "step-1"}
        assert 0 < fields["stale_tokens"] == fields["weights"]["step-1"], "stale tokens are counted"


async def test_rejected_weight_update_raises(tmp_path: Path) -> None:
    from aiohttp import web

    async def refuse(request: web.Request) -> web.Response:
        body = await request.json()
        assert body == {"model_path": str(tmp_path), "weight_version": "step-3"}
        return web.json_response({"success": False, "message": "no such file"}, status=400)

    async with serving(update_weights_from_disk=refuse) as url, SGLangEngine(url) as engine:
        with pytest.raises(EngineUnavailable, match=r"1 of 1 servers failed: .*: HTTP 400: no such file"):
            await engine.update_weights(tmp_path, "step-3")


async def test_weight_update_of_unreachable_server_raises(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with SGLangEngine(url) as engine:
        message = (
            rf"1 of 1 servers failed: {url}/.*can't be reached: Connection refused.*Check that the server is running"
        )
        with pytest.raises(EngineUnavailable, match=message):
            await engine.update_weights(tmp_path, "step-3")


async def test_weight_update_of_busy_server_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aiohttp import web

    monkeypatch.setattr("toolroll.rollout.engines.http_engine.BUSY_RETRY_DELAYS_S", (0.0, 0.0))
    requests = 0

    async def refuse(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        return web.json_response({"success": False, "message": "… the cache was not flushed …"}, status=400)

    async with serving(update_weights_from_disk=refuse) as url, SGLangEngine(url) as engine:
        with pytest.raises(EngineUnavailable, match="the cache was not flushed"):
            await engine.update_weights(tmp_path, "step-3")
    assert requests == 3


# Rejected configurations


def test_invalid_configuration_is_rejected(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    adapters = SimpleNamespace(training=True, peft_config={})
    for options, trainer, message in [
        ({}, trainer_of(tokenizer, tools=[print]), "Pass tools to rollout_func"),
        ({"sampling_params": {"temperature": 0.5}}, trainer_of(tokenizer), "Set the temperature only in GRPOConfig"),
        ({"weights_dir": tmp_path}, trainer_of(tokenizer, model=adapters), "a model with adapters"),
        ({"limits": {"max_turns": 3}}, trainer_of(tokenizer), "unknown key 'max_turns'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make(**options)([question(2)] * 2, trainer)
    with pytest.raises(ConfigError, match="is text"):
        make()(["Count.", "Count."], trainer_of(tokenizer))
    with pytest.raises(ConfigError, match="VLLMEngine cannot load weights from a directory"):
        make(engine=VLLMEngine("http://127.0.0.1:1"), weights_dir=tmp_path)
    with pytest.raises(ConfigError, match="does not return tokens to train on"):
        make(engine=object())


def test_sampling_params_come_from_trainer(tokenizer: Any) -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    args = trainer_of(tokenizer, args=given).args
    assert resolve_sampling_params({"seed": 1}, args, "processed_logprobs") == {**given, "seed": 1}
    plain = trainer_of(tokenizer).args
    assert resolve_sampling_params({}, plain, "raw_logprobs") == {"temperature": 1.0}, (
        "both modes are equal at temperature 1"
    )
    with pytest.raises(ConfigError, match="processed_logprobs"):
        resolve_sampling_params({}, args, "raw_logprobs")


def test_limits_default_to_trainer(tokenizer: Any) -> None:
    args = trainer_of(tokenizer).args
    assert resolve_limits(None, args) == {"max_response_len": 200}
    assert resolve_limits({"max_response_len": 7}, args) == {"max_response_len": 7}
    limits = resolve_limits(Limits(call_timeout=5), args)
    assert isinstance(limits, Limits)
    assert (limits.max_response_len, limits.call_timeout) == (200, 5)
    assert resolve_limits(Limits(max_response_len=9), args) == Limits(max_response_len=9)


# Dataset


def test_other_columns_are_found_by_prompt() -> None:
    rows = DatasetRows(
        {"a": Table([{"prompt": question(1), "answer": "1", "hint": None}]), "b": Table([{"prompt": []}])}
    )
    assert rows.columns_for(question(1)) == {"answer": "1"}
    assert rows.columns_for(question(2)) == {}
    assert DatasetRows(iter([])).columns_for(question(1)) == {}, "an IterableDataset has no rows"


def test_rows_with_same_prompt_must_be_equal() -> None:
    row = {"prompt": question(1), "answer": "1"}
    assert DatasetRows(Table([row, row])).columns_for(question(1)) == {"answer": "1"}
    with pytest.raises(ConfigError, match="Rows 0 and 1 of the dataset have the same prompt"):
        DatasetRows(Table([row, {**row, "answer": "2"}])).columns_for(question(1))


def test_tools_kwargs_reach_the_tools(make: Any, tokenizer: Any) -> None:
    kwargs = {"count": {"calc_reward_kwargs": {"bonus": 3.0}, "create_kwargs": None}, "other": None}
    trainer = trainer_of(tokenizer, [{"prompt": question(2), "tools_kwargs": kwargs}])
    batch = make()([question(2)] * 2, trainer)
    assert trajectory_reward(toolroll=batch["toolroll"]) == [5.5, 5.5]


def test_documentation_matches_code(root: Path) -> None:
    page = (root / "docs" / "trl.md").read_text()
    blocks = [ast.parse(body) for language, _, body in doc_page.BLOCK.findall(page) if language == "python"]
    nodes = [node for block in blocks for node in ast.walk(block)]
    imported = [
        (node.module, name.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("toolroll")
        for name in node.names
    ]
    assert len(imported) > 4
    assert all(hasattr(importlib.import_module(str(module)), name) for module, name in imported)
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "rollout_func"]
    known = inspect.signature(rollout_func).parameters
    assert calls
    assert all(keyword.arg in known for node in calls for keyword in node.keywords)
    assert all(f"| `{name}` |" in page for name in known), "every argument is documented"


@pytest.mark.process
def test_import_is_light() -> None:
    heavy = "('torch', 'transformers', 'trl', 'datasets', 'accelerate', 'ray')"
    code = f"import sys, toolroll.integrations.trl; print([name for name in {heavy} if name in sys.modules])"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert completed.stdout.strip() == "[]"
