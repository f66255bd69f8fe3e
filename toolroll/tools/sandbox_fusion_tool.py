"""SandboxFusionTool: the code interpreter. The model writes a program and reads its output.

`sandbox_fusion_url` names one or several servers, either `toolroll sandbox serve` or SandboxFusion. A failure of the
program is part of the response that the model reads. A failure of the sandbox, such as an overloaded server or no free
slot, raises InfraFault after retries, by the deadline of the call. All processes of the cluster share one limit with
each other and with the reward functions (see `toolroll.sandbox.limited`).

With `stateful: true`, variables last from one call of a trajectory to the next (see `toolroll.tools.interpreter`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, get_args

from pydantic import BeforeValidator, Field, model_validator

from toolroll._internal.code_fences import canonical_language, strip_code_fence
from toolroll.errors import PolicyFault, SandboxRefused, unknown_name
from toolroll.sandbox.execution import ExecutionOutcome
from toolroll.sandbox.limited import LimitedSandbox, LimitedSandboxSettings, RunResult
from toolroll.sandbox.protocol import Language
from toolroll.schemas import ToolResponse, text_function_schema
from toolroll.tools.base_tool import BaseTool, ToolResult, ToolSettings
from toolroll.tools.interpreter import InterpreterSession
from toolroll.tools.transcript import transcript

MAX_CODE_CHARS = 1_000_000
"""Maximum length of a program. It is below the sandbox's limit, so the model cannot cause the sandbox to reject it."""
LANGUAGES = get_args(Language)


class SandboxFusionSettings(ToolSettings, LimitedSandboxSettings):
    """Settings under `config`. `LimitedSandboxSettings` has those that the reward functions share."""

    default_timeout: float = Field(default=30, gt=0, allow_inf_nan=False)
    """Time limit of a program, in seconds."""
    default_language: Annotated[Language, BeforeValidator(canonical_language)] = "python"
    """Language of programs, unless the schema lets the model choose it."""
    stateful: bool = False
    """Whether variables last from one call of a trajectory to the next. Python only."""

    @model_validator(mode="after")
    def _require_python_if_stateful(self) -> SandboxFusionSettings:
        if self.stateful and self.default_language != "python":
            raise ValueError(f"stateful requires default_language 'python', got {self.default_language!r}")
        return self


class SandboxFusionTool(BaseTool[InterpreterSession | None]):
    """Runs the model's programs in a sandbox.

    A custom schema may have the parameters `language` and `timeout` in addition to `code`. The model can then choose
    the language, and a time limit of at most `default_timeout`. Parameters that the schema does not have are ignored.

    Args:
        config: Settings, see `SandboxFusionSettings`. `sandbox_fusion_url` is required.
        tool_schema: Schema of the tool. By default, a function `code_interpreter` with the parameter `code`.

    Raises:
        ConfigError: If a setting or the schema is invalid.

    Example:
        >>> tool = SandboxFusionTool({"sandbox_fusion_url": "http://127.0.0.1:8080", "stateful": True})
        >>> tool.name
        'code_interpreter'
    """

    service_settings = frozenset({"sandbox_fusion_url", "rate_limit", "num_workers", "enable_global_rate_limit"})
    default_schema: ClassVar = text_function_schema(
        "code_interpreter", "A tool for executing code.", code="The code to execute."
    )

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.settings = SandboxFusionSettings.read(self.config)
        self._sandbox = LimitedSandbox(self.settings)
        self._schema_parameters = set(self.tool_schema.function.parameters.properties or ())

    @property
    def resource(self) -> str:
        """Name of the limited resource, as `toolroll limiter status` shows it."""
        return self._sandbox.resource

    @property
    def keeps_state(self) -> bool:
        """True if variables last from one call to the next."""
        return self.settings.stateful

    def new_state(self, **_: Any) -> InterpreterSession | None:
        """Return an interpreter session if the tool is stateful.

        Args:
            _: Columns of the dataset, which are ignored.
        """
        return InterpreterSession(self._sandbox) if self.settings.stateful else None

    def unreachable_s(self) -> float | None:
        """Return for how long no sandbox has answered, in seconds, or None if one answers."""
        return self._sandbox.unreachable_s()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, deadline: float | None = None, **kwargs: Any
    ) -> ToolResult:
        """Run a program.

        Args:
            instance_id: Id of the instance.
            parameters: The `code`, and `language` and `timeout` if the schema has them.
            deadline: Time by which the result must be available, on the clock of `time.monotonic()`.
            **kwargs: Ignored.

        Returns:
            The output of the program, and metrics.

        Raises:
            PolicyFault: If the program is too long or its language is not available.
            InfraFault: If the sandbox failed or no slot became free.
        """
        session = self.state(instance_id)
        code, language, run_timeout = self._read_request(parameters)
        try:
            if session is not None:
                result = await session.run(code, run_timeout=run_timeout, deadline=deadline)
            else:
                options: dict[str, Any] = {"run_timeout": run_timeout, "show_value": language == "python"}
                result = await self._sandbox.run(code, language, **options, deadline=deadline)
        except SandboxRefused as error:
            # The only rejection that the model can cause is that of a language that the sandbox does not have.
            if language != self.settings.default_language and await self._sandbox.has(language) is False:
                raise PolicyFault(f"The sandbox does not support {language}. Use another language.") from error
            raise
        text = transcript(result.execution, result.run_timeout, self.settings.memory_limit_mb)
        return ToolResult(ToolResponse(text=text), None, _metrics(result))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release an instance and end its interpreter session.

        Args:
            instance_id: Id of the instance.
            **kwargs: Ignored.
        """
        if session := self.instances.pop(instance_id, None):
            await session.close()

    def _read_request(self, parameters: dict[str, Any]) -> tuple[str, str, float]:
        """Return the code, the language and the time limit of a call, such that the sandbox does not reject them."""
        code = strip_code_fence(str(parameters.get("code", "")))
        if len(code) > MAX_CODE_CHARS:
            raise PolicyFault(f"The program is too long: {len(code)} characters. The maximum is {MAX_CODE_CHARS}.")
        chosen = {name: value for name, value in parameters.items() if name in self._schema_parameters}
        language = canonical_language(str(chosen.get("language", self.settings.default_language)))
        if language not in LANGUAGES:
            raise PolicyFault(unknown_name("language", language, LANGUAGES))
        if self.settings.stateful and language != "python":
            raise PolicyFault("This interpreter only supports Python.")
        run_timeout = self.settings.default_timeout
        requested = chosen.get("timeout")
        if isinstance(requested, int | float) and 0 < requested < run_timeout:
            run_timeout = float(requested)
        return code, language, run_timeout


def _metrics(result: RunResult) -> dict[str, Any]:
    execution = result.execution
    metrics = {
        "outcome": str(execution.outcome),
        "exit_status": execution.return_code,
        "queue_wait": result.waited,
        "sandbox_wait": execution.queue_time,
        "execution_time": execution.execution_time,
        "attempts": execution.attempts,
        "stdout_bytes": len(execution.stdout.encode()),
        "stderr_bytes": len(execution.stderr.encode()),
        "truncated": execution.stdout_truncated or execution.stderr_truncated,
    }
    if execution.outcome is ExecutionOutcome.TIMEOUT and result.is_shortened:
        metrics["ended_by_deadline"] = True
    return metrics
