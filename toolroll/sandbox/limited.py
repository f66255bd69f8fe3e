"""Sandbox client with a concurrency limit. The code interpreter and the rewards run programs through it.

    sandbox = LimitedSandbox(LimitedSandboxSettings(sandbox_fusion_url="http://10.0.0.1:8080", rate_limit=32))
    result = await sandbox.run("print(1 + 1)", run_timeout=10)

Invariants:

- At most `rate_limit` requests are in flight at the sandbox, over all processes of the Ray cluster that use the same
  endpoints, and at most `num_workers` of them are from this process. Slots are granted in FIFO order.
- A slot is held until its request ends, even if the caller was cancelled or its deadline passed: the program may still
  be running.
- A program that times out because a wait had shortened its time is an infra fault. The waits are those for a slot, and
  that of the tool call for an equal call (`cache_wait_s`).
- If the process was suspended for so long that it lost its slot, the sandbox rejects the request, and the call acquires
  another slot. The time by which a slot expires is fixed when the slot is granted.
- Every call returns, raises an `InfraFault` or is cancelled by its deadline, even if the sandbox never responds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from math import inf
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from toolroll.errors import InfraFault, SandboxRefused, SandboxUnavailable
from toolroll.limiter.limited import cache_wait_s
from toolroll.limiter.limiter import LocalLimiter
from toolroll.limiter.registry import get_limiter
from toolroll.limiter.slot import Slot
from toolroll.sandbox.client import EXECUTION_OVERHEAD_S, QUEUE_ALLOWANCE_S, SandboxClient
from toolroll.sandbox.execution import Execution, ExecutionOutcome
from toolroll.sandbox.fence import SandboxFence
from toolroll.sandbox.protocol import (
    FULL_TIME_FRACTION,
    LEASE_LOST_STATUS,
    TOKEN_ENV_VAR,
    max_wall_time,
    timeout_within,
)

MAX_WAIT_S = 600.0
"""Maximum time to wait for a slot, and in the sandbox's queue, if no deadline is given."""
COMPILE_TIMEOUT_FLOOR_S = 10.0
"""Minimum timeout of a compiler, for programs with a shorter timeout."""
MIN_RUN_TIMEOUT_S = 0.01
STOP_ALLOWANCE_S = 1.5
"""Time reserved before the deadline to stop a program and return its output."""
MAX_SLOTS_LOST = 3
"""Maximum number of slots that one call may lose before it fails."""
EXTRA_CONNECTIONS = 8
"""Connections for requests that need no slot."""


