"""The parts of the TRL integration, with a trainer that does nothing but be asked."""

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
from free_port import free_port
from rollout import small_tokenizer
from rollout.fake_servers import serving
from rollout.scripted_model import Counting, call

from toolroll import Limits, Trajectory
from toolroll.errors import ConfigError, EngineUnavailable
from toolroll.integrations.trl import TrainerRollout, rollout_func, scored, trajectory_reward
from toolroll.integrations.trl.reward import metrics_of
from toolroll.integrations.trl.rows import Rows
from toolroll.integrations.trl.settings import limits_of, sampling_params_of
from toolroll.records.reader import read
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.rollout.engines.vllm import VLLMEngine


class Table:
    """As much of a data set as is asked for."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.column_names = list(rows[0])

    def __getitem__(self, asked: Any) -> Any:
        return [row[asked] for row in self.rows] if isinstance(asked, str) else self.rows[asked]


class Engine(ScriptedEngine):
    """Takes weights."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.given: list[tuple[str, str]] = []

    async def update_weights(self, model_path: Any, version: str) -> None:
        assert not self.running, "all is paused meanwhile"
        self.given.append((str(model_path), version))
        self.weight_version = version


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer.make(small_tokenizer.CHATML, small_tokenizer.MARKERS)


def question(number: int) -> list[dict[str, Any]]:
    # As a table gives it: with every key of any message.
    return [{"role": "user", "content": f"Count to {number}.", "tool_calls": None, "name": None}]


