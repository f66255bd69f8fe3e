"""RunConfig: one YAML for a whole run. What is wrong in it is said in one line.

    config = RunConfig.load("run.yaml", ["n=8", "sampling_params.temperature=0.7"])

Paths in the file are relative to it, those of overrides to where one is; `${oc.env:NAME,default}` is as omegaconf has
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from yaml import YAMLError

from toolroll.errors import ConfigError, explain
from toolroll.rollout.limits import Limits

PATHS = ("tools", "rollout_data_dir")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineConfig(_Strict):
    """Where the model is."""

    kind: str = "sglang"
    """`sglang`, `vllm`, `openai`; or where a class of your own is, e.g. `my.module.MyEngine`."""
    urls: str | list[str]
    model: str | None = None
    """Its name at the server: needed for `openai`, and for `vllm` where it serves several."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What else the engine's class takes: `max_connections`, `logprobs_of`, ….."""


class DataConfig(_Strict):
    """Where the prompts are, and which column is what."""

    path: str | list[str]
    """Files of JSON lines or Parquet, or directories of such; a data set that `datasets` saved to disk."""
    prompt: str = "prompt"
    """The column with a text or with messages."""
    ground_truth: str | None = None
    """The column with the right answer. It reaches rewards as `trajectory.extra["ground_truth"]`."""
    tools_kwargs: str | dict[str, dict[str, dict[str, Any]]] | None = None
    """The column with them; or what they are, where a value `{column: NAME}` is taken from the row."""
    system: str | None = None
    """A system message in front of prompts that are texts, or messages without one."""
    limit: int | None = Field(default=None, ge=1)
    """So many rows only."""


class FunctionConfig(BaseModel):
    """A reward function with settings. What else there is, is given to it as keywords."""

    model_config = ConfigDict(extra="allow", frozen=True)

    path: str


class RewardsConfig(_Strict):
    """How rewards are composed; see RewardRule."""

    steps: float = 1.0
    tools: dict[str, float] = Field(default_factory=dict)
    functions: dict[str, str | FunctionConfig] = Field(default_factory=dict)
    """By name: where the function is, e.g. `my.module.right`. It is given the trajectory. One that takes settings is
    named by `path`, with them beside it."""
    weights: dict[str, float] = Field(default_factory=dict)
    solved_at: float = 1.0
    """A trajectory with this total has solved its problem: pass@k counts those."""


class RunConfig(_Strict):
    """A run."""

    engine: EngineConfig
    model: str | None = None
    """The model's directory: its tokenizer says how conversations are written. Not needed for `openai`."""
    model_format: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: str | None = None
    """A tool config."""
    data: DataConfig
    n: int = Field(default=1, ge=1)
    """Samples per prompt."""
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    limits: Limits = Field(default_factory=Limits)
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    rollout_data_dir: str
    """Where the records go. A run that was interrupted goes on from what is there."""
    prompts_per_step: int = Field(default=1024, ge=1)
    """Records of so many prompts make one file, `{step}.jsonl`."""
    record_tokens: bool = True
    """Whether ids and log-probabilities are recorded."""
    max_in_flight: int = Field(default=256, ge=1)
    """Trajectories at once, per worker."""
    cluster: str | None = None
    """None: in this process. `auto`: on the Ray cluster that this machine is in, or one of its own. Or an address."""
    workers: int | None = Field(default=None, ge=1)
    """On a cluster: how many. By default one for each node."""

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read the file. Overrides are `key=value`, with dots for keys within keys."""
        file = Path(path)
        try:
            written = _plain(OmegaConf.load(file))
            told = _plain(OmegaConf.from_dotlist(list(overrides)))
            merged = OmegaConf.merge(_seen_from(file.parent, written), _seen_from(Path(), told))
            plain = OmegaConf.to_container(merged, resolve=True)
        except FileNotFoundError:
            raise ConfigError(f"There is no file {file}.") from None
        except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            raise ConfigError(f"{file} can't be read: {str(error).splitlines()[0]}") from error
        try:
            return cls.model_validate(plain)
        except ValidationError as error:
            raise ConfigError(f"{file}: {explain(error)}") from error


def _plain(config: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    if not isinstance(plain, dict):
        raise ValueError("it has no keys")
    return {str(key): value for key, value in plain.items()}


def _seen_from(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """With absolute paths: workers may be elsewhere."""

    def seen(path: Any) -> Any:
        if isinstance(path, list):
            return [seen(one) for one in path]
        return str((directory / Path(path).expanduser()).absolute()) if isinstance(path, str) else path

    made = {key: seen(value) if key in PATHS else value for key, value in config.items()}
    data, model = config.get("data"), config.get("model")
    if isinstance(data, dict) and "path" in data:
        made["data"] = {**data, "path": seen(data["path"])}
    if isinstance(model, str) and Path(seen(model)).exists():  # else it is a name, which transformers may know
        made["model"] = seen(model)
    return made
