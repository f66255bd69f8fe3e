"""What goes over the wire: SandboxFusion's requests and answers, and what toolroll adds to them.

Field for field what SandboxFusion speaks, so that either server may stand behind a URL. Everything of ours is
optional: SandboxFusion ignores a field that it doesn't know in a request, and a field that it doesn't send in an answer
has a default here. Text that no UTF-8 can carry (a lone surrogate, which a model can write as a JSON escape) has such
characters replaced by U+FFFD, on both sides: it is the program that is odd, not the service.

    request = RunCodeRequest(code="print(1 + 1)", language="python")
    request.model_dump_json(exclude_none=True)
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Language = Literal[
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket",
]  # fmt: skip
"""Every language that the protocol names. Which of them a server has is its own affair: `GET /v1/languages`."""

SESSION_ID = r"^[A-Za-z0-9._:-]{1,128}$"
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RunStatus(StrEnum):
    """How a request came out. All three come with HTTP 200."""

    SUCCESS = "Success"
    """Everything ran and returned 0."""
    FAILED = "Failed"
    """The program failed: a return code that isn't 0, a signal, or out of time."""
    SANDBOX_ERROR = "SandboxError"
    """The service failed; the program may be as good as any."""


class CommandStatus(StrEnum):
    """How one command (a compiler, a program) came out."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT_EXCEEDED = "TimeLimitExceeded"


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore")

    memory_limit_MB: int = Field(default=-1, le=2**31)  # noqa: N815 (the wire's name)
    """Megabytes over all processes of the program; −1 for the server's own limit."""
    fetch_files: list[str] = []
    """Paths of files to send back after the run. One that isn't there is left out of the answer."""

    deadline: float | None = Field(default=None, allow_inf_nan=False)
    """Ours: Unix time after which nobody waits for the answer. A server that gets to it later refuses with 504."""
    idempotency_key: str | None = Field(default=None, max_length=200)
    """Ours: a request sent again with the same key gets the first one's answer, and isn't run twice."""


class RunCodeRequest(_Request):
    """`POST /run_code`."""

    code: str
    language: Language
    compile_timeout: Seconds = 10
    run_timeout: Seconds = 10
    stdin: str | None = None
    files: dict[str, str | None] = {}
    """Path → content in base64. A relative path is below the program's working directory."""

    session_id: str | None = Field(default=None, pattern=SESSION_ID)
    """Ours: keep the interpreter, with its variables, for the next request that names the same session.

    `DELETE /v1/sessions/{session_id}` ends it.
    """
    show_value: bool = False
    """Ours: where a Python program ends in an expression, write its value to stdout, as a notebook would show it.

    In a session that is always so.
    """


class CommandRunResult(BaseModel):
    """What one command did."""

    status: CommandStatus
    execution_time: float | None = None
    return_code: int | None = None
    """None if it ran out of time; −9 if signal 9 ended it."""
    stdout: str | None = None
    stderr: str | None = None

    cpu_time: float | None = None
    """Ours: seconds on a CPU."""
    stdout_truncated: bool = False
    """Ours: the program wrote more than the server keeps."""
    stderr_truncated: bool = False
    memory_exceeded: bool = False
    """Ours: the program was ended because it reached its memory limit."""


class RunCodeResponse(BaseModel):
    """The answer to `POST /run_code`."""

    status: RunStatus
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}

    queue_time: float | None = None
    """Ours: seconds that the request waited in the server for its turn."""
    session_is_new: bool | None = None
    """Ours: whether the session began with this request. True where one was expected to exist means that it is lost."""
    session_died: bool | None = None
    """Ours: whether a session of this name had ended by its programs' own doing since the request before."""
    session_is_over: bool | None = None
    """Ours: whether the session ended with this request, as where the program killed its own process."""


class RunJupyterRequest(_Request):
    """`POST /run_jupyter`."""

    cells: list[str]
    cell_timeout: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Seconds for each cell; 0 for no limit but the total."""
    total_timeout: Seconds = 45
    kernel: Literal["python3"] = "python3"
    files: dict[str, str] = {}


class CellRunResult(BaseModel):
    """What one cell did."""

    stdout: str
    stderr: str
    display: list[dict[str, Any]]
    """One for each value shown: media type → data; a PNG in base64."""
    error: list[dict[str, Any]]
    """At most one: `ename`, `evalue`, `traceback`."""


class RunJupyterResponse(BaseModel):
    """The answer to `POST /run_jupyter`."""

    status: RunStatus
    message: str = ""
    driver: CommandRunResult | None = None
    cells: list[CellRunResult] = []
    executor_pod_name: str | None = None
    files: dict[str, str] = {}

    queue_time: float | None = None


class Ping(BaseModel):
    """The answer to `GET /v1/ping` of our server. SandboxFusion answers the string "pong"."""

    ping: Literal["pong"] = "pong"
    version: str = ""
    tier: str = ""
    """How programs are isolated: A, B, C, or "unsafe"."""
    running: int = 0
    waiting: int = 0
    capacity: int = 0
    """How many programs run at once; more wait."""
    time: float = 0.0
    """The server's clock: deadlines are held against it."""


class LanguageInfo(BaseModel):
    """One language of `GET /v1/languages`."""

    available: bool
    version: str = ""
    missing: str = ""
    """What to install, where it isn't available."""


Model = TypeVar("Model", bound=BaseModel)


def read(kind: type[Model], body: bytes) -> Model:
    """The request or answer in a body. Raises pydantic's ValidationError for anything else, however odd.

    Lone surrogates are rare, so the fast parser goes first.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] != "json_invalid":
            raise
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise error from None
        try:
            return kind.model_validate(scrub(value))
        except RecursionError:
            raise error from None


def scrub_text(text: str) -> str:
    """The text with its lone surrogates replaced by U+FFFD, and surrogates that form a pair joined."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def scrub(value: Any) -> Any:
    """The same for every text in a JSON value, names among them."""
    match value:
        case str():
            return scrub_text(value)
        case list():
            return [scrub(item) for item in value]
        case dict():
            return {scrub(key): scrub(item) for key, item in value.items()}
    return value
