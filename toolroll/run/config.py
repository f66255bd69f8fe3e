"""Configuration of a run, loaded from a YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from yaml import YAMLError

from toolroll.errors import ConfigError, explain, unknown_name
from toolroll.rollout.limits import Limits

ENGINE_CLASSES = {
    "sglang": "toolroll.rollout.engines.sglang.SGLangEngine",
    "vllm": "toolroll.rollout.engines.vllm.VLLMEngine",
    "openai": "toolroll.rollout.engines.openai.OpenAIEngine",
    "transformers": "toolroll.rollout.engines.transformers_engine.TransformersEngine",
}
SERVER_KINDS = ("sglang", "vllm", "openai")
"""Engines that are servers, with URLs."""
PATH_SETTINGS = ("tools", "rollout_data_dir")
"""Top-level settings that are paths."""


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineConfig(_StrictModel):
    """Inference engine of a run."""

    kind: str = "sglang"
    """`sglang`, `vllm`, `openai`, `transformers` to run the model in this process, or the dotted path of an engine
    class, e.g. `my.module.MyEngine`."""
    urls: str | list[str] = Field(default_factory=list)
    """URL of the server, or a list of URLs. Not needed for `transformers`."""
    model: str | None = None
    """Name of the model on the server. Required for `openai`, and for `vllm` if the server has several models."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the engine class, e.g. `max_connections`."""

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in ENGINE_CLASSES and "." not in kind:
            raise ValueError(unknown_name("engine", kind, ENGINE_CLASSES).rstrip("."))
        return kind

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        if self.kind in SERVER_KINDS and not self.urls:
            raise ValueError(f"urls is missing: set the address of the {self.kind} server")
        return self


class DataConfig(_StrictModel):
    """Data files of a run, and the meaning of their columns."""

    path: str | list[str]
    """File (JSON lines, Parquet, Arrow), directory of such files or saved `datasets` data set, or a list of these."""
    prompt: str = "prompt"
    """Column with the prompt: a text or a list of messages."""
    ground_truth: str | None = None
    """Column with the expected answer. Reward functions read it as `trajectory.extra["ground_truth"]`."""
    tools_kwargs: str | dict[str, dict[str, dict[str, Any]]] | None = None
    """Column with the tools' keyword arguments; or a template, in which `{column: NAME}` is replaced by the row's
    value."""
    system: str | None = None
    """System message for prompts that have none."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of rows to load."""


class FunctionConfig(BaseModel):
    """Reward function with settings. All keys other than `path` are passed to the function as keyword arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    path: str
    """Dotted path of the function."""


class RewardsConfig(_StrictModel):
    """Composition of the rewards. See `RewardRule`."""

    steps: float = 1.0
    """Weight of the tools' step rewards."""
    tools: dict[str, float] = Field(default_factory=dict)
    """Weight of each tool's `calc_reward`, by tool name."""
    functions: dict[str, str | FunctionConfig] = Field(default_factory=dict)
    """Reward functions of the trajectory, by name: a dotted path such as `my.module.correct`, or a mapping with `path`
    and keyword arguments."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward function, by name."""
    solved_at: float = 1.0
    """Total reward from which a trajectory counts as solved, for pass@k."""


class RunConfig(_StrictModel):
    """Configuration of a run.

    Example:
        ```python
        from toolroll import RunConfig

        config = RunConfig.load("run.yaml", ["n=8", "sampling_params.temperature=0.7"])
        ```
    """

    engine: EngineConfig
    """Inference engine."""
    model: str | None = None
    """Directory or Hugging Face name of the model, whose tokenizer is loaded. Not needed for the `openai` engine."""
    model_format: str | None = None
    """Chat format of the model. Default: found by its chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the chat template."""
    tool_prompt: Literal["hermes"] | None = None
    """`hermes` for a model whose chat template does not show tools: the system message lists them."""
    thinking: Literal["keep", "strip"] | None = None
    """Whether the reasoning of earlier turns stays in the prompt. Default: as the chat template does it."""
    tools: str | None = None
    """Path of a tool config."""
    data: DataConfig
    """Prompts."""
    n: int = Field(default=1, ge=1)
    """Number of samples per prompt."""
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters, as the engine names them."""
    limits: Limits = Field(default_factory=Limits)
    """Limits of each trajectory."""
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    """Composition of the rewards."""
    rollout_data_dir: str
    """Directory of the records. A run that was interrupted resumes from the records in it."""
    retry: Literal["infra", "none"] = "infra"
    """Which samples a resumed run attempts again: those that failed because of the infrastructure, or `none`."""
    prompts_per_step: int = Field(default=1024, ge=1)
    """Number of prompts per record file `{step}.jsonl`."""
    record_tokens: bool = True
    """Record token ids and log-probabilities."""
    max_in_flight: int = Field(default=256, ge=1)
    """Maximum number of concurrent trajectories per worker."""
    cluster: str | None = None
    """Ray cluster: its address, or `auto` for the cluster of this machine, which is started if there is none. Default:
    run in this process."""
    workers: int | None = Field(default=None, ge=1)
    """Number of workers on a cluster. Default: one per node."""

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Load a config file.

        Relative paths in the file are resolved against the file's directory, those in overrides against the working
        directory. omegaconf resolves interpolations such as `${oc.env:NAME,default}`.

        Args:
            path: YAML file.
            overrides: Settings that take precedence over the file, as `key=value`, with dots for nested keys.

        Returns:
            The validated config, with absolute paths.

        Raises:
            ConfigError: If the file cannot be read or a setting is invalid.
        """
        file = Path(path)
        try:
            from_file = _resolve(OmegaConf.load(file), file.parent)
            from_overrides = _resolve(OmegaConf.from_dotlist(list(overrides)), Path())
            settings = OmegaConf.to_container(OmegaConf.merge(from_file, from_overrides), resolve=True)
        except FileNotFoundError:
            raise ConfigError(f"Config file not found: {file}.") from None
        except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            raise ConfigError(f"Cannot read {file}: {str(error).splitlines()[0]}") from error
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise ConfigError(f"{file}: {explain(error, setting_fields(cls))}") from error


def setting_fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return the fields of all settings by key, with dots for nested ones."""
    fields = {}
    for name, field in model.model_fields.items():
        fields[prefix + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= setting_fields(field.annotation, f"{prefix}{name}.")
    return fields


def _resolve(config: Any, directory: Path) -> dict[str, Any]:
    """Return the settings of a config, with absolute paths, since workers may have other working directories."""
    settings = OmegaConf.to_container(config, resolve=True)
    if not isinstance(settings, dict):
        raise ValueError(f"Expected a mapping, got {type(settings).__name__}.")

    def absolute(path: Any) -> Any:
        if isinstance(path, list):
            return [absolute(one) for one in path]
        return str((directory / Path(path).expanduser()).absolute()) if isinstance(path, str) else path

    resolved = {str(key): absolute(value) if key in PATH_SETTINGS else value for key, value in settings.items()}
    data, model = settings.get("data"), settings.get("model")
    if isinstance(data, dict) and "path" in data:
        resolved["data"] = {**data, "path": absolute(data["path"])}
    if isinstance(model, str) and Path(absolute(model)).exists():  # else it is a Hugging Face name
        resolved["model"] = absolute(model)
    return resolved
