"""Configuration of a run, loaded from a YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from yaml import YAMLError

from toolroll.errors import ConfigError, explain, unknown_name, validate
from toolroll.limiter.settings import ResourceLimits
from toolroll.rollout.limits import Limits
from toolroll.tracing.exporter import default_endpoint

ENGINE_CLASSES = {
    "sglang": "toolroll.rollout.engines.sglang.SGLangEngine",
    "vllm": "toolroll.rollout.engines.vllm.VLLMEngine",
    "openai": "toolroll.rollout.engines.openai.OpenAIEngine",
    "transformers": "toolroll.rollout.engines.transformers_engine.TransformersEngine",
}
TrackerName = Literal["mlflow", "tensorboard", "trackio", "wandb"]
SERVER_KINDS = ("sglang", "vllm", "openai")
"""Engines that are servers, with URLs."""
PATH_SETTINGS = (
    (None, "tools"),
    (None, "rollout_data_dir"),
    (None, "model"),
    (None, "replay"),
    ("replay", "directory"),
    ("data", "path"),
)
"""Section and name of the settings that are paths. `model` may be a name instead, and `replay` a mapping."""


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
    limits: ResourceLimits | None = None
    """Limits of the requests to the servers: concurrent requests, rates and budgets. The cost of a request are its
    tokens. A custom engine class gets them as the keyword argument `limits`."""

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
        if self.kind == "transformers" and self.limits is not None:
            raise ValueError("limits apply to servers only: remove them, or use another kind of engine")
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
    """Reward function with settings. All other keys are passed to the function as keyword arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    path: str
    """Dotted path of the function."""
    limits: ResourceLimits | None = None
    """Limits of the function's calls. The default name of the resource is the name of the function in the config."""


class RewardsConfig(_StrictModel):
    """Composition of the rewards. See `RewardRule`."""

    steps: float = 1.0
    """Weight of the tools' step rewards."""
    tools: dict[str, float] = Field(default_factory=dict)
    """Weight of each tool's `calc_reward`, by tool name."""
    functions: dict[str, str | FunctionConfig] = Field(default_factory=dict)
    """Reward functions of the trajectory, by name: a dotted path such as `my.module.correct`, or a mapping with `path`,
    `limits` and keyword arguments."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward function, by name."""
    solved_at: float = 1.0
    """Total reward from which a trajectory counts as solved, for pass@k."""


