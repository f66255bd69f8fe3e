"""CodeRunner: the sandbox, within its limit. The code interpreter and the rewards both run programs through it.

    runner = CodeRunner(RunnerSettings(sandbox_fusion_url="http://10.0.0.1:8080", rate_limit=32))
    execution, waited = await runner.run("print(1 + 1)")

It promises:

- No more in flight at the sandbox than `rate_limit`, over all processes of the Ray cluster that name the same
  endpoints, and no more from this process than `num_workers`. First come, first served.
- A slot is in use for as long as the request is: whoever gives up waiting (a cancellation, a deadline) leaves at once,
  and the slot follows when the sandbox is done. A program that nobody waits for still runs, and must be counted.
- Whoever asks has an answer, an InfraFault or a cancellation by the deadline, whatever the sandbox does.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from toolroll.errors import InfraFault, SandboxUnavailable
from toolroll.limiter.gate import Slot
from toolroll.limiter.limiter import LocalLimiter, get_limiter
from toolroll.sandbox.client import MARGIN, QUEUE_ALLOWANCE, SandboxClient
from toolroll.sandbox.execution import Execution, Outcome

PATIENCE = 600.0
"""Seconds to wait for a slot where no deadline says: a step's worth of calls works itself off."""
COMPILE_TIME = 10.0
"""Seconds that a compiler has at least, where a program has less."""
END = 1.5
"""Seconds at the most to stop a program and have its output, kept back from what a deadline leaves."""
TAKEN = 0.9
"""A program that had less of its time than this, as it waited for a slot, has not had its time."""
OTHER_CONNECTIONS = 8
"""For requests that need no slot."""
TOKEN = "TOOLROLL_SANDBOX_TOKEN"  # noqa: S105 (the name of the variable)


