"""Tool calling for RL rollouts of language models.

Import public names from here. Each name is loaded on first use, so that `import toolroll` stays fast and imports
neither Ray nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolroll.errors import (
        BudgetExhausted,
        ConfigError,
        DuplicateInstance,
        EngineRefused,
        EngineUnavailable,
        Fault,
        InfraFault,
        InvalidArguments,
        LimiterUnavailable,
        MissingExtra,
        PolicyFault,
        ReplayMiss,
        RunFailed,
        SandboxRefused,
        SandboxUnavailable,
        SlotTimeout,
        ToolContractError,
        ToolrollError,
        UserCodeError,
        fault_of,
    )
    from toolroll.limiter.execution import ExecutionWorker, PoolMode, init_execution_pool
    from toolroll.limiter.limited import charge, limited
    from toolroll.limiter.limiter import Limiter, LocalLimiter
    from toolroll.limiter.registry import get_limiter
    from toolroll.limiter.settings import LimitRange, ResourceLimits
    from toolroll.limiter.slot import Slot
    from toolroll.records.reader import read_records
    from toolroll.records.recording import RecordDirectory
    from toolroll.records.writer import RecordWriter
    from toolroll.rewards.cases import read_cases
    from toolroll.rewards.grader import CodeGrader, GraderSettings
    from toolroll.rollout.distributed.rollout_workers import RolloutWorkers
    from toolroll.rollout.engines.base import (
        ChatEngine,
        ChatReply,
        FinishType,
        Generation,
        GenerationTimings,
        TokenEngine,
    )
    from toolroll.rollout.engines.openai import OpenAIEngine
    from toolroll.rollout.engines.scripted import ScriptedEngine
    from toolroll.rollout.engines.sglang import SGLangEngine
    from toolroll.rollout.engines.transformers_engine import TransformersEngine
    from toolroll.rollout.engines.vllm import VLLMEngine
    from toolroll.rollout.gc_tuning import infrequent_full_gc
    from toolroll.rollout.limits import Limits
    from toolroll.rollout.prompt import Prompt
    from toolroll.rollout.replay.recording import RecordedTrajectory, Recording, Replay
    from toolroll.rollout.reward import RewardRule
    from toolroll.rollout.rollout import Rollout
    from toolroll.rollout.trajectory import Fidelity, FinishReason, Rewards, Trajectory
    from toolroll.run.config import RunConfig
    from toolroll.run.run import Run
    from toolroll.sandbox.client import SandboxClient
    from toolroll.sandbox.server.server import SandboxServer
    from toolroll.sandbox.server.settings import ServerSettings
    from toolroll.schemas import FunctionCall, Message, OpenAIFunctionToolSchema, ToolCall, ToolResponse
    from toolroll.tools.base_tool import BaseTool, ToolResult, ToolSettings
    from toolroll.tools.cache_settings import CacheSettings
    from toolroll.tools.function_tool import Hidden, tool
    from toolroll.tools.gsm8k_tool import Gsm8kTool
    from toolroll.tools.instance import ToolInstance
    from toolroll.tools.registry import initialize_tools_from_config
    from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool
    from toolroll.tracing.context import trace_headers
    from toolroll.tracing.exporter import Tracing, start_tracing

_NAMES_BY_MODULE = {
    "errors": (
        "BudgetExhausted ConfigError DuplicateInstance EngineRefused EngineUnavailable Fault InfraFault "
        "InvalidArguments LimiterUnavailable MissingExtra PolicyFault ReplayMiss RunFailed SandboxRefused "
        "SandboxUnavailable SlotTimeout ToolContractError ToolrollError UserCodeError fault_of"
    ),
    "limiter.execution": "ExecutionWorker PoolMode init_execution_pool",
    "limiter.limited": "charge limited",
    "limiter.limiter": "Limiter LocalLimiter",
    "limiter.registry": "get_limiter",
    "limiter.settings": "LimitRange ResourceLimits",
    "limiter.slot": "Slot",
    "records.reader": "read_records",
    "records.recording": "RecordDirectory",
    "records.writer": "RecordWriter",
    "rewards.cases": "read_cases",
    "rewards.grader": "CodeGrader GraderSettings",
    "rollout.distributed.rollout_workers": "RolloutWorkers",
    "rollout.engines.base": "ChatEngine ChatReply FinishType Generation GenerationTimings TokenEngine",
    "rollout.engines.openai": "OpenAIEngine",
    "rollout.engines.scripted": "ScriptedEngine",
    "rollout.engines.sglang": "SGLangEngine",
    "rollout.engines.transformers_engine": "TransformersEngine",
    "rollout.engines.vllm": "VLLMEngine",
    "rollout.gc_tuning": "infrequent_full_gc",
    "rollout.limits": "Limits",
    "rollout.prompt": "Prompt",
    "rollout.replay.recording": "RecordedTrajectory Recording Replay",
    "rollout.reward": "RewardRule",
    "rollout.rollout": "Rollout",
    "rollout.trajectory": "Fidelity FinishReason Rewards Trajectory",
    "run.config": "RunConfig",
    "run.run": "Run",
    "sandbox.client": "SandboxClient",
    "sandbox.server.server": "SandboxServer",
    "sandbox.server.settings": "ServerSettings",
    "schemas": "FunctionCall Message OpenAIFunctionToolSchema ToolCall ToolResponse",
    "tools.base_tool": "BaseTool ToolResult ToolSettings",
    "tools.cache_settings": "CacheSettings",
    "tools.function_tool": "Hidden tool",
    "tools.gsm8k_tool": "Gsm8kTool",
    "tools.instance": "ToolInstance",
    "tools.registry": "initialize_tools_from_config",
    "tools.sandbox_fusion_tool": "SandboxFusionTool",
    "tracing.context": "trace_headers",
    "tracing.exporter": "Tracing start_tracing",
}
_MODULE_BY_EXPORT = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__all__ = [
    "BaseTool", "BudgetExhausted", "CacheSettings", "ChatEngine", "ChatReply", "CodeGrader", "ConfigError",
    "DuplicateInstance", "EngineRefused", "EngineUnavailable", "ExecutionWorker", "Fault", "Fidelity", "FinishReason",
    "FinishType", "FunctionCall", "Generation", "GenerationTimings", "GraderSettings", "Gsm8kTool", "Hidden",
    "InfraFault", "InvalidArguments", "LimitRange", "Limiter", "LimiterUnavailable", "Limits", "LocalLimiter",
    "Message", "MissingExtra", "OpenAIEngine", "OpenAIFunctionToolSchema", "PolicyFault", "PoolMode", "Prompt",
    "RecordDirectory", "RecordWriter", "RecordedTrajectory", "Recording", "Replay", "ReplayMiss", "ResourceLimits",
    "RewardRule", "Rewards", "Rollout", "RolloutWorkers", "Run", "RunConfig", "RunFailed", "SGLangEngine",
    "SandboxClient", "SandboxFusionTool", "SandboxRefused", "SandboxServer", "SandboxUnavailable", "ScriptedEngine",
    "ServerSettings", "Slot", "SlotTimeout", "TokenEngine", "ToolCall", "ToolContractError", "ToolInstance",
    "ToolResponse", "ToolResult", "ToolSettings", "ToolrollError", "Tracing", "Trajectory", "TransformersEngine",
    "UserCodeError", "VLLMEngine", "charge", "fault_of", "get_limiter", "infrequent_full_gc", "init_execution_pool",
    "initialize_tools_from_config", "limited", "read_cases", "read_records", "start_tracing", "tool", "trace_headers",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # importing it is slow, and the version is rarely needed

        return version("toolroll")
    if name not in _MODULE_BY_EXPORT:
        raise AttributeError(f"module 'toolroll' has no attribute {name!r}")
    return getattr(import_module(f"toolroll.{_MODULE_BY_EXPORT[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
