"""Probe: how many executions at once a sandbox can take.

    async with Probe("http://10.0.0.1:8080") as probe:
        await probe.meet()
        steps: list[Step] = []
        while at_once := next_concurrency(steps, 512):
            steps.append(await probe.measure(at_once))
        print(conclude(steps).knee)

It doubles the concurrency until throughput grows no more, or errors begin; then it looks more closely around the knee:
the smallest concurrency that gives nearly the best throughput. What is beyond the knee only makes executions wait.
Any SandboxFusion server can be asked, or several behind one address. The decisions are pure functions of the steps
measured so far; what measures is below them, and tries nothing again, as a retry would hide what is being looked for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, stdev
from typing import Self, get_args

from toolroll.errors import ConfigError, InfraFault, SandboxRefused
from toolroll.sandbox.call import Call, Failure, Pool, short
from toolroll.sandbox.client import MARGIN, SandboxClient
from toolroll.sandbox.execution import Execution, Outcome, read_execution
from toolroll.sandbox.protocol import Language, Ping, RunCodeRequest, scrub_text

GROWTH = 0.05
"""Less than this share more is no growth. The knee is within as much of the best."""
TOLERATED = 0.01
"""The share of executions that may fail: one lost connection among thousands is no limit reached."""
FINENESS = 1.125
"""The knee is known closely enough when what was tried next to it is within this factor."""
REFINEMENTS = 6
"""Most steps to look more closely, however noisy the measurements are."""
SLICES = 10
"""Of a step's time, each a measurement of its own: how they differ tells the noise."""
WARM_UP = 0.25
"""Of a step's time, before it counts, at the least."""
PAUSE = 0.1
"""Seconds after an error, so as not to hammer on a server that is full."""
REACH = 3.0
"""Seconds in which a server must say that it is there."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What came of so many executions at once. Times are in seconds."""

    concurrency: int
    throughput: float
    """Executions per second, without those that failed."""
    noise: float = 0.0
    """The standard error of the throughput."""
    p50: float = 0.0
    p99: float = 0.0
    executions: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """What went wrong → how often."""
    own_cpu: float = 0.0
    """How busy this process was: near 1 it was the probe, not the server, that could do no more."""

    @property
    def failures(self) -> int:
        """How many executions failed."""
        return sum(self.errors.values())

    @property
    def is_clean(self) -> bool:
        """Whether the server could take it."""
        return self.throughput > 0 and self.failures <= TOLERATED * (self.executions + self.failures)


