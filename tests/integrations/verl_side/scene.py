"""Set-up of verl as by a trainer: Ray cluster, config, dataset, servers, client."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import ray
import verl
import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from scripted_server import Server
from verl.protocol import DataProto
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout import llm_server

NEWEST = verl.__version__.startswith("0.9")
PROMPT, RESPONSE = 1024, 1024

TARGET = "toolroll.integrations.verl.ToolrollAgentLoop"
AGENTS: list[dict[str, Any]] = [
    {"name": "toolroll_hurried", "limits": {"call_timeout": 12}},
    {
        "name": "toolroll_scored",
        "rewards": {"steps": 1.0, "tools": {"calc_gsm8k_reward": 0.5}, "function": 1.0},
    },
]
"""Agent loops in addition to the one that `external_lib` registers."""


class Scene:
    """Set-up of all scenarios. `spec` has the paths of the model and questions, and the URLs of the sandboxes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.directory = Path(spec["directory"])
        lines = [json.loads(line) for line in Path(spec["questions"]).read_text().splitlines()][:64]
        self.truths = {line["question"]: line["answer"].rpartition("#### ")[2].replace(",", "") for line in lines}
        assert len(self.truths) == 64, "the questions must be unique"
        start_ray()
        server = ray.remote(Server).options(max_concurrency=1000)
        self.server = server.remote(spec["model"], self.truths)
        balancer = llm_server.GlobalRequestLoadBalancer
        self.balancer = (ray.remote(balancer) if NEWEST else balancer).remote({"one": self.server})
        self.tokenizer = hf_tokenizer(spec["model"])
        self.data: RLHFDataset | None = None

    def config(self, sandbox: str, *more: str) -> DictConfig:
        """Return verl's config."""
        tools = self.directory / f"tools-{abs(hash(sandbox))}.yaml"
        tools.write_text(yaml.safe_dump({"tools": tool_entries(sandbox)}))
        agents = self.directory / "agents.yaml"
        agents.write_text(yaml.safe_dump([{**agent, "_target_": TARGET} for agent in AGENTS]))
        overrides = [
            f"actor_rollout_ref.model.path={self.spec['model']}",
            "actor_rollout_ref.model.external_lib=toolroll.integrations.verl",
            "actor_rollout_ref.rollout.name=sglang",
            f"actor_rollout_ref.rollout.prompt_length={PROMPT}",
            f"actor_rollout_ref.rollout.response_length={RESPONSE}",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            "actor_rollout_ref.rollout.temperature=1.0",
            "actor_rollout_ref.rollout.multi_turn.enable=True",
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8",
            "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=2048",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tools}",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            "actor_rollout_ref.rollout.agent.default_agent_loop=toolroll",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={agents}",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "reward.num_workers=1",
            "algorithm.adv_estimator=toolroll_grpo",
            f"data.train_files={self.spec['rows']}",
            "data.return_raw_chat=True",
            f"data.max_prompt_length={PROMPT}",
            "data.filter_overlong_prompts=False",
            f"trainer.rollout_data_dir={self.directory / 'dumps'}",
            *more,
        ]
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=overrides)

    def client(self, config: DictConfig) -> Any:
        """Return verl's client, with the test server behind its load balancer."""
        return llm_server.LLMServerClient(config, self.balancer)

    def batch(self, config: DictConfig, places: list[int], agent: str) -> dict[str, Any]:
        """Return a batch of verl's dataset, as its data loader does."""
        if self.data is None:
            self.data = RLHFDataset(config.data.train_files, self.tokenizer, config.data, None)
        batch = collate_fn([copy.deepcopy(self.data[place]) for place in places])
        batch["uid"] = np.array([f"u{place}" for place in places], dtype=object)
        batch["agent_name"] = np.array([agent] * len(places), dtype=object)
        return batch

    def rows(self, config: DictConfig, places: list[int], n: int = 1, agent: str = "toolroll") -> DataProto:
        """Return the batch that verl's older trainer sends to its workers, with each row n times."""
        batch = DataProto.from_single_dict(self.batch(config, places, agent))
        return batch.select(batch_keys=[]).repeat(n, interleave=True)

    def set_mode(self, mode: str, **settings: Any) -> None:
        ray.get(self.server.set_mode.remote(mode, **settings))

    def server_log(self) -> dict[str, Any]:
        return ray.get(self.server.log.remote())


def start_ray() -> None:
    """Start a local Ray cluster. Its start-up timeout of 30 s may be too short on a busy machine, so it is retried."""
    for last in (False, False, True):
        try:
            ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
            return
        except Exception:
            if last:
                raise
            ray.shutdown()


def tool_entries(sandbox: str) -> list[dict[str, Any]]:
    """Return config entries of the example's tools with counters, and of a function."""
    with Path(__file__).parents[3].joinpath("examples/verl_gsm8k/tool_config.yaml").open() as opened:
        interpreter, check = yaml.safe_load(opened)["tools"]
    interpreter |= {"class_name": "counting_tools.CountedInterpreter"}
    interpreter["config"] |= {"sandbox_fusion_url": sandbox, "rate_limit": 4}
    check |= {"class_name": "counting_tools.CountedGsm8k"}
    function = {"class_name": "counting_tools.shout", "config": {"type": "native"}}
    return [interpreter, check, function]


def code_rewards(sandbox: str) -> list[str]:
    """Return the overrides that select toolroll's reward function."""
    function = "reward.custom_reward_function"
    return [
        f"{function}.path=pkg://toolroll.integrations.verl.reward",
        f"{function}.name=compute_score_async",
        f"+{function}.reward_kwargs.sandbox_fusion_url={sandbox}",
        f"+{function}.reward_kwargs.rate_limit=4",
    ]