class RunnerSettings(BaseModel):
    """Which sandbox, and how much of it may be used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sandbox_fusion_url: tuple[str, ...] = Field(min_length=1)
    """One or several. With several, each request goes where the fewest are outstanding."""
    rate_limit: int = Field(default=10, ge=1)
    """Requests in flight at the sandbox: over the whole cluster, and over all of its URLs together."""
    num_workers: int | None = Field(default=None, ge=1)
    """Requests that this process may have open; by default, as many as `rate_limit`."""
    enable_global_rate_limit: bool = True
    """Whether the cluster shares one limit. If not, each process has its `num_workers`, and nobody counts them all."""
    memory_limit_mb: int | None = Field(default=None, ge=1)
    """Megabytes for a program; by default, what the sandbox gives."""

    @field_validator("sandbox_fusion_url", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else given


class Ran(NamedTuple):
    """What came of a request."""

    execution: Execution
    waited: float
    """Seconds until this process had its slot."""
    run_timeout: float
    """Seconds that the program had."""


class CodeRunner:
    """Runs programs within the limit. Any event loop may use it, and it pickles."""

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings
        self.workers = settings.num_workers or settings.rate_limit
        """How many requests this process may have open."""
        self._client = SandboxClient(
            settings.sandbox_fusion_url,
            token=os.environ.get(TOKEN),
            max_connections=self.workers + OTHER_CONNECTIONS,
        )
        self.resource = ", ".join(sorted(self._client.endpoints))
        """What the limit is of, by which all who share it know it."""
        self._open: set[asyncio.Task[Execution]] = set()

    async def run(
        self,
        code: str,
        language: str = "python",
        *,
        run_timeout: float,
        stdin: str | None = None,
        session_id: str | None = None,
        show_value: bool = False,
        deadline: float | None = None,
    ) -> Ran:
        """Run a program that has `run_timeout` seconds, or less where the deadline is nearer than that.

        Args:
            run_timeout: If it runs out, that is the program's own doing, unless the wait for a slot took part of it.
            deadline: When the answer must be there, on the clock of `time.monotonic()`.
        """
        asked, waited = time.monotonic(), None
        compile_timeout = max(COMPILE_TIME, run_timeout)
        fair = _within(run_timeout, deadline, asked)
        seconds = (0.0 if language == "python" else compile_timeout) + fair + MARGIN
        try:
            slots = await self._slots(asked, seconds, deadline)
            waited = time.monotonic() - asked
            given = _within(fair, deadline, time.monotonic())
            send = partial(
                self._client.run,
                code,
                language,
                stdin=stdin,
                compile_timeout=compile_timeout,
                run_timeout=given,
                memory_limit_mb=self.settings.memory_limit_mb,
                session_id=session_id,
                show_value=show_value,
            )
            execution = await self._send(send, slots, seconds, deadline)
            if execution.outcome is Outcome.TIMEOUT and given < TAKEN * fair:
                raise SandboxUnavailable(
                    f"{self.resource}: the program had {given:.1f} s instead of {fair:.1f} s, as it waited "
                    f"{waited:.1f} s for a slot, and ran out of time. Raise the limit, or allow more time."
                )
            return Ran(execution, waited, given)
        except InfraFault as error:
            waited = time.monotonic() - asked if waited is None else waited
            error.metrics = {**error.metrics, "queue_wait": waited}
            raise

    def new_session(self) -> str:
        """A name for a session, at an endpoint that isn't known to be down."""
        return self._client.new_session()

    async def end_session(self, session_id: str) -> None:
        """End a session. It runs no program, so it needs no slot."""
        await self._client.end_session(session_id)

    async def has(self, language: str) -> bool | None:
        """Whether the sandbox can run a language; None where it doesn't say."""
        try:
            found = await self._client.languages()
        except InfraFault:
            return None
        return language in found and found[language].available

    def __reduce__(self) -> tuple[type[CodeRunner], tuple[RunnerSettings]]:
        return CodeRunner, (self.settings,)

    async def _slots(self, asked: float, seconds: float, deadline: float | None) -> list[Slot]:
        """This process's own slot, then the cluster's: one that waited for a worker would be kept from others."""
        give_up = asked + PATIENCE if deadline is None else deadline
        own = _own_limiter(self.resource, self.workers).slot(deadline=give_up)
        await own.__aenter__()
        if not self.settings.enable_global_rate_limit:
            return [own]
        try:
            longest = self._time_to_begin(seconds) if deadline is None else max(0.0, deadline - asked)
            limiter = get_limiter(self.resource, self.settings.rate_limit)
            shared = limiter.slot(deadline=give_up, hold=longest + seconds)
            await shared.__aenter__()
        except BaseException:
            own.give_back()
            raise
        return [shared, own]

    def _time_to_begin(self, seconds: float) -> float:
        """How long the sandbox may take to begin, where no deadline says: all before it may take all of their time."""
        return min(PATIENCE, QUEUE_ALLOWANCE + self.settings.rate_limit * seconds)

    async def _send(
        self,
        send: Callable[..., Coroutine[Any, Any, Execution]],
        slots: list[Slot],
        seconds: float,
        deadline: float | None,
    ) -> Execution:
        """Send a request, and wait for the answer until the deadline. The request has its slots until it has ended."""
        sent = time.monotonic()
        begin_by, patience = deadline, inf
        if begin_by is None:  # then one that is busy has all the time that it may need, one that is down hasn't
            begin_by, patience = sent + self._time_to_begin(seconds), QUEUE_ALLOWANCE
        request = asyncio.create_task(send(begin_by=begin_by, deadline=begin_by + seconds, patience=patience))
        self._open.add(request)
        request.add_done_callback(lambda _: self._ended(request, slots))
        await asyncio.wait({request}, timeout=None if deadline is None else deadline - sent)
        if not request.done():
            raise SandboxUnavailable(
                f"{self.resource}: no complete answer by the deadline, {time.monotonic() - sent:.1f} s after it was "
                "sent. Is the sandbox overloaded? Lower rate_limit, or allow more time."
            )
        return request.result()

    def _ended(self, request: asyncio.Task[Execution], slots: list[Slot]) -> None:
        self._open.discard(request)
        for slot in slots:
            slot.give_back()
        if not request.cancelled():
            request.exception()  # seen, also where nobody waits for it any more


def _within(run_timeout: float, deadline: float | None, now: float) -> float:
    """Seconds for a program, so that it can be stopped and its output be there by the deadline."""
    if deadline is None:
        return run_timeout
    left = deadline - now
    return max(0.01, min(run_timeout, left - min(END, left / 4)))


_own: dict[tuple[str, int], LocalLimiter] = {}
"""This process's own limits, which all who use the same sandbox here share."""
os.register_at_fork(after_in_child=_own.clear)


def _own_limiter(resource: str, workers: int) -> LocalLimiter:
    key = resource, workers
    return _own.get(key) or _own.setdefault(key, LocalLimiter(workers, f"this process's share of {resource}"))
