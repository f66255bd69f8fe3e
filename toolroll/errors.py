"""Whose fault a failure is.

Every failure while a trajectory runs is either the policy's (it wrote bad JSON, named a tool that doesn't exist, wrote
a program that crashes) or the infrastructure's (a sandbox is down, a worker died, a tool's author broke the contract).
The policy's fault goes back to the model as text that it can learn from; the infrastructure's keeps the trajectory out
of the loss. Whatever the policy can bring about stays its own fault, so an exception that says nothing about itself
counts as the policy's (`fault_of`).

A third kind never reaches a trajectory: `ConfigError` and `MissingExtra` are raised while things are being set up, for
a person to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class Fault(StrEnum):
    """Who brought a failure about."""

    POLICY = "policy"
    """The model did: tell it, and let it learn."""
    INFRA = "infra"
    """Something around the model did: retry, then keep the trajectory out of the loss."""


class ToolrollError(Exception):
    """Base of every error that toolroll raises on purpose."""

    metrics: Mapping[str, Any] = {}
    """What is known of the tool call that failed so, for the records."""


class ConfigError(ToolrollError):
    """A setting, a config file or a tool's definition is wrong. The message names what, where, and the remedy."""


class MissingExtra(ConfigError, ImportError):
    """A part was used whose packages are not installed. The message names the extra that brings them."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"This needs {package}, which is not installed. Run: pip install 'toolroll[{extra}]'")
        self._made_of = package, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return MissingExtra, self._made_of


class PolicyFault(ToolrollError):
    """The model brought this about. `str(error)` is written for the model to read.

    A tool raises it to tell the model what was wrong with its call:

        raise PolicyFault(f"No table is called {name!r}. The tables are: {', '.join(tables)}.")
    """


class InvalidArguments(PolicyFault):
    """The arguments of a tool call are not JSON, or not what the tool's schema asks for."""


class InfraFault(ToolrollError):
    """Something that the model had no part in failed. A tool raises it when a service that it needs is down."""


class SlotTimeout(InfraFault):
    """The limit was reached, and no slot came free before the deadline."""


class LimiterUnavailable(InfraFault):
    """The lease on the cluster's limit ran out and the limiter could not be reached before the deadline."""


class SandboxUnavailable(InfraFault):
    """The sandbox could not be reached, was full, or failed, until the retries or the deadline ran out."""


class SandboxRefused(InfraFault):
    """The sandbox won't have this request, however often it is sent: a limit, a missing language, a wrong token."""


class EngineUnavailable(InfraFault):
    """The inference engine could not be reached, was full, or failed, until the retries or the deadline ran out."""


class EngineRefused(InfraFault):
    """The inference engine won't have this request, however often it is sent: too long a prompt, a wrong parameter."""

    status: int | None = None
    """The HTTP status; None where it wasn't even sent."""


class ToolContractError(InfraFault):
    """A tool did what BaseTool forbids, e.g. returned a reward that is no number. Its author has to mend it."""


class DuplicateInstance(ToolContractError):
    """An instance of this id is alive already. It is another trajectory's: nothing may be released for it."""


def fault_of(error: BaseException) -> Fault:
    """Whose fault an exception out of `tool.execute` is: the policy's, unless it says otherwise.

    A plain ValueError or OSError out of a tool is most often an argument that the model chose badly. Were it counted as
    the infrastructure's, the model could escape a bad reward by making tools crash.
    """
    return Fault.INFRA if isinstance(error, InfraFault) else Fault.POLICY


def explain(error: ValidationError, known: Iterable[str] = ()) -> str:
    """What pydantic found wrong with a person's input, in one line.

    A key that doesn't exist is answered with the nearest one that does.
    """
    parts = []
    for item in error.errors(include_url=False, include_context=False)[:3]:
        where = ".".join(map(str, item["loc"]))
        match item["type"]:
            case "extra_forbidden":
                parts.append(f"there is no key {where!r}{did_you_mean(where, known)}")
            case "missing":
                parts.append(f"the key {where!r} is missing")
            case _:
                parts.append(f"{where}: {item['msg']}" if where else item["msg"])
    return "; ".join(parts)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that doesn't exist: the nearest one, or all where they are few."""
    known = list(known)
    if near := get_close_matches(word, known, n=1):
        return f" (did you mean {near[0]!r}?)"
    return f" (known: {', '.join(known)})" if 0 < len(known) <= 12 else ""
