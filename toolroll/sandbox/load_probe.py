"""Load probe: measures how many concurrent executions a sandbox can handle.

    async with LoadProbe("http://10.0.0.1:8080") as probe:
        await probe.inspect_server()
        steps: list[LoadStep] = []
        while concurrency := next_concurrency(steps, 512):
            steps.append(await probe.measure(concurrency))
        print(conclude(steps).knee)

The probe doubles the concurrency until throughput stops growing or executions fail. It then refines the knee: the
smallest concurrency with nearly the best throughput, beyond which executions only wait longer. The URL can be that of
any SandboxFusion server or of a load balancer.

The decisions are pure functions of the steps measured so far. `LoadProbe` does the measuring, without retries, which
would hide overload.
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

from toolroll._internal.text import replace_lone_surrogates
from toolroll.errors import ConfigError, InfraFault, SandboxRefused, SandboxUnavailable
from toolroll.http import HttpRequest, RetryPolicy
from toolroll.sandbox.client import EXECUTION_OVERHEAD_S, SandboxClient
from toolroll.sandbox.execution import Execution, ExecutionOutcome, read_execution, shorten_error
from toolroll.sandbox.protocol import Language, Ping, RunCodeRequest

MIN_GROWTH = 0.05
"""Minimum relative increase of throughput that counts as growth. The knee is within this fraction of the best."""
MAX_FAILURE_FRACTION = 0.01
"""Maximum fraction of failed executions in a clean step, such as one lost connection among thousands."""
KNEE_PRECISION = 1.125
"""Ratio of neighbouring concurrencies at which the knee is precise enough."""
MAX_REFINEMENTS = 6
"""Maximum number of steps that refine the knee, however noisy the measurements are."""
SLICES_PER_STEP = 10
"""Number of slices of a step, whose differences are the noise of the measurement."""
WARM_UP_FRACTION = 0.25
"""Minimum duration of the warm-up, as a fraction of the step's duration."""
ERROR_PAUSE_S = 0.1
"""Pause after a failed execution, which keeps the probe from flooding an overloaded server."""
PING_TIMEOUT_S = 3.0
PING_COUNT = 5
"""Number of pings from which the most precise clock offset is taken."""