class LimitedSandboxSettings(BaseModel):
    """Endpoints of a sandbox and limits of their use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sandbox_fusion_url: tuple[str, ...] = Field(min_length=1)
    """One or several URLs. Each request goes to the endpoint with the fewest outstanding requests."""
    rate_limit: int = Field(default=10, ge=1)
    """Maximum number of requests in flight, over the whole cluster and all endpoints."""
    num_workers: int | None = Field(default=None, ge=1)
    """Maximum number of requests in flight from this process. Defaults to `rate_limit`."""
    enable_global_rate_limit: bool = True
    """If True, the processes of the cluster share `rate_limit`. If False, only `num_workers` applies."""
    memory_limit_mb: int | None = Field(default=None, ge=1)
    """Memory limit of a program in megabytes. Defaults to the sandbox's limit."""

    @field_validator("sandbox_fusion_url", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else value


class RunResult(NamedTuple):
    """Result of a program that ran under the limit."""

    execution: Execution
    waited: float
    """Time until the slot was granted, in seconds."""
    run_timeout: float
    """Run time that the program was allowed, in seconds."""
    is_shortened: bool = False
    """True if the deadline left the program less time than was requested."""


class _Schedule:
    """Times of one request that arrives now. Points in time are on the clock of `time.monotonic()`.

    A request waits for a slot, then in the sandbox's queue, then executes. With a deadline, the result must arrive by
    the deadline, so the wait shortens the run time. Without one, each phase has its own limit.
    """

    def __init__(self, language: str, run_timeout: float, deadline: float | None, *, rate_limit: int) -> None:
        self.requested_at = time.monotonic()
        self.compile_timeout = max(COMPILE_TIMEOUT_FLOOR_S, run_timeout)
        self.earlier_wait_s = cache_wait_s()
        """Time that the tool call has waited for an equal call."""
        self.run_timeout = _run_timeout_before(deadline, run_timeout, self.requested_at - self.earlier_wait_s)
        """Run time that the program gets if it does not wait."""
        compile_s = 0.0 if language == "python" else max_wall_time(self.compile_timeout)
        self.wall_timeout = compile_s + max_wall_time(self.run_timeout)
        """Maximum time of compiler and program."""
        self.requested_wall_timeout = compile_s + max_wall_time(run_timeout)
        """Maximum time of compiler and program without the deadline."""
        self.max_execution_s = self.wall_timeout + EXECUTION_OVERHEAD_S
        """Maximum time from the start of the compiler until the result arrives."""
        if deadline is None:
            self.slot_deadline = self.requested_at + MAX_WAIT_S
            # All requests ahead in the sandbox's queue may take their maximum time.
            self.max_queue_s = min(MAX_WAIT_S, QUEUE_ALLOWANCE_S + rate_limit * self.max_execution_s)
            self.max_outage_s = QUEUE_ALLOWANCE_S
        else:
            self.slot_deadline = deadline
            self.max_queue_s = max(0.0, deadline - self.requested_at)
            self.max_outage_s = inf  # only the deadline matters
        self._deadline = deadline

    def start_by(self, slot: Slot, sent_at: float) -> float:
        """Return the time after which the program may not start, so that it ends before its slot expires."""
        latest = sent_at + self.max_queue_s if self._deadline is None else self._deadline
        return latest if slot.lease is None else min(latest, slot.expires_at - self.max_execution_s)


class LimitedSandbox:
    """Runs programs under the limit. Any event loop can use it, and it can be pickled.

    Args:
        settings: Endpoints and limits.
    """

    def __init__(self, settings: LimitedSandboxSettings) -> None:
        self.settings = settings
        self.workers = settings.num_workers or settings.rate_limit
        """Maximum number of requests in flight from this process."""
        token, connections = os.environ.get(TOKEN_ENV_VAR), self.workers + EXTRA_CONNECTIONS
        self._client = SandboxClient(settings.sandbox_fusion_url, token=token, max_connections=connections)
        self.resource = ", ".join(sorted(self._client.endpoints))
        """Name of the limited resource, shared by all processes with the same endpoints."""
        self.keeps_sessions = True
        """Whether the server has sessions. Set to False by the first caller that finds that it has none."""
        self._in_flight: set[asyncio.Task[Execution]] = set()

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
    ) -> RunResult:
        """Run a program.

        Args:
            code: Source code.
            language: Language of the code.
            run_timeout: Timeout of the program, in seconds of CPU time. Reduced if the deadline is nearer.
            stdin: Text for the standard input.
            session_id: Session whose interpreter keeps its variables between calls.
            show_value: If a Python program ends with an expression, write its value to stdout.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`.

        Returns:
            The result of the program. Its outcome is a timeout only if waits did not shorten the run time much.

        Raises:
            SlotTimeout: If no slot became free in time.
            LimiterUnavailable: If the limiter of the cluster could not be reached.
            SandboxUnavailable: If the sandbox was unreachable, overloaded or failing, or if the program timed out
                because a wait for a slot or an equal call had shortened its run time.
            SandboxRefused: If the sandbox rejected the request.
        """
        schedule = _Schedule(language, run_timeout, deadline, rate_limit=self.settings.rate_limit)
        program = dict[str, Any](
            code=code, language=language, stdin=stdin, session_id=session_id, show_value=show_value
        )
        for _ in range(MAX_SLOTS_LOST):
            try:
                return await self._run_in_slot(schedule, deadline, program)
            except SandboxRefused as error:
                if error.status != LEASE_LOST_STATUS:
                    raise
        return await self._run_in_slot(schedule, deadline, program)

    def new_session(self) -> str:
        """Return a unique session name, at an endpoint that is not known to be down."""
        return self._client.new_session()

    async def end_session(self, session_id: str) -> None:
        """End a session. This needs no slot.

        Args:
            session_id: Name of the session.

        Raises:
            SandboxUnavailable: If the endpoint did not respond.
            SandboxRefused: If the sandbox does not support sessions.
        """
        await self._client.end_session(session_id)

    async def has(self, language: str) -> bool | None:
        """Return True if the sandbox can run a language, or None if the sandbox does not list its languages.

        Args:
            language: Name of the language.
        """
        try:
            languages = await self._client.languages()
        except InfraFault:
            return None
        return language in languages and languages[language].available

    def unreachable_s(self) -> float | None:
        """Return for how long no sandbox has answered, in seconds, or None if one answers."""
        return self._client.http.unreachable_s()

    def __reduce__(self) -> tuple[type[LimitedSandbox], tuple[LimitedSandboxSettings]]:
        return LimitedSandbox, (self.settings,)

    async def _run_in_slot(self, schedule: _Schedule, deadline: float | None, program: dict[str, Any]) -> RunResult:
        """Acquire slots and run a program in them, once."""
        waited = None
        try:
            slots = await self._acquire_slots(schedule)
            sent_at = time.monotonic()
            waited = sent_at - schedule.requested_at
            run_timeout = _run_timeout_before(deadline, schedule.run_timeout, sent_at)
            start_by = schedule.start_by(slots[0], sent_at)
            request = self._client.run(
                **program,
                compile_timeout=schedule.compile_timeout,
                run_timeout=run_timeout,
                wall_timeout=_wall_timeout_before(deadline, schedule.wall_timeout, sent_at),
                memory_limit_mb=self.settings.memory_limit_mb,
                deadline=start_by + schedule.max_execution_s,
                start_by=start_by,
                max_outage_s=schedule.max_outage_s,
                lease=slots[0].lease,
                granted_at=slots[0].granted_at,
            )
            execution = await self._send(request, slots, deadline)
            is_shortened = run_timeout < FULL_TIME_FRACTION * schedule.run_timeout
            if execution.outcome is ExecutionOutcome.TIMEOUT and is_shortened:
                raise _out_of_time(
                    f"{self.resource}: the program timed out after {run_timeout:.1f} s instead of "
                    f"{schedule.run_timeout:.1f} s because it waited {waited:.1f} s for a slot and "
                    f"{schedule.earlier_wait_s:.1f} s for an equal call. Raise rate_limit, or allow more time."
                )
            requested_s = schedule.requested_wall_timeout
            return RunResult(
                execution, waited, run_timeout, _wall_timeout_before(deadline, requested_s, sent_at) < requested_s
            )
        except InfraFault as error:
            waited = time.monotonic() - schedule.requested_at if waited is None else waited
            error.metrics = {**error.metrics, "queue_wait": waited}
            raise

    async def _acquire_slots(self, schedule: _Schedule) -> list[Slot]:
        """Acquire a slot of this process, then a slot of the cluster, which must not wait for the process's limit."""
        local_slot = _local_limiter(self.resource, self.workers).slot(deadline=schedule.slot_deadline)
        await local_slot.acquire()
        if not self.settings.enable_global_rate_limit:
            return [local_slot]
        try:
            limiter = get_limiter(self.resource, self.settings.rate_limit, fence=SandboxFence(self._client))
            max_hold_s = schedule.max_queue_s + schedule.max_execution_s
            cluster_slot = limiter.slot(deadline=schedule.slot_deadline, hold=max_hold_s)
            await cluster_slot.acquire()
        except BaseException:
            local_slot.release()
            raise
        return [cluster_slot, local_slot]

    async def _send(
        self, request: Coroutine[Any, Any, Execution], slots: list[Slot], deadline: float | None
    ) -> Execution:
        """Await the request until the deadline. The slots are released when the request ends, which may be later."""
        sent_at = time.monotonic()
        task = asyncio.create_task(request)
        self._in_flight.add(task)
        task.add_done_callback(lambda _: self._finish(task, slots))
        await asyncio.wait({task}, timeout=None if deadline is None else deadline - sent_at)
        if not task.done():
            raise _out_of_time(
                f"{self.resource}: no complete response by the deadline, {time.monotonic() - sent_at:.1f} s after the "
                "request was sent. Check that the sandbox is not overloaded. Lower rate_limit, or allow more time."
            )
        return task.result()

    def _finish(self, task: asyncio.Task[Execution], slots: list[Slot]) -> None:
        self._in_flight.discard(task)
        for slot in slots:
            slot.release()
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the caller may have left


