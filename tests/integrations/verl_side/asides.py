"""Scenarios without verl's workers: registries, settings, rejected configurations."""

import asyncio
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from scene import TARGET, Scene
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.tools.tool_registry import initialize_tools_from_config, load_all_tools
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset

from toolroll import ConfigError, ToolInstance
from toolroll.integrations.verl.toolbox import convert_tools

NESTED = {
    "type": "function",
    "function": {
        "name": "diary",
        "description": "Keep a diary.",
        "parameters": {
            "type": "object",
            "properties": {"entry": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
            "required": ["entry"],
        },
    },
}


def play(scene: Scene) -> dict[str, Any]:
    return {
        "registry": registry(scene),
        "refused": refused(scene),
        "foreign": asyncio.run(foreign(scene)),
        "page": composed(scene.spec["page"]),
        "unknown_keys": unknown(scene.spec["keys"]),
        "files": {title: loaded(scene, title, body) for title, body in scene.spec["files"].items()},
        "script": composed(scene.spec["script"], whole=True),
    }


def composed(overrides: list[str], *, whole: bool = False) -> dict[str, Any]:
    """Return the values of these keys in verl's config. A `whole` config is also validated by verl."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    if whole:
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    keys = [one.lstrip("+").partition("=")[0] for one in overrides]
    found = {key: OmegaConf.select(config, key, throw_on_missing=True) for key in keys}
    return {key: OmegaConf.to_container(one) if OmegaConf.is_config(one) else one for key, one in found.items()}


def unknown(keys: list[str]) -> list[str]:
    """Return the keys that verl's config does not have."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    parts = [key.rpartition(".") for key in keys]
    return [key for key, (of, _, name) in zip(keys, parts, strict=True) if name not in OmegaConf.select(config, of)]


def loaded(scene: Scene, title: str, body: str) -> list[str]:
    """Return the tools or agent loops that verl loads from a file of the page."""
    path = scene.directory / title
    path.write_text(body)
    if title.startswith("tools"):
        return [tool.name for tool in initialize_tools_from_config(str(path))]
    return [type(agent_loop(scene, [], entry)).__name__ for entry in OmegaConf.load(path)]


def agent_loop(scene: Scene, overrides: list[str], entry: Any) -> Any:
    """Return an agent loop as verl's workers create it, without tools."""
    no_tools = "actor_rollout_ref.rollout.multi_turn.tool_config_path=null"
    config = scene.config(scene.spec["sandbox"], no_tools, *overrides)
    return instantiate(
        config=entry,
        trainer_config=DictConfigWrap(config),
        server_manager=None,
        tokenizer=scene.tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap([]),
    )


def registry(scene: Scene) -> dict[str, Any]:
    """Load toolroll's tools with verl's registry."""
    path = scene.config(scene.spec["sandbox"]).actor_rollout_ref.rollout.multi_turn.tool_config_path
    tools = initialize_tools_from_config(path)
    written = [entry.get("tool_schema") for entry in yaml.safe_load(Path(path).read_text())["tools"]]
    shown = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]
    return {"names": [tool.name for tool in tools], "written": written, "shown": shown}


def refused(scene: Scene) -> dict[str, str]:
    """Return the errors of invalid configurations."""
    cases = {
        "grpo": (["algorithm.adv_estimator=grpo"], {}),
        "remax": (["algorithm.adv_estimator=remax"], {}),
        "setting": ([], {"limit": {"call_timeout": 3}}),
        "limit": ([], {"limits": {"call_timeout": 30, "turn_timeout": 10}}),
        "format": ([], {"model_format": "klingon"}),
    }
    messages = {}
    for name, (overrides, settings) in cases.items():
        try:
            loop = agent_loop(scene, overrides, {"name": "toolroll", "_target_": TARGET, **settings})
            asyncio.run(loop.run({}, raw_prompt=[{"role": "user", "content": "?"}]))
        except (ConfigError, InstantiationException) as error:
            messages[name] = str(error)
    return messages


async def foreign(scene: Scene) -> dict[str, Any]:
    """Call tools written for verl through toolroll."""
    path = scene.directory / "foreign.yaml"
    entry = {"class_name": "foreign.Diary", "config": {"type": "native"}, "tool_schema": NESTED}
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    loaded = load_all_tools(str(path), str(Path(__file__).with_name("foreign_functions.py")))
    diary, add = convert_tools(loaded, str(path))
    async with ToolInstance(diary, create_kwargs={"owner": "Ada"}) as instance:
        first = await instance.execute({"entry": ["up"]})
        second = await instance.execute({"entry": ["down"]}, deadline=1.0)
        try:
            await instance.execute({"entry": []})
            wrong = ""
        except Exception as error:
            wrong = str(error)
        reward = await instance.calc_reward()
    async with ToolInstance(add) as instance:
        total = await instance.execute('{"a": 2, "b": 3}')
    return {
        "schema": diary.tool_schema.model_dump(),
        "verls": loaded[0].tool_schema.model_dump(exclude_none=True),
        "texts": [first.response.text, second.response.text, total.response.text],
        "step": second.reward,
        "wrong": wrong,
        "reward": reward,
        "left": len(loaded[0].pages) + len(diary.instances) + len(add.instances),
    }
