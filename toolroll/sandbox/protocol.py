"""Requests and responses of a sandbox: the protocol of SandboxFusion, with extensions by toolroll.

Clients and servers of both projects work with each other. All fields that toolroll adds are optional: SandboxFusion
ignores unknown fields of a request, and fields missing from its responses have defaults here. Lone surrogates, which
models write as JSON escapes and which UTF-8 cannot encode, are replaced by U+FFFD on both sides.

    request = RunCodeRequest(code="print(1 + 1)", language="python")
    request.model_dump_json(exclude_none=True)
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolroll._internal.text import replace_lone_surrogates_in_json

Language = Literal[
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket",
]  # fmt: skip
"""All languages of the protocol. `GET /v1/languages` lists those that a server has."""

LANGUAGE_BY_SUFFIX: dict[str, Language] = {
    ".py": "python", ".sh": "bash", ".cpp": "cpp", ".cc": "cpp", ".js": "nodejs", ".ts": "typescript", ".java": "java",
    ".rs": "rust", ".go": "go", ".pl": "perl", ".rb": "ruby", ".php": "php", ".lua": "lua", ".r": "R", ".sql": "sql",
    ".jl": "julia", ".scala": "scala", ".swift": "swift", ".rkt": "racket", ".kts": "kotlin_script",
}  # fmt: skip
"""Language of a source file, by the suffix of its name in lower case."""
TOKEN_ENV_VAR = "TOOLROLL_SANDBOX_TOKEN"  # noqa: S105 (a name, not a token)
"""Environment variable that holds the bearer token, for servers and clients."""

WALL_TIME_FACTOR, WALL_TIME_MARGIN_S = 2, 1.0
FULL_TIME_FRACTION = 0.9
"""A timeout is attributed to the program only if it had at least this fraction of its time."""

DEADLINE_HEADER = "X-Toolroll-Deadline"
"""Header of a request: the same as the field `deadline`, but not part of the content that an idempotency key is for."""
LEASE_HEADER = "X-Toolroll-Lease"
"""Header of a request: token of the limiter's lease by which the request is sent, as "holder/number".

`POST /v1/holders/{holder}/fence` rejects the requests of a holder's leases up to a number with `LEASE_LOST_STATUS`.
"""
GRANTED_HEADER = "X-Toolroll-Granted"
"""Header of a request with a lease: Unix time by the server's clock at which the slot was granted. A server that has
started later does not know whether the lease was fenced, and rejects the request with `LEASE_LOST_STATUS`."""
LATE_STATUS = 504
"""HTTP status of a request without a lease that arrived after its deadline."""
LEASE_LOST_STATUS = 412
"""HTTP status of a request whose lease was fenced, or that arrived after its deadline. The program was not run; the
client must acquire another slot."""

SESSION_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def max_wall_time(timeout: float) -> float:
    """Return the maximum run time in seconds of a program that sleeps or waits.

    A timeout limits the CPU time of a program. A program that uses no CPU time may take longer.
    """
    return WALL_TIME_FACTOR * timeout + WALL_TIME_MARGIN_S


def timeout_within(wall_time: float) -> float:
    """Return the timeout of a program that must end within `wall_time` seconds: the inverse of `max_wall_time`."""
    return max(wall_time / (2 * WALL_TIME_FACTOR), (wall_time - WALL_TIME_MARGIN_S) / WALL_TIME_FACTOR)


class RunStatus(StrEnum):
    """Result of a request. The HTTP status is 200 in all cases."""

    SUCCESS = "Success"
    """All commands returned 0."""
    FAILED = "Failed"
    """The program failed: non-zero return code, signal, or timeout."""
    SANDBOX_ERROR = "SandboxError"
    """The sandbox failed. The program may be correct."""


class CommandStatus(StrEnum):
    """Result of one command, such as a compiler or a program."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT_EXCEEDED = "TimeLimitExceeded"


class _SandboxRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    memory_limit_MB: int = Field(default=-1, le=2**31)  # noqa: N815 (the wire's name)
    """Memory limit over all processes of the program, in megabytes. -1 for the server's limit."""
    fetch_files: list[str] = []
    """Paths of files to return after the run. Missing files are omitted from the response."""

    wall_timeout: Seconds | None = None
    """toolroll: maximum time from start to end in seconds, including the time in which other programs used the
    processor. If the program could not use its own timeout by then, the status is `SandboxError`."""
    deadline: float | None = Field(default=None, allow_inf_nan=False)
    """toolroll: Unix time by which the program must start. Later, the server rejects the request with status 504."""
    idempotency_key: str | None = Field(default=None, max_length=200)
    """toolroll: key that identifies retries of a request. A retry gets the first response and is not run again."""