class End(StrEnum):
    """Why the concurrency was raised no further."""

    FLAT = "flat"
    """Throughput grew no more."""
    ERRORS = "errors"
    """Executions failed."""
    MAXIMUM = "maximum"
    """It was not to go higher, though throughput may have grown still."""


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What the steps tell. Without a knee, errors came at every concurrency."""

    knee: Step | None
    best: Step | None
    """The most throughput without errors."""
    end: End


def next_concurrency(steps: Sequence[Step], maximum: int) -> int | None:
    """What to measure next, after these steps; None when the knee is known closely enough.

    Never as many as have failed once, nor more than the maximum.
    """
    rungs = _rungs(steps, maximum)
    if not rungs:
        return 1
    failed = _first_failed(steps)
    if failed is None and not _is_flat(rungs) and rungs[-1].concurrency < maximum:
        return min(2 * rungs[-1].concurrency, maximum)
    found = conclude(steps)
    if found.knee is None or len(steps) - len(rungs) >= REFINEMENTS:
        return None
    here = found.knee.concurrency
    tried = [step.concurrency for step in steps]
    below = max((one for one in tried if one < here), default=0)
    above = min((one for one in tried if one > here), default=0)
    if above == failed and (between := _between(here, above)):
        return between  # throughput grew as far as the server could take it: how far is that?
    if below and (between := _between(below, here)):
        return between
    # To a peak no other concurrency bears witness, so it may have been luck.
    return here if found.best == found.knee and tried.count(here) == 1 and here > 1 else None


def knee(steps: Sequence[Step]) -> Step | None:
    """The smallest concurrency that gives nearly the best throughput, with fewer than at any that failed.

    Of many noisy measurements the best is by luck too good, so noise counts for the smaller one; up to a limit, as it
    mustn't excuse everything.
    """
    usable = _usable(steps)
    if not usable:
        return None
    best = max(usable, key=lambda step: step.throughput)

    def reaches(step: Step) -> bool:
        allowance = min(math.hypot(step.noise, best.noise), GROWTH * best.throughput)
        return step.throughput >= (1 - GROWTH) * best.throughput - allowance

    return next(filter(reaches, usable))


def conclude(steps: Sequence[Step]) -> Conclusion:
    """What the steps tell. There must be one."""
    end = End.FLAT if _is_flat(_rungs(steps, max(step.concurrency for step in steps))) else End.MAXIMUM
    if any(not step.is_clean for step in steps):
        end = End.ERRORS
    best = max(_usable(steps), key=lambda step: step.throughput, default=None)
    return Conclusion(knee=knee(steps), best=best, end=end)


def latest(steps: Sequence[Step]) -> list[Step]:
    """One step for each concurrency, in their order. The first of two was chosen for how good it looked."""
    return sorted({step.concurrency: step for step in steps}.values(), key=lambda step: step.concurrency)


def rates(executions: Sequence[tuple[float, float]], begin: float, end: float, slices: int = SLICES) -> list[float]:
    """Executions per second in each slice of the time from begin to end, from when each began and ended.

    An execution counts in each slice for that part of it which lies there. So nothing depends on whether many end just
    before the time is over or just after, which decides the count where programs are long and in step.
    """
    width = (end - begin) / slices
    found = [0.0] * slices
    for began, ended in executions:
        ended = max(ended, began + 1e-9)
        first, last = (int((moment - begin) // width) for moment in (began, ended))
        for index in range(max(first, 0), min(last, slices - 1) + 1):
            since = begin + index * width
            inside = min(ended, since + width) - max(began, since)
            found[index] += max(inside, 0.0) / (ended - began) / width
    return found


def _rungs(steps: Sequence[Step], maximum: int) -> list[Step]:
    """The steps of the climb: 1, 2, 4 and so on, and the maximum."""
    return [step for step in latest(steps) if step.concurrency.bit_count() == 1 or step.concurrency == maximum]


def _is_flat(rungs: Sequence[Step]) -> bool:
    """Whether neither of the last two brought growth that is more than noise."""

    def grew(index: int) -> bool:
        step, best = rungs[index], max(rungs[:index], key=lambda step: step.throughput)
        gain = step.throughput - best.throughput
        return gain >= GROWTH * best.throughput and gain > math.hypot(step.noise, best.noise)

    return len(rungs) >= 3 and not any(grew(index) for index in (len(rungs) - 2, len(rungs) - 1))


def _first_failed(steps: Sequence[Step]) -> int | None:
    return min((step.concurrency for step in steps if not step.is_clean), default=None)


def _usable(steps: Sequence[Step]) -> list[Step]:
    """The steps below the first that failed."""
    failed = _first_failed(steps)
    return [step for step in latest(steps) if failed is None or step.concurrency < failed]


def _between(low: int, high: int) -> int | None:
    """A concurrency about half-way, where the two are far enough apart for it to matter."""
    if high - low < 2 or high / low <= FINENESS:
        return None
    return min(max(round(math.sqrt(low * high)), low + 1), high - 1)


@dataclass(frozen=True, kw_only=True)
class Acquaintance:
    """What a server says of itself; SandboxFusion's says nothing. Times are in seconds."""

    alone: float
    """How long one execution took, with nothing else of ours there."""
    version: str = ""
    tier: str = ""
    capacity: int | None = None
    clock: float | None = None
    """How far the server's clock is ahead of ours."""
    clock_error: float | None = None
    """By how much that may be wrong: half of the way there and back."""