def trainer_of(tokenizer: Any, rows: list[dict[str, Any]] | None = None, **more: Any) -> Any:
    """A trainer that samples twice per prompt."""
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    args |= {"max_completion_length": 200, "loss_type": "dapo"} | more.pop("args", {})
    process = {"process_index": 0, "num_processes": 1, "is_main_process": True, "wait_for_everyone": lambda: None}
    saved: list[str] = []
    made = SimpleNamespace(
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
    made.add_callback = made.callbacks.append
    for key, value in more.items():
        setattr(made, key, value)
    return made


@pytest.fixture
def make(tokenizer: Any) -> Iterator[Any]:
    """A rollout whose model counts as far as it is asked to, and then answers."""
    made: list[TrainerRollout] = []

    def one(**more: Any) -> TrainerRollout:
        def script(request_id: str, prompt_ids: Any, turn: int) -> list[int]:
            asked = tokenizer.decode(prompt_ids).split("Count to ")[-1].split(".")[0]
            text = call("count", to=int(asked)) if turn == 0 else f"I counted to {asked}."
            return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

        more.setdefault("engine", Engine(script, weight_version="default"))
        made.append(rollout_func(tools=[Counting()], model_format="chatml", **more))
        return made[-1]

    yield one
    for rollout in made:
        rollout.close()


def worth(trajectory: Trajectory) -> float:
    return float(trajectory.extra["answer"])


def test_rows_are_in_the_order_of_the_prompts_and_of_one_length(make: Any, tokenizer: Any) -> None:
    trainer = trainer_of(tokenizer)
    prompts = [question(number) for number in (9, 9, 2, 2, 5, 5)]
    made = make(rewards=worth)(prompts, trainer)
    assert set(made) == {"prompt_ids", "completion_ids", "env_mask", "logprobs", "toolroll", "trajectory"}
    for prompt, ids, mask, logprobs, asked in zip(
        made["prompt_ids"], made["completion_ids"], made["env_mask"], made["logprobs"], prompts, strict=True
    ):
        assert asked[0]["content"] in tokenizer.decode(prompt)
        assert len(ids) == len(mask) == len(logprobs)
        assert {mask[0], mask[-1]} == {1}
        assert 0 in mask, "what the tool said isn't learnt from"
        assert all((value == -1.0) == bool(sampled) for value, sampled in zip(logprobs, mask, strict=True))
    given = [(one.group, one.sample, one.extra["answer"]) for one in made["trajectory"]]
    assert given == [("0", 0, "9"), ("0", 1, "9"), ("1", 0, "2"), ("1", 1, "2"), ("2", 0, "5"), ("2", 1, "5")]
    assert trajectory_reward(toolroll=made["toolroll"]) == [2.5 + float(answer) for *_, answer in given]


def test_groups_go_over_processes_as_trl_has_them(make: Any, tokenizer: Any) -> None:
    second = {"process_index": 1, "num_processes": 1, "is_main_process": False}
    trainer = trainer_of(tokenizer, accelerator=SimpleNamespace(**second), num_generations=4)
    made = make()([question(3)] * 2 + [question(4)] * 4, trainer)
    assert [(one.group, one.sample) for one in made["trajectory"]] == [
        ("1", 2),
        ("1", 3),
        ("2", 0),
        ("2", 1),
        ("2", 2),
        ("2", 3),
    ]


def test_a_sample_that_the_infrastructure_damaged(make: Any, tokenizer: Any, caplog: Any) -> None:
    trainer = trainer_of(tokenizer, args={"loss_type": "grpo"})
    made = make(rewards=worth)([question(13), question(5)], trainer)  # of 13 the abacus breaks
    assert made["toolroll"][0]["left_out"] == "the abacus is broken"
    assert sum(made["env_mask"][0]) == 0
    assert len(made["env_mask"][0]) == len(made["completion_ids"][0]) == len(made["logprobs"][0]) > 0
    assert trajectory_reward(toolroll=made["toolroll"]) == [None, 7.5]

    @scored
    def mine(completions: Any, **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    @scored
    async def also_mine(completions: Any, **_: Any) -> list[float]:
        return [2.0 for _ in completions]

    assert mine(completions=["", ""], toolroll=made["toolroll"]) == [None, 1.0]
    assert asyncio.run(also_mine(completions=["", ""], toolroll=made["toolroll"])) == [None, 2.0]
    assert mine.__name__ == "mine", "TRL names its metrics so"
    assert "1 of 2 samples are left out" in caplog.text
    assert "loss_type=grpo: TRL divides by the number of rows" in caplog.text


def test_a_row_that_has_nothing_is_not_empty(make: Any, tokenizer: Any) -> None:
    made = make(limits={"max_prompt_len": 5})([question(3)] * 2, trainer_of(tokenizer))
    assert made["completion_ids"] == [[tokenizer.eos_token_id]] * 2
    assert made["env_mask"] == [[0], [0]]
    assert all("max_prompt_len is 5" in fields["left_out"] for fields in made["toolroll"])


def test_what_a_reward_function_cant_judge_is_left_out(make: Any, tokenizer: Any) -> None:
    made = make(rewards=lambda trajectory: None)([question(3)] * 2, trainer_of(tokenizer))
    assert sum(map(sum, made["env_mask"])) == 0
    assert trajectory_reward(toolroll=made["toolroll"]) == [None, None]


def test_metrics_of_a_batch(make: Any, tokenizer: Any) -> None:
    made = make()([question(3), question(3), question(-1), question(13)], trainer_of(tokenizer))
    logged: dict[str, float] = {}
    trajectory_reward(toolroll=made["toolroll"], log_metric=logged.__setitem__)
    assert logged["toolroll/left_out"] == 0.25
    assert logged["toolroll/calls"] == 1.0
    assert (logged["toolroll/policy_faults"], logged["toolroll/infra_faults"]) == (0.25, 0.25)
    assert logged["toolroll/stale_tokens"] == 0.0


def test_records_of_each_step(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    rollout, trainer = make(rewards=worth, rollout_data_dir=tmp_path), trainer_of(tokenizer)
    for trainer.state.global_step in (0, 1):
        rollout([question(4)] * 2, trainer)
    trainer.model.training = False
    trainer.eval_dataset = Table([{"prompt": question(4), "answer": "4"}])
    rollout([question(4)] * 2, trainer)
    assert [(record.step, record.score) for record in read(tmp_path)] == [(1, 6.5), (1, 6.5), (2, 6.5), (2, 6.5)]


# Weights


def test_the_engine_has_the_weights_of_the_step(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    trainer, rollout = trainer_of(tokenizer), make(weights_dir=tmp_path / "served")
    engine = rollout._engine
    for trainer.state.global_step, prompt in itertools.product((0, 1, 4), (question(2), question(3))):
        made = rollout([prompt] * 2, trainer)
        assert [fields["weights"].keys() for fields in made["toolroll"]] == [{f"step-{trainer.state.global_step}"}] * 2
        assert metrics_of(made["toolroll"])["stale_tokens"] == 0
    where = str(tmp_path / "served")
    assert engine.given == [(where, "step-0"), (where, "step-1"), (where, "step-4")], "once for each step"
    trainer.state.global_step = 5
    [callback] = trainer.callbacks
    callback.on_train_end(None, None, None)
    assert engine.given[-1] == (where, "step-5"), "what came of it, when training ends"


def test_a_server_that_came_back_with_old_weights_is_noticed_and_given_new_ones(
    make: Any, tokenizer: Any, tmp_path: Path, caplog: Any
) -> None:
    trainer, rollout = trainer_of(tokenizer), make(weights_dir=tmp_path)
    rollout([question(2)] * 2, trainer)
    rollout._engine.weight_version = "default"
    made = rollout([question(2)] * 2, trainer)
    assert metrics_of(made["toolroll"])["stale_tokens"] == 1.0
    assert "tokens of step 1 were sampled by stale weights of the engine: it is given them anew" in caplog.text
    made = rollout([question(2)] * 2, trainer)
    assert metrics_of(made["toolroll"])["stale_tokens"] == 0.0


def test_weights_that_nobody_moves_are_stale(make: Any, tokenizer: Any, caplog: Any) -> None:
    trainer, rollout = trainer_of(tokenizer), make()
    shares = []
    for trainer.state.global_step, version in ((0, "a"), (1, "a"), (2, "b"), (3, None)):
        rollout._engine.weight_version = version
        found = metrics_of(rollout([question(2)] * 2, trainer)["toolroll"])
        shares.append((found["stale_tokens"], found["unknown_weights"]))
    assert shares == [(0, 0), (1, 0), (0, 0), (0, 1)]
    assert "give rollout_func(weights_dir=…)" in caplog.text


def test_trl_sees_to_the_weights_of_vllm_itself(make: Any, tokenizer: Any) -> None:
    trainer, rollout = trainer_of(tokenizer, use_vllm=True), make()
    for trainer.state.global_step in (0, 1):
        made = rollout([question(2)] * 2, trainer)
    assert "stale_tokens" not in metrics_of(made["toolroll"])


def test_what_is_under_way_is_paused_and_goes_on_by_the_new_weights(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    said = [*tokenizer.encode("This is a long answer, in many words. " * 4), tokenizer.eos_token_id]
    engine = Engine([said], seconds_per_token=0.02)
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
    [made] = batches
    for ids, fields in zip(made["completion_ids"], made["toolroll"], strict=True):
        assert ids == said
        assert fields["weights"].keys() == {"step-0", "step-1"}
        assert 0 < fields["stale_tokens"] == fields["weights"]["step-1"], "it isn't silent"


async def test_a_server_that_loads_nothing_is_said_to(tmp_path: Path) -> None:
    from aiohttp import web

    async def refuse(request: web.Request) -> web.Response:
        body = await request.json()
        assert body == {"model_path": str(tmp_path), "weight_version": "step-3"}
        return web.json_response({"success": False, "message": "no such file"}, status=400)

    async with serving(update_weights_from_disk=refuse) as url, SGLangEngine(url) as engine:
        with pytest.raises(EngineUnavailable, match=r"1 of 1 servers failed: .* answered 400: .*no such file"):
            await engine.update_weights(tmp_path, "step-3")


async def test_a_server_that_is_not_there_is_said_to_be_down(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with SGLangEngine(url) as engine:
        with pytest.raises(EngineUnavailable, match=rf"1 of 1 servers failed: {url}/.*Cannot connect.*Is it up\?"):
            await engine.update_weights(tmp_path, "step-3")


async def test_a_server_that_is_never_free_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aiohttp import web

    monkeypatch.setattr("toolroll.rollout.engines.servers.BUSY_PAUSES", (0.0, 0.0))
    told = 0

    async def refuse(request: web.Request) -> web.Response:
        nonlocal told
        told += 1
        return web.json_response({"success": False, "message": "… the cache was not flushed …"}, status=400)

    async with serving(update_weights_from_disk=refuse) as url, SGLangEngine(url) as engine:
        with pytest.raises(EngineUnavailable, match="the cache was not flushed"):
            await engine.update_weights(tmp_path, "step-3")
    assert told == 3


# What is refused before anything is sampled


def test_what_is_refused(make: Any, tokenizer: Any, tmp_path: Path) -> None:
    adapters = SimpleNamespace(training=True, peft_config={})
    for more, trainer, why in [
        ({}, trainer_of(tokenizer, tools=[print]), "The tools are rollout_func's"),
        ({"sampling_params": {"temperature": 0.5}}, trainer_of(tokenizer), "Set it in GRPOConfig alone"),
        ({"weights_dir": tmp_path}, trainer_of(tokenizer, model=adapters), "of a model with adapters"),
        ({"limits": {"max_turns": 3}}, trainer_of(tokenizer), "there is no key 'max_turns'"),
    ]:
        with pytest.raises(ConfigError, match=why):
            make(**more)([question(2)] * 2, trainer)
    with pytest.raises(ConfigError, match="is a text"):
        make()(["Count.", "Count."], trainer_of(tokenizer))
    with pytest.raises(ConfigError, match="VLLMEngine loads no weights from a directory"):
        make(engine=VLLMEngine("http://127.0.0.1:1"), weights_dir=tmp_path)
    with pytest.raises(ConfigError, match="gives no tokens to train on"):
        make(engine=object())


def test_sampling_is_as_the_trainer_has_it(tokenizer: Any) -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    args = trainer_of(tokenizer, args=given).args
    assert sampling_params_of({"seed": 1}, args, "scaled") == {**given, "seed": 1}
    plain = trainer_of(tokenizer).args
    assert sampling_params_of({}, plain, "raw") == {"temperature": 1.0}, "at 1 both are the same"
    with pytest.raises(ConfigError, match="processed_logprobs"):
        sampling_params_of({}, args, "raw")


def test_limits_are_the_trainers_unless_they_are_given(tokenizer: Any) -> None:
    args = trainer_of(tokenizer).args
    assert limits_of(None, args) == {"max_response_len": 200}
    assert limits_of({"max_response_len": 7}, args) == {"max_response_len": 7}
    found = limits_of(Limits(call_timeout=5), args)
    assert isinstance(found, Limits)
    assert (found.max_response_len, found.call_timeout) == (200, 5)
    assert limits_of(Limits(max_response_len=9), args) == Limits(max_response_len=9)


# The data set


def test_what_else_a_row_has() -> None:
    rows = Rows({"a": Table([{"prompt": question(1), "answer": "1", "hint": None}]), "b": Table([{"prompt": []}])})
    assert rows.of(question(1)) == {"answer": "1"}
    assert rows.of(question(2)) == {}
    assert Rows(iter([])).of(question(1)) == {}, "one that can only be gone through"


def test_two_rows_of_one_prompt_must_be_alike() -> None:
    row = {"prompt": question(1), "answer": "1"}
    assert Rows(Table([row, row])).of(question(1)) == {"answer": "1"}
    with pytest.raises(ConfigError, match="Rows 0 and 1 of the data set have the same prompt"):
        Rows(Table([row, {**row, "answer": "2"}])).of(question(1))


def test_tools_kwargs_reach_the_tools(make: Any, tokenizer: Any) -> None:
    kwargs = {"count": {"calc_reward_kwargs": {"bonus": 3.0}, "create_kwargs": None}, "other": None}
    trainer = trainer_of(tokenizer, [{"prompt": question(2), "tools_kwargs": kwargs}])
    made = make()([question(2)] * 2, trainer)
    assert trajectory_reward(toolroll=made["toolroll"]) == [5.5, 5.5]


def test_what_the_page_says_is_there(root: Path) -> None:
    page = (root / "docs" / "trl.md").read_text()
    blocks = [ast.parse(body) for kind, _, body in doc_page.BLOCK.findall(page) if kind == "python"]
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
    assert all(f"| `{name}` |" in page for name in known), "every argument is explained"


def test_importing_it_pulls_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'trl', 'datasets', 'accelerate', 'ray')"
    code = f"import sys, toolroll.integrations.trl; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