class RunCodeRequest(_SandboxRequest):
    """Request of `POST /run_code`."""

    code: str
    language: Language
    compile_timeout: Seconds = 10
    run_timeout: Seconds = 10
    """CPU time. A program that sleeps or waits is stopped after `max_wall_time(run_timeout)`."""
    stdin: str | None = None
    files: dict[str, str | None] = {}
    """Base64-encoded content by path. Relative paths are below the working directory of the program."""

    session_id: str | None = Field(default=None, pattern=SESSION_ID_PATTERN)
    """toolroll: session whose interpreter keeps its variables between requests.

    `DELETE /v1/sessions/{session_id}` ends the session.
    """
    show_value: bool = False
    """toolroll: if a Python program ends with an expression, write its value to stdout, as a notebook does.

    Always on in sessions.
    """


class CommandRunResult(BaseModel):
    """Output of one command."""

    status: CommandStatus
    execution_time: float | None = None
    return_code: int | None = None
    """Return code. None after a timeout, -9 if signal 9 ended the command."""
    stdout: str | None = None
    stderr: str | None = None

    cpu_time: float | None = None
    """toolroll: CPU time in seconds."""
    stdout_truncated: bool = False
    """toolroll: True if the command wrote more than the server keeps."""
    stderr_truncated: bool = False
    memory_exceeded: bool = False
    """toolroll: True if the command was killed because it exceeded the memory limit."""


class SandboxResponse(BaseModel):
    """Fields of the responses of `POST /run_code` and `POST /run_jupyter`."""

    status: RunStatus
    message: str = ""
    executor_pod_name: str | None = None
    files: dict[str, str] = {}

    queue_time: float | None = None
    """toolroll: time that the request waited in the server's queue, in seconds."""


class RunCodeResponse(SandboxResponse):
    """Response of `POST /run_code`."""

    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None

    session_is_new: bool | None = None
    """toolroll: True if this request started the session. If the session existed before, its state is lost."""
    session_died: bool | None = None
    """toolroll: True if a program ended the session after the previous request."""
    session_is_over: bool | None = None
    """toolroll: True if this program ended the session, for example by killing its own process."""


class RunJupyterRequest(_SandboxRequest):
    """Request of `POST /run_jupyter`."""

    cells: list[str]
    cell_timeout: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Timeout for each cell, in seconds. 0 for no limit other than the total."""
    total_timeout: Seconds = 45
    kernel: Literal["python3"] = "python3"
    files: dict[str, str] = {}


class CellRunResult(BaseModel):
    """Output of one cell."""

    stdout: str
    stderr: str
    display: list[dict[str, Any]]
    """Displayed values, each a mapping from media type to data. PNG images are base64-encoded."""
    error: list[dict[str, Any]]
    """At most one error, with `ename`, `evalue` and `traceback`."""


class RunJupyterResponse(SandboxResponse):
    """Response of `POST /run_jupyter`."""

    driver: CommandRunResult | None = None
    cells: list[CellRunResult] = []


RunRequest = RunCodeRequest | RunJupyterRequest


class Ping(BaseModel):
    """Response of `GET /v1/ping`. SandboxFusion returns the string "pong" instead."""

    ping: Literal["pong"] = "pong"
    version: str = ""
    tier: str = ""
    """Isolation tier: A, B, C, "unsafe", or "none" on other systems than Linux."""
    gaps: list[str] = []
    """Ways in which a program can affect others in spite of the isolation."""
    running: int = 0
    waiting: int = 0
    capacity: int = 0
    """Maximum number of concurrent programs. Further requests are queued."""
    time: float = 0.0
    """Unix time by the server's clock, which deadlines are compared with."""


class FenceRequest(BaseModel):
    """Request of `POST /v1/holders/{holder}/fence`."""

    lease: int = Field(ge=-(2**63), le=2**63 - 1)
    """Number of the lease up to which requests are rejected."""


class FenceResponse(BaseModel):
    """Response of `POST /v1/holders/{holder}/fence`."""

    running: int
    """Number of programs of these leases that still run."""
    address: tuple[str, int]
    """IP address and port at which the server received the request. Another address than the client's destination
    shows that there may be several servers behind it."""


class LanguageInfo(BaseModel):
    """One language in the response of `GET /v1/languages`."""

    available: bool
    version: str = ""
    missing: str = ""
    """Software to install if the language is not available."""


Model = TypeVar("Model", bound=BaseModel)


def read(kind: type[Model], body: bytes) -> Model:
    """Parse a request or response.

    Args:
        kind: Expected type.
        body: JSON text.

    Returns:
        The message, with lone surrogates replaced.

    Raises:
        ValidationError: If the body is not a valid message of this type.
    """
    # pydantic's parser is fast but rejects lone surrogates, which are rare.
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.errors(include_url=False)[0]["type"] != "json_invalid":
            raise
        try:
            return kind.model_validate(replace_lone_surrogates_in_json(json.loads(body)))
        except ValidationError:
            raise
        except (ValueError, RecursionError):
            raise error from None