@dataclass(frozen=True, kw_only=True)
class LoadStep:
    """Measurement at one concurrency. Times are in seconds."""

    concurrency: int
    throughput: float
    """Successful executions per second."""
    noise: float = 0.0
    """Standard error of the throughput."""
    p50: float = 0.0
    p99: float = 0.0
    executions: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Number of failed executions by kind of error."""
    own_cpu: float = 0.0
    """CPU utilisation of this process. Near 1, the probe is the bottleneck instead of the server."""

    @property
    def failures(self) -> int:
        """Number of failed executions."""
        return sum(self.errors.values())

    @property
    def is_clean(self) -> bool:
        """True if the server handled the load."""
        return self.throughput > 0 and self.failures <= MAX_FAILURE_FRACTION * (self.executions + self.failures)


class ProbeEnd(StrEnum):
    """Reason why the probe stopped raising the concurrency."""

    FLAT = "flat"
    """Throughput stopped growing."""
    ERRORS = "errors"
    """Executions failed."""
    MAXIMUM = "maximum"
    """The maximum concurrency was reached. Throughput may still have been growing."""


@dataclass(frozen=True, kw_only=True)
class ProbeConclusion:
    """Result of a probe."""

    knee: LoadStep | None
    """Smallest concurrency with nearly the best throughput. None if executions failed at every concurrency."""
    best: LoadStep | None
    """Step with the highest throughput without errors."""
    end: ProbeEnd


def next_concurrency(steps: Sequence[LoadStep], maximum: int) -> int | None:
    """Return the concurrency to measure next, or None if the knee is known precisely enough.

    The result is at most `maximum` and below every concurrency that failed.
    """
    doublings = _doublings(steps, maximum)
    if not doublings:
        return 1
    failed = _lowest_failed(steps)
    if failed is None and not _is_flat(doublings) and doublings[-1].concurrency < maximum:
        return min(2 * doublings[-1].concurrency, maximum)
    conclusion = conclude(steps)
    if conclusion.knee is None or len(steps) - len(doublings) >= MAX_REFINEMENTS:
        return None
    knee_at = conclusion.knee.concurrency
    measured = [step.concurrency for step in steps]
    below = max((concurrency for concurrency in measured if concurrency < knee_at), default=0)
    above = min((concurrency for concurrency in measured if concurrency > knee_at), default=0)
    if above == failed and (between := _between(knee_at, above)):
        return between  # throughput grew up to the first failure, so look for the highest concurrency that works
    if below and (between := _between(below, knee_at)):
        return between
    # No other concurrency confirms a peak, so measure it twice.
    is_unconfirmed_peak = conclusion.best == conclusion.knee and measured.count(knee_at) == 1 and knee_at > 1
    return knee_at if is_unconfirmed_peak else None


def conclude(steps: Sequence[LoadStep]) -> ProbeConclusion:
    """Return the conclusion from at least one step."""
    if _lowest_failed(steps) is not None:
        end = ProbeEnd.ERRORS
    elif _is_flat(_doublings(steps, max(step.concurrency for step in steps))):
        end = ProbeEnd.FLAT
    else:
        end = ProbeEnd.MAXIMUM
    usable = _usable(steps)
    best = max(usable, key=lambda step: step.throughput, default=None)
    return ProbeConclusion(knee=_knee(usable, best) if best else None, best=best, end=end)


def latest_steps(steps: Sequence[LoadStep]) -> list[LoadStep]:
    """Return the last step of each concurrency, ordered by concurrency.

    A concurrency is measured again because its first result looked good, so the first result is biased.
    """
    return sorted({step.concurrency: step for step in steps}.values(), key=lambda step: step.concurrency)


def throughput_by_slice(
    executions: Sequence[tuple[float, float]], start: float, end: float, slices: int = SLICES_PER_STEP
) -> list[float]:
    """Return the executions per second in each slice of the time from `start` to `end`.

    Args:
        executions: Start and end time of each execution. An execution counts in each slice by the part of it that lies
            in the slice, so the result does not depend on whether executions end just before or just after `end`.
        start: Start of the first slice.
        end: End of the last slice.
        slices: Number of slices.
    """
    width = (end - start) / slices
    rates = [0.0] * slices
    for started, ended in executions:
        ended = max(ended, started + 1e-9)
        first, last = (int((moment - start) // width) for moment in (started, ended))
        for index in range(max(first, 0), min(last, slices - 1) + 1):
            slice_start = start + index * width
            inside = min(ended, slice_start + width) - max(started, slice_start)
            rates[index] += max(inside, 0.0) / (ended - started) / width
    return rates


def _knee(usable: Sequence[LoadStep], best: LoadStep) -> LoadStep:
    """Return the usable step of the smallest concurrency with nearly the best throughput.

    The best of many noisy measurements is biased upwards, so noise counts in favour of the smaller concurrency, up to
    a limit.
    """

    def is_near_best(step: LoadStep) -> bool:
        allowance = min(math.hypot(step.noise, best.noise), MIN_GROWTH * best.throughput)
        return step.throughput >= (1 - MIN_GROWTH) * best.throughput - allowance

    return next(filter(is_near_best, usable))


def _doublings(steps: Sequence[LoadStep], maximum: int) -> list[LoadStep]:
    """Return the steps at powers of two and at the maximum."""
    return [step for step in latest_steps(steps) if step.concurrency.bit_count() == 1 or step.concurrency == maximum]


def _is_flat(doublings: Sequence[LoadStep]) -> bool:
    """Return True if throughput grew in neither of the last two steps by more than the noise."""

    def grew(index: int) -> bool:
        step, best = doublings[index], max(doublings[:index], key=lambda step: step.throughput)
        gain = step.throughput - best.throughput
        return gain >= MIN_GROWTH * best.throughput and gain > math.hypot(step.noise, best.noise)

    return len(doublings) >= 3 and not any(grew(index) for index in (len(doublings) - 2, len(doublings) - 1))


def _lowest_failed(steps: Sequence[LoadStep]) -> int | None:
    return min((step.concurrency for step in steps if not step.is_clean), default=None)


def _usable(steps: Sequence[LoadStep]) -> list[LoadStep]:
    """Return the latest steps below the lowest concurrency that failed."""
    failed = _lowest_failed(steps)
    return [step for step in latest_steps(steps) if failed is None or step.concurrency < failed]


def _between(low: int, high: int) -> int | None:
    """Return a concurrency about half-way, or None if the two are near enough."""
    if high - low < 2 or high / low <= KNEE_PRECISION:
        return None
    return min(max(round(math.sqrt(low * high)), low + 1), high - 1)


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Properties of a server, as far as it reports them. SandboxFusion reports none. Times are in seconds."""

    alone: float
    """Latency of one execution without concurrent load."""
    version: str = ""
    tier: str = ""
    capacity: int | None = None
    clock: float | None = None
    """Offset of the server's clock, positive if it is ahead."""
    clock_error: float | None = None
    """Maximum error of the offset: half of the round-trip time."""


