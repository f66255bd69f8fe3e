"""SandboxFusionTool: the model writes a program, and reads what it did.

Behind `sandbox_fusion_url` stands `toolroll sandbox serve` or a SandboxFusion, one or several. What the program does,
well or badly, is the model's own: it is told in the tool's answer. What befalls the program (the sandbox is down, full,
or answers nonsense; no slot comes free) is raised as InfraFault, after retries, by the call's deadline. All calls of
all processes of the cluster are within one limit (runner.py), which the rewards share.

With `stateful: true` every trajectory has an interpreter of its own, which remembers (interpreter.py).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, get_args

from pydantic import BeforeValidator, Field, model_validator

from toolroll.errors import PolicyFault, SandboxRefused, did_you_mean
from toolroll.rewards.fence import language_of, unfence
from toolroll.runner import CodeRunner, Ran, RunnerSettings
from toolroll.sandbox.protocol import Language
from toolroll.schemas import ToolResponse
from toolroll.tools.base_tool import BaseTool, ToolResult, ToolSettings
from toolroll.tools.interpreter import Interpreter, Server
from toolroll.tools.transcript import transcript

MOST_CODE = 1_000_000
"""Characters of a program. A sandbox refuses requests that are far longer, and the model must not bring that about."""
LANGUAGES = get_args(Language)


class SandboxFusionSettings(ToolSettings, RunnerSettings):
    """What stands under `config`. `num_workers`, `rate_limit` and the like are RunnerSettings."""

    default_timeout: float = Field(default=30, gt=0, allow_inf_nan=False)
    """Seconds for each program."""
    default_language: Annotated[Language, BeforeValidator(language_of)] = "python"
    stateful: bool = False
    """Whether variables last from one call of a trajectory to the next. Python only."""

    @model_validator(mode="after")
    def _only_python_remembers(self) -> SandboxFusionSettings:
        if self.stateful and self.default_language != "python":
            raise ValueError(f"stateful needs default_language 'python', not {self.default_language!r}")
        return self


class SandboxFusionTool(BaseTool[Interpreter | None]):
    """Runs the model's code in a sandbox.

    A schema of your own may have `language` and `timeout` beside `code`; then the model may choose them, the time up to
    `default_timeout`. What the schema doesn't have is ignored.
    """

    default_schema: ClassVar = {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "A tool for executing code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to execute."}},
                "required": ["code"],
            },
        },
    }

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.settings = SandboxFusionSettings.read(self.config)
        self._runner = CodeRunner(self.settings)
        self._offered = set(self.tool_schema.function.parameters.properties or ())
        self._server = Server()

    @property
    def resource(self) -> str:
        """What its limit is of, by the name that `toolroll limiter status` shows."""
        return self._runner.resource

    def new_state(self, **_: Any) -> Interpreter | None:
        # Whatever else the data set's row has is for other tools.
        return Interpreter(self._runner, self._server) if self.settings.stateful else None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, deadline: float | None = None, **kwargs: Any
    ) -> ToolResult:
        """Run `code`. `deadline` is on the clock of `time.monotonic()`."""
        interpreter = self.state(instance_id)
        code, language, seconds = self._asked(parameters)
        try:
            if interpreter is not None:
                ran = await interpreter.run(code, run_timeout=seconds, deadline=deadline)
            else:
                show = language == "python"
                ran = await self._runner.run(code, language, run_timeout=seconds, show_value=show, deadline=deadline)
        except SandboxRefused as error:
            # Of all that a sandbox may refuse, a language that it hasn't is the one that the model can choose.
            if language != self.settings.default_language and await self._runner.has(language) is False:
                raise PolicyFault(f"This sandbox can't run {language}. Use another language.") from error
            raise
        text = transcript(ran.execution, run_timeout=ran.run_timeout, memory_limit_mb=self.settings.memory_limit_mb)
        return ToolResult(ToolResponse(text=text), None, _metrics(ran))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        interpreter = self.instances.pop(instance_id, None)
        if interpreter is not None:
            await interpreter.end()

    def _asked(self, parameters: dict[str, Any]) -> tuple[str, str, float]:
        """The program, its language and its seconds. What the model asks for can't make the sandbox refuse it."""
        code = unfence(str(parameters.get("code", "")))
        if len(code) > MOST_CODE:
            raise PolicyFault(f"The program has {len(code)} characters; {MOST_CODE} are the most.")
        chosen = {name: value for name, value in parameters.items() if name in self._offered}
        language = language_of(str(chosen.get("language", self.settings.default_language)))
        if language not in LANGUAGES:
            raise PolicyFault(f"There is no language {language!r:.40}{did_you_mean(language, LANGUAGES)}.")
        if self.settings.stateful and language != "python":
            raise PolicyFault("This interpreter is Python's.")
        seconds = self.settings.default_timeout
        asked = chosen.get("timeout")
        if isinstance(asked, int | float) and 0 < asked < seconds:
            seconds = float(asked)
        return code, language, seconds


def _metrics(ran: Ran) -> dict[str, Any]:
    execution = ran.execution
    return {
        "outcome": str(execution.outcome),
        "exit_status": execution.return_code,
        "queue_wait": ran.waited,
        "sandbox_wait": execution.queue_time,
        "execution_time": execution.execution_time,
        "attempts": execution.attempts,
        "stdout_bytes": len(execution.stdout.encode()),
        "stderr_bytes": len(execution.stderr.encode()),
        "truncated": execution.stdout_truncated or execution.stderr_truncated,
    }