class Probe:
    """Puts load on one server.

    Args:
        url: Its address. A trailing `/run_code`, as in verl's settings, may stay.
        code: The program to load it with; one like those that it will have to run.
        seconds: How long a step is measured. It takes longer where executions do.
        timeout: Seconds that the program may run, and its compiler. Who has no answer soon after counts as failed.
        maximum: The most at once that will be measured.
    """

    def __init__(
        self,
        url: str,
        code: str = "print(1 + 1)",
        language: str = "python",
        *,
        token: str | None = None,
        seconds: float = 2.0,
        timeout: float = 10.0,
        maximum: int = 512,
    ) -> None:
        self.client = SandboxClient(url, token=token)
        if language not in get_args(Language):
            raise ConfigError(f"There is no language {language!r}. The languages are: {', '.join(get_args(Language))}.")
        program = {"code": scrub_text(code), "language": language}
        request = RunCodeRequest.model_validate({**program, "run_timeout": timeout, "compile_timeout": timeout})
        # No deadline, as a server whose clock is off would refuse everything; no key, as each is to be run.
        self._body = request.model_dump_json(exclude_none=True).encode()
        self._patience = 2 * timeout + MARGIN
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._seconds, self._maximum = seconds, maximum

    async def __aenter__(self) -> Self:
        self._pool = Pool(self.client.endpoints, self._maximum, self._headers)
        await anext(self._pool.keeper)
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.client.close()
        await self._pool.keeper.aclose()

    async def meet(self) -> Acquaintance:
        """Ask the server who it is, and run the program once. Raises ConfigError if that comes to nothing."""
        try:
            ping, clock, error = await self._ask_time()
            await self._run_first()
            began = time.monotonic()
            await self._run_first()
        except InfraFault as fault:
            raise ConfigError(str(fault)) from fault
        capacity = ping.capacity or None
        who = Acquaintance(alone=time.monotonic() - began, version=ping.version, tier=ping.tier, capacity=capacity)
        return who if not ping.time else Acquaintance(**{**vars(who), "clock": clock, "clock_error": error})

    async def measure(self, concurrency: int) -> Step:
        """Keep so many executions going, each followed by the next, and see how many come out."""
        executions: list[tuple[float, float]] = []
        errors: Counter[str] = Counter()
        waiting = concurrency
        all_answered, is_over = asyncio.Event(), asyncio.Event()

        async def keep_busy() -> None:
            nonlocal waiting
            is_first = True
            while not is_over.is_set():
                began = time.monotonic()
                if error := await self._run():
                    errors[error] += 1
                else:
                    executions.append((began, time.monotonic()))
                waiting -= is_first
                is_first = False
                if not waiting:
                    all_answered.set()
                if error:
                    await asyncio.sleep(PAUSE)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(keep_busy())
            await asyncio.sleep(WARM_UP * self._seconds)
            await all_answered.wait()
            begin, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(self._seconds)
            end, cpu = time.monotonic(), time.process_time() - cpu
            is_over.set()
        counted = [(began, ended) for began, ended in executions if ended > begin and began < end]
        latencies = sorted(ended - began for began, ended in counted)
        found = rates(counted, begin, end)
        return Step(
            concurrency=concurrency,
            throughput=fmean(found),
            noise=stdev(found) / math.sqrt(len(found)),
            p50=_quantile(latencies, 0.5),
            p99=_quantile(latencies, 0.99),
            executions=len(counted),
            errors=dict(errors.most_common()),
            own_cpu=cpu / (end - begin),
        )

    async def _ask_time(self) -> tuple[Ping, float, float]:
        """The server's ping, how far its clock is ahead, and the error of that: the best of some attempts."""
        ping, clock, error = Ping(), 0.0, math.inf
        for _ in range(5):
            sent, began = time.time(), time.monotonic()
            try:
                ping = await self.client.ping(deadline=began + REACH)
            except SandboxRefused:
                break  # whether programs can be run is asked next; a gateway may let nothing else through
            half = (time.monotonic() - began) / 2
            if half < error:
                clock, error = ping.time - (sent + half), half
        return ping, clock, error

    async def _run_first(self) -> None:
        try:
            done = await self._attempt()
        except (Failure, TimeoutError) as failure:
            said = failure.what if isinstance(failure, Failure) else f"no answer within {self._patience:g} s"
            raise ConfigError(f"{self.client.endpoints[0]}: {said}") from failure
        if done.outcome is not Outcome.OK:
            said = short(done.stderr.strip()) or f"return code {done.return_code}"
            raise ConfigError(f"The program doesn't work even alone ({done.outcome}): {said}")

    async def _run(self) -> str | None:
        """One execution. What went wrong, in a word or two. A program that worked alone fails only by the load."""
        try:
            done = await self._attempt()
        except Failure as failure:
            return failure.what.partition(":")[0].replace("answered", "HTTP")
        except TimeoutError:
            return "no answer"
        except SandboxRefused:
            return "refused"
        return None if done.outcome is Outcome.OK else f"program: {done.outcome}"

    async def _attempt(self) -> Execution:
        async with asyncio.timeout(self._patience):
            call = Call("/run_code", self._body, time.monotonic() + self._patience)
            return await call.attempt(self._pool, read_execution)


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values; 0 if there are none."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0