def _out_of_time(message: str) -> SandboxUnavailable:
    error = SandboxUnavailable(message)
    error.depends_on_deadline = True
    return error


def _wall_timeout_before(deadline: float | None, wall_timeout: float, now: float) -> float:
    """Return the maximum time of a program that starts now, so that its output arrives by the deadline."""
    if deadline is None:
        return wall_timeout
    remaining_s = deadline - now
    stop_allowance_s = min(STOP_ALLOWANCE_S, remaining_s / 4)
    return max(MIN_RUN_TIMEOUT_S, min(wall_timeout, remaining_s - stop_allowance_s))


def _run_timeout_before(deadline: float | None, run_timeout: float, now: float) -> float:
    """Return the timeout of a program that starts now, so that it has this CPU time before the deadline."""
    return min(run_timeout, timeout_within(_wall_timeout_before(deadline, max_wall_time(run_timeout), now)))


_local_limiters: dict[tuple[str, int], LocalLimiter] = {}
"""Limits of this process, shared by all sandboxes with the same endpoints."""
os.register_at_fork(after_in_child=_local_limiters.clear)


def _local_limiter(resource: str, workers: int) -> LocalLimiter:
    key = resource, workers
    limiter = _local_limiters.get(key)
    return limiter or _local_limiters.setdefault(key, LocalLimiter(workers, f"{resource} (num_workers)"))
