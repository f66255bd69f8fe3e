"""Exceptions, and the attribution of failures to the policy or to the infrastructure.

Every failure during a trajectory is one of two kinds:

- A *policy fault* is caused by the model: invalid JSON, an unknown tool, a program that crashes. The message is
  returned to the model as text.
- An *infra fault* is caused by anything else: a sandbox that is down, a worker that died, a tool that violates its
  contract. The trajectory is excluded from the loss.

Invariant: a failure that the policy can cause is a policy fault. For this reason an exception of any other type counts
as a policy fault (see `fault_of`).

`ConfigError` and `MissingExtra` are raised during set-up, before any trajectory starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

ModelT = TypeVar("ModelT", bound="BaseModel")

MAX_NAMES_LISTED = 12
"""Maximum number of valid names that a message about an unknown name lists."""
MAX_PROBLEMS_EXPLAINED = 3
"""Maximum number of validation problems that one message contains."""


class Fault(StrEnum):
    """The cause of a failure."""

    POLICY = "policy"
    """The model caused the failure. It receives the error message and can learn from it."""
    INFRA = "infra"
    """The infrastructure caused the failure. The trajectory ends and is excluded from the loss, unless `toolroll run`
    succeeds in another attempt."""


class ToolrollError(Exception):
    """Base class of all exceptions that toolroll raises."""

    metrics: Mapping[str, Any] = {}
    """Metrics of the failed tool call, such as `queue_wait` and `attempts`. They are written to the records."""


class ConfigError(ToolrollError):
    """Raised when a setting, a config file or the definition of a tool is invalid."""


class MissingExtra(ConfigError, ImportError):
    """Raised when a feature is used whose optional dependencies are not installed.

    Args:
        package: Name of the missing package.
        extra: Extra of toolroll that installs the package.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"The package {package!r} is not installed. Run: pip install 'toolroll[{extra}]'")
        self._init_args = package, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return MissingExtra, self._init_args


class PolicyFault(ToolrollError):
    """Raised when the model caused a failure. The model reads the message.

    Tools raise it to reject a call:

        raise PolicyFault(f"Unknown table {name!r}. Available tables: {', '.join(tables)}.")
    """


class InvalidArguments(PolicyFault):
    """Raised when the arguments of a tool call are not valid JSON or do not satisfy the tool's schema."""


class CallTimeout(PolicyFault):
    """Raised when a tool call did not end within its time. The model reads the message.

    The outcome depends on the caller's deadline, so a cache neither stores it nor shares it with other callers.
    """


class RecordsNotWritten(ToolrollError):
    """Raised when a run stops because it cannot write records, for example because the disk is full."""

    @classmethod
    def because(cls, error: OSError, directory: object) -> RecordsNotWritten:
        """Return the exception for an OSError in a directory."""
        return cls(
            f"Cannot write records to {error.filename or directory}: {error.strerror or error}. "
            "Free disk space or make the directory writable, then run the same command again to resume."
        )


class RunFailed(ToolrollError):
    """Raised when a run stops because all of its trajectories fail in the same way."""


class InfraFault(ToolrollError):
    """Raised when something other than the model caused a failure.

    Tools raise it when a service that they depend on is unavailable.
    """

    depends_on_deadline: bool = False
    """True if the same call with a later deadline may succeed. A cache does not share such a fault with other
    callers."""


class UserCodeError(InfraFault):
    """Raised when a reward function or the `calc_reward` of a tool raised an exception. Another attempt would, too."""

    @classmethod
    def because(cls, what: str, error: BaseException) -> UserCodeError:
        """Return the exception for an exception of the user's code, with the place where it was raised.

        Args:
            what: What raised it, for example "Reward function 'correct'".
            error: The exception.
        """
        frames = extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        return cls(f"{what} failed: {type(error).__name__}: {error}{place}.")


class ReplayMiss(InfraFault):
    """Raised when a replay needs a result that was not recorded."""


class SlotTimeout(InfraFault):
    """Raised when no slot of a limited resource became free before the deadline."""

    depends_on_deadline = True


class LimiterUnavailable(InfraFault):
    """Raised when a lease expired and the cluster's limiter could not be reached before the deadline."""

    depends_on_deadline = True


class BudgetExhausted(InfraFault):
    """Raised when the budget of a limited resource is spent. Another attempt would fail as well.

    Args:
        resource: Name of the resource.
        unit: Unit of which nothing or too little is left.
        cost: Amount that the work needs.
        left: Amount that is left.
    """

    def __init__(self, resource: str, unit: str, cost: float, left: float) -> None:
        super().__init__(
            f"The budget of {resource!r} is spent: {left:.6g} {unit} left, {cost:.6g} needed. Raise it in the "
            f"config, or on a cluster with `toolroll limiter set {resource!r} --budget {unit}=TOTAL`."
        )
        self.resource, self.unit = resource, unit
        self._init_args = resource, unit, cost, left

    def __reduce__(self) -> tuple[type[BudgetExhausted], tuple[str, str, float, float]]:
        return BudgetExhausted, self._init_args