class LoadProbe:
    """Measures the throughput of one server under load.

    Args:
        url: URL of the server. A trailing `/run_code`, as in verl's settings, is ignored.
        code: Program to run. It should be similar to those that the server will run later.
        language: Language of the program.
        token: Bearer token of the server.
        seconds: Duration of a step. Steps take longer if executions do.
        timeout: Timeout of the program and of its compiler, in seconds. An execution without a response soon after
            counts as failed.
        maximum: Maximum concurrency.

    Raises:
        ConfigError: If the URL or the language is invalid.
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
        self.client = SandboxClient(url, token=token, max_connections=maximum)
        if language not in get_args(Language):
            raise ConfigError(f"Unknown language {language!r}. Available languages: {', '.join(get_args(Language))}.")
        program = {"code": replace_lone_surrogates(code), "language": language}
        request = RunCodeRequest.model_validate({**program, "run_timeout": timeout, "compile_timeout": timeout})
        # Without a deadline, which a server with a wrong clock would reject, and without an idempotency key.
        self._body = request.model_dump(mode="json", exclude_none=True)
        self._timeout_s = 2 * timeout + EXECUTION_OVERHEAD_S
        self._step_s = seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.client.close()

    async def inspect_server(self) -> ServerFacts:
        """Read the properties of the server, and run the program without concurrent load.

        Raises:
            ConfigError: If the server cannot be used or the program fails.
        """
        try:
            ping, clock, clock_error = await self._measure_clock()
            await self._run_checked()  # warm-up
            started = time.monotonic()
            await self._run_checked()
        except InfraFault as fault:
            raise ConfigError(str(fault)) from fault
        return ServerFacts(
            alone=time.monotonic() - started,
            version=ping.version,
            tier=ping.tier,
            capacity=ping.capacity or None,
            clock=clock if ping.time else None,
            clock_error=clock_error if ping.time else None,
        )

    async def measure(self, concurrency: int) -> LoadStep:
        """Measure the throughput while `concurrency` executions are always in flight."""
        executions: list[tuple[float, float]] = []
        errors: Counter[str] = Counter()
        warming_up = concurrency
        all_warm, is_over = asyncio.Event(), asyncio.Event()

        async def keep_busy() -> None:
            nonlocal warming_up
            is_first = True
            while not is_over.is_set():
                started = time.monotonic()
                if error := await self._run():
                    errors[error] += 1
                else:
                    executions.append((started, time.monotonic()))
                warming_up -= is_first
                is_first = False
                if not warming_up:
                    all_warm.set()
                if error:
                    await asyncio.sleep(ERROR_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(keep_busy())
            await asyncio.sleep(WARM_UP_FRACTION * self._step_s)
            await all_warm.wait()
            start, cpu_start = time.monotonic(), time.process_time()
            await asyncio.sleep(self._step_s)
            end, cpu_s = time.monotonic(), time.process_time() - cpu_start
            is_over.set()
        counted = [(started, ended) for started, ended in executions if ended > start and started < end]
        latencies = sorted(ended - started for started, ended in counted)
        rates = throughput_by_slice(counted, start, end)
        return LoadStep(
            concurrency=concurrency,
            throughput=fmean(rates),
            noise=stdev(rates) / math.sqrt(len(rates)),
            p50=_quantile(latencies, 0.5),
            p99=_quantile(latencies, 0.99),
            executions=len(counted),
            errors=dict(errors.most_common()),
            own_cpu=cpu_s / (end - start),
        )

    async def _measure_clock(self) -> tuple[Ping, float, float]:
        """Return the server's state, the offset of its clock, and the maximum error of the offset."""
        ping, offset, error = Ping(), 0.0, math.inf
        for _ in range(PING_COUNT):
            sent_at, started = time.time(), time.monotonic()
            try:
                ping = await self.client.ping(deadline=started + PING_TIMEOUT_S)
            except SandboxRefused:
                break  # a gateway may only forward /run_code
            half_s = (time.monotonic() - started) / 2
            if half_s < error:
                offset, error = ping.time - (sent_at + half_s), half_s
        return ping, offset, error

    async def _run_checked(self) -> None:
        execution = await self.client.http.send(self._request())
        if execution.outcome is not ExecutionOutcome.OK:
            reason = shorten_error(execution.stderr.strip()) or f"return code {execution.return_code}"
            raise ConfigError(f"The program fails without concurrent load ({execution.outcome}): {reason}")

    async def _run(self) -> str | None:
        """Run the program once. Return the kind of the error, or None."""
        request = self._request()
        try:
            execution = await self.client.http.send(request)
        except SandboxUnavailable:
            failure = request.history.last_failure
            return failure.reason.partition(":")[0] if failure else "no response"
        except SandboxRefused:
            return "rejected"
        # The program succeeded without load, so the load made it fail.
        return None if execution.outcome is ExecutionOutcome.OK else f"program: {execution.outcome}"

    def _request(self) -> HttpRequest[Execution]:
        policy = RetryPolicy(deadline=time.monotonic() + self._timeout_s, max_attempts=1)
        return HttpRequest("/run_code", read_execution, policy, body=lambda _: self._body)


def _quantile(sorted_values: Sequence[float], fraction: float) -> float:
    index = min(int(fraction * len(sorted_values)), len(sorted_values) - 1)
    return sorted_values[index] if sorted_values else 0.0