class ReplayConfig(_StrictModel):
    """Recorded run whose tool results and tokens are used again."""

    directory: str
    """The `rollout_data_dir` of the recorded run."""
    on_miss: Literal["error", "call"] = "error"
    """What happens if a tool call was not recorded: `error` fails the sample, `call` calls the tool."""
    engine: bool = True
    """Whether the sampled tokens come from the records, too. If false, the engine samples."""


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
    replay: ReplayConfig | None = None
    """Recorded run to replay: its directory, or a mapping with `directory`, `on_miss` and `engine`."""
    cluster: str | None = None
    """Ray cluster: its address, or `auto` for the cluster of this machine, which is started if there is none. Default:
    run in this process."""
    workers: int | None = Field(default=None, ge=1)
    """Number of workers on a cluster. Default: one per node."""
    tracker: list[TrackerName] = Field(default_factory=list)
    """Experiment tracker for the run's metrics, or a list: `mlflow`, `tensorboard`, `trackio` or `wandb`."""
    tracing: str | None = None
    """URL of an OpenTelemetry collector, which receives a trace of each trajectory. `true` for the collector that
    `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` names, or else the one of this machine."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port on which the run exports Prometheus metrics, at `/metrics`."""
    metrics_host: str = "127.0.0.1"
    """Address on which the run exports Prometheus metrics."""

    @field_validator("tracker", mode="before")
    @classmethod
    def _list_one_tracker(cls, tracker: Any) -> Any:
        return [tracker] if isinstance(tracker, str) else tracker

    @field_validator("tracing", mode="before")
    @classmethod
    def _resolve_collector(cls, tracing: Any) -> Any:
        # Here, because the workers of a cluster do not have the environment of this process.
        return {True: default_endpoint(), False: None}[tracing] if isinstance(tracing, bool) else tracing

    @field_validator("replay", mode="before")
    @classmethod
    def _read_replay(cls, value: Any) -> Any:
        return {"directory": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_replay(self) -> Self:
        if self.replay is None:
            return self
        if Path(self.replay.directory).resolve() == Path(self.rollout_data_dir).resolve():
            raise ValueError("replay is the directory of this run: set rollout_data_dir to another one")
        if self.replay.engine and self.engine.kind == "openai":
            raise ValueError("replay.engine: records of a chat server have no tokens, so set replay.engine=false")
        return self

    @property
    def model_name(self) -> str | None:
        """Name or directory of the model that samples. A chat server (`openai`) does not use `model`."""
        return self.engine.model if self.engine.kind == "openai" else self.model or self.engine.model

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Load a config file.

        Relative paths in the file are resolved against the file's directory, those in overrides against the working
        directory. Interpolations such as `${oc.env:NAME,default}` are resolved after the overrides are applied.

        Args:
            path: YAML file.
            overrides: Settings that take precedence over the file, as `key=value`, with dots for nested keys.

        Returns:
            The validated config, with absolute paths.

        Raises:
            ConfigError: If the file cannot be read or a setting is invalid.
        """
        file = Path(path)
        with _reading(file):
            from_file, from_overrides = OmegaConf.load(file), OmegaConf.from_dotlist(list(overrides))
            if not isinstance(from_file, DictConfig):
                raise ValueError("Expected a mapping, got a list.")
            merged: Any = OmegaConf.to_container(OmegaConf.merge(from_file, from_overrides), resolve=True)
            settings = {str(key): value for key, value in merged.items()}
            _make_paths_absolute(settings, OmegaConf.to_container(from_overrides), file.parent)
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise ConfigError(f"{file}: {explain(error, setting_fields(cls))}") from error


def load_rewards_config(path: str | Path) -> RewardsConfig:
    """Load the section `rewards` of a run's config file. The other sections may be incomplete.

    Args:
        path: YAML file.

    Returns:
        The validated section.

    Raises:
        ConfigError: If the file cannot be read, has no such section or a setting in it is invalid.
    """
    with _reading(Path(path)):
        config = OmegaConf.load(path)
        section = OmegaConf.to_container(config.rewards, resolve=True) if "rewards" in config else None
    if section is None:
        raise ConfigError(f"{path}: Missing key 'rewards'. Add a section with reward functions.")
    return validate(RewardsConfig, section, f"{path}: rewards")


def setting_fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return the fields of all settings by key, with dots for nested ones."""
    fields = {}
    for name, field in model.model_fields.items():
        fields[prefix + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= setting_fields(field.annotation, f"{prefix}{name}.")
    return fields


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise ConfigError for the errors of reading a YAML file."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"Config file not found: {file}.") from None
    except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {file}: {str(error).splitlines()[0]}") from error


def _make_paths_absolute(settings: dict[str, Any], overrides: Any, directory: Path) -> None:
    """Make all paths absolute, since workers may have other working directories."""
    for section, name in PATH_SETTINGS:
        values, overridden = (one if section is None else one.get(section) for one in (settings, overrides))
        if not isinstance(values, dict) or name not in values:
            continue
        base = Path() if isinstance(overridden, dict) and name in overridden else directory
        path = _absolute(values[name], base)
        if name != "model" or (isinstance(path, str) and Path(path).exists()):  # else it is a Hugging Face name
            values[name] = path


def _absolute(path: Any, directory: Path) -> Any:
    if isinstance(path, list):
        return [_absolute(one, directory) for one in path]
    return str((directory / Path(path).expanduser()).absolute()) if isinstance(path, str) else path