class SandboxUnavailable(InfraFault):
    """Raised when a sandbox was unreachable, full or failing until the retries or the deadline were exhausted."""


class RequestRejected(InfraFault):
    """Raised when a server rejected a request and retrying will not help.

    Args:
        message: Description of the request and the reason.
        status: HTTP status of the response, or None if the request was not sent.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SandboxRefused(RequestRejected):
    """Raised when the sandbox rejected a request and retrying will not help.

    Examples are an exceeded limit, a language that is not installed, and an invalid token.
    """


class EngineUnavailable(InfraFault):
    """Raised when an engine was unreachable, full or failing until the retries or the deadline were exhausted."""


class EngineRefused(RequestRejected):
    """Raised when the inference engine rejected a request and retrying will not help.

    Examples are a prompt that is too long and an invalid parameter.
    """


class ToolContractError(InfraFault):
    """Raised when a tool violates the contract of `BaseTool`, for example by returning NaN as a reward."""


class DuplicateInstance(ToolContractError):
    """Raised when a tool already has an instance with the requested id.

    The existing instance belongs to another trajectory and must not be released.
    """


def fault_of(error: BaseException) -> Fault:
    """Return the cause of an exception that a tool raised.

    Every exception other than `InfraFault` is a policy fault. Most of them, such as ValueError or OSError, are caused
    by the arguments of the call. If they counted as infra faults, the model could avoid a low reward by crashing a
    tool.

    Args:
        error: Exception raised by `BaseTool.execute`.

    Returns:
        `Fault.INFRA` for an `InfraFault`, otherwise `Fault.POLICY`.

    Example:
        >>> fault_of(ZeroDivisionError())
        <Fault.POLICY: 'policy'>
    """
    return Fault.INFRA if isinstance(error, InfraFault) else Fault.POLICY


def validate(model: type[ModelT], value: Any, where: str) -> ModelT:
    """Validate a user's input.

    Args:
        model: Pydantic model of the input.
        value: The input.
        where: Name of the setting or the file that contains the input. The error message starts with it.

    Returns:
        The validated model.

    Raises:
        ConfigError: If the input is invalid.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, model.model_fields)}.") from error


def explain(error: ValidationError, known: Iterable[str] = ()) -> str:
    """Return the first problems of a pydantic validation error on one line.

    Args:
        error: Validation error of a user's input.
        known: Names of the valid keys, of which the closest is suggested for an unknown key.

    Returns:
        The problems, separated by semicolons, without a period at the end.
    """
    parts = []
    for item in error.errors(include_url=False, include_context=False)[:MAX_PROBLEMS_EXPLAINED]:
        where = ".".join(map(str, item["loc"]))
        match item["type"]:
            case "extra_forbidden":
                parts.append(f"unknown key {where!r}{did_you_mean(where, known)}")
            case "missing":
                parts.append(f"missing key {where!r}")
            case _:
                message = item["msg"].removeprefix("Value error, ")
                parts.append(f"{where}: {message}" if where else message)
    return "; ".join(parts)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a parenthesis that suggests a valid name, to be appended to a message about an unknown one.

    Args:
        word: The unknown name.
        known: The valid names.

    Returns:
        The closest valid name, or all of them if none is close and there are at most `MAX_NAMES_LISTED`, or "".

    Example:
        >>> did_you_mean("pyton", ["python", "bash"])
        " (did you mean 'python'?)"
        >>> did_you_mean("cobol", ["python", "bash"])
        ' (available: python, bash)'
    """
    known = list(known)
    if near := get_close_matches(word, known, n=1):
        return f" (did you mean {near[0]!r}?)"
    return f" (available: {', '.join(known)})" if 0 < len(known) <= MAX_NAMES_LISTED else ""


def unknown_name(kind: str, name: str, available: Iterable[str]) -> str:
    """Return a message about an unknown name that lists the valid ones or suggests the closest.

    Args:
        kind: Noun for the named thing, in the singular.
        name: The unknown name. At most 80 characters of its repr are shown.
        available: The valid names.

    Returns:
        One or two sentences.

    Example:
        >>> unknown_name("tool", "serch", ["search", "add"])
        "Unknown tool 'serch'. Did you mean 'search'?"
        >>> unknown_name("tool", "x", ["search", "add"])
        "Unknown tool 'x'. Available tools: search, add."
    """
    available = list(available)
    message = f"Unknown {kind} {name!r:.80}."
    if near := get_close_matches(name, available, n=1):
        return f"{message} Did you mean {near[0]!r}?"
    if 0 < len(available) <= MAX_NAMES_LISTED:
        return f"{message} Available {kind}s: {', '.join(available)}."
    return message
