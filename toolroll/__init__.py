"""toolroll lets a language model call tools while it is trained by reinforcement learning.

The names below are loaded when they are first used, so that `import toolroll` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolroll.errors import ConfigError, Fault, InfraFault, PolicyFault, fault_of
    from toolroll.limiter.limiter import Limiter, LocalLimiter, get_limiter
    from toolroll.rollout.limits import Limits
    from toolroll.rollout.reward import RewardRule
    from toolroll.rollout.rollout import Rollout
    from toolroll.rollout.trajectory import Trajectory
    from toolroll.sandbox.client import SandboxClient
    from toolroll.schemas import Message, OpenAIFunctionToolSchema, ToolCall, ToolResponse
    from toolroll.tools.base_tool import BaseTool, ToolResult, ToolSettings
    from toolroll.tools.function_tool import Hidden, tool
    from toolroll.tools.instance import ToolInstance
    from toolroll.tools.registry import initialize_tools_from_config
    from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool

_HOME = {
    "toolroll.errors": ["ConfigError", "Fault", "InfraFault", "PolicyFault", "fault_of"],
    "toolroll.limiter.limiter": ["Limiter", "LocalLimiter", "get_limiter"],
    "toolroll.rollout.limits": ["Limits"],
    "toolroll.rollout.reward": ["RewardRule"],
    "toolroll.rollout.rollout": ["Rollout"],
    "toolroll.rollout.trajectory": ["Trajectory"],
    "toolroll.sandbox.client": ["SandboxClient"],
    "toolroll.schemas": ["Message", "OpenAIFunctionToolSchema", "ToolCall", "ToolResponse"],
    "toolroll.tools.base_tool": ["BaseTool", "ToolResult", "ToolSettings"],
    "toolroll.tools.function_tool": ["Hidden", "tool"],
    "toolroll.tools.instance": ["ToolInstance"],
    "toolroll.tools.registry": ["initialize_tools_from_config"],
    "toolroll.tools.sandbox_fusion_tool": ["SandboxFusionTool"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BaseTool",
    "ConfigError",
    "Fault",
    "Hidden",
    "InfraFault",
    "Limiter",
    "Limits",
    "LocalLimiter",
    "Message",
    "OpenAIFunctionToolSchema",
    "PolicyFault",
    "RewardRule",
    "Rollout",
    "SandboxClient",
    "SandboxFusionTool",
    "ToolCall",
    "ToolInstance",
    "ToolResponse",
    "ToolResult",
    "ToolSettings",
    "Trajectory",
    "fault_of",
    "get_limiter",
    "initialize_tools_from_config",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # slow to import, and seldom asked for

        return version("toolroll")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'toolroll' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
