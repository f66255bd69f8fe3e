"""Cost of one limit for the whole cluster, compared with the original design and with bare Ray calls.

    python benchmarks/limiter.py [--quick] [--json]

Four processes share a limit of 32. `contended`: the demand is twice the limit and each execution takes 20 ms, so the
ideal rate is 1,600 per second. `uncontended`: the demand is a quarter of the limit, and each execution takes 1 ms. An
execution counts as `overtaken` if another one that was submitted more than 2 ms later, in any process, started earlier.
`added_p99_ms_uncontended` excludes the time for which a thread was ready to run and waited for a processor. The ledger
is also measured alone, with 4,000 simulated holders on one core.

Four processes also use an HTTP service through an adaptive limit, through a rate and through a budget. The service
(tests/limiter/service.py) shares no code with the limiter, and the figures are computed from the requests that it
received. Its capacity changes from 32 to 8 and back; then it rejects everything. While the rate and the budget apply,
processes are killed.

Without `--quick` the benchmark also measures other limits and draws docs/images/limiter.png. A figure out of bounds is
measured up to three times, because other processes on the machine can disturb a measurement. The exit status is 1 if a
figure stays out of bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import original_limiter
import ray
from report import report

from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.ledger.lease import LeasedSlots
from toolroll.limiter.ledger.ledger import Ledger
from toolroll.limiter.ledger.policy import LimitPolicy
from toolroll.limiter.limiter import LocalLimiter

LIMIT, PROCESSES, EXECUTION_S = 32, 4, 0.02
MANY_WAITERS, MANY_HOLDERS = 100_000, 4000
RPM, RATE_WINDOW_S, BUDGET = 1800, 10.0, 1500
MAX_MEASUREMENTS = 3
RATE_MEASURE_S, RATE_PARTS = 20.0, 5
"""Period in which a rate is used undisturbed, and the number of its parts, of which the median utilisation counts."""

MIN_STEP_S = 10.0
"""Minimum time of measurement after each step. A step down causes a burst of about 100 refused requests."""
BOUNDS: dict[str, Callable[[float], bool]] = {
    "rpcs_per_execution_uncontended": lambda value: value <= 0.001,
    "rpcs_per_execution_contended": lambda value: value <= 0.05,
    "throughput_vs_ideal": lambda value: 0.90 <= value <= 1.05,
    "throughput_vs_original": lambda value: value >= 1.8,
    "overtaken_fraction": lambda value: value <= 0.05,
    "added_p99_ms_uncontended": lambda value: value <= 1.0,
    "adaptive_throughput_vs_ideal": lambda value: 0.9 <= value <= 1.1,
    "adaptive_refused_fraction": lambda value: value <= 0.02,
    "rejecting_endpoint_requests_per_s": lambda value: value <= 1.0,
    "rate_utilisation": lambda value: 0.95 <= value <= 1.05,
    "rate_overshoot": lambda value: value <= 1.05,
    "budget_overshoot": lambda value: 0.98 <= value <= 1.0,
}

Executions = list[tuple[float, float]]
"""Submission time and start time of each execution."""


class Ours:
    """A process that uses toolroll's limiter from coroutines."""

    def __init__(self, name: str, limit: int) -> None:
        self._limiter = ClusterLimiter(name, limit)

    async def warm_up(self) -> None:
        """Acquire a slot once, so that the limiter runs."""
        async with self._limiter.slot(hold=1.0):
            pass

    async def run(self, concurrency: int, duration: float, begin: float, end: float) -> tuple[Executions, int]:
        """Run executions until `end`. Return those submitted after `begin`, and the number of reports since."""
        runs: Executions = []
        executions = [self._execute_until(end, runs, duration) for _ in range(concurrency)]
        await asyncio.gather(*executions, self._count_reports(begin))
        return [run for run in runs if run[0] >= begin], self._limiter.reports_sent - self._reports_before

    async def _count_reports(self, begin: float) -> None:
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        self._reports_before = self._limiter.reports_sent

    async def _execute_until(self, end: float, runs: Executions, duration: float) -> None:
        while (submitted := time.monotonic()) < end:
            async with self._limiter.slot(hold=1.0):
                runs.append((submitted, time.monotonic()))
                await asyncio.sleep(duration)


def _sleep(seconds: float) -> float:
    """Sleep and return the start time."""
    start = time.monotonic()
    time.sleep(seconds)
    return start


class OursUncontended(Ours):
    """The same process, without the time for which it was ready to run and waited for a processor.

    A wait takes tens of microseconds, and four processes share the processors, so that pre-emption would dominate.
    """

    async def _execute_until(self, end: float, runs: Executions, duration: float) -> None:
        with Path("/proc/thread-self/schedstat").open("rb", buffering=0) as schedstat:

            def runnable_s() -> float:
                return int(os.pread(schedstat.fileno(), 100, 0).split()[1]) / 1e9

            while (submitted := time.monotonic()) < end:
                before = runnable_s()
                async with self._limiter.slot(hold=1.0):
                    runs.append((submitted, time.monotonic() - (runnable_s() - before)))
                    await asyncio.sleep(duration)


class Theirs:
    """A process that uses the original design: a worker runs the executions, with two remote calls each."""

    def __init__(self, name: str, limit: int) -> None:
        remote: Any = ray.remote
        worker = remote(original_limiter.Worker).options(max_concurrency=2 * limit, num_cpus=0)
        self._worker = worker.remote(name, limit)

    async def warm_up(self) -> None:
        """Run one execution, so that the worker runs."""
        await self._worker.execute.remote(_sleep, 0.0)

    async def run(self, concurrency: int, duration: float, begin: float, end: float) -> tuple[Executions, int]:
        """Run executions until `end`. Return those submitted after `begin`, and the number of remote calls."""
        runs: Executions = []
        await asyncio.gather(*(self._execute_until(end, runs, duration) for _ in range(concurrency)))
        counted = [run for run in runs if run[0] >= begin]
        return counted, 3 * len(counted)

    async def _execute_until(self, end: float, runs: Executions, duration: float) -> None:
        while (submitted := time.monotonic()) < end:
            runs.append((submitted, await self._worker.execute.remote(_sleep, duration)))


def load(
    kind: type, name: str, limit: int, concurrency: int, seconds: float, duration: float = EXECUTION_S
) -> tuple[Executions, int, float]:
    """Return the executions of all processes, the number of remote calls, and the executions per second."""
    remote: Any = ray.remote
    processes = [remote(num_cpus=0)(kind).remote(name, limit) for _ in range(PROCESSES)]
    ray.get([process.warm_up.remote() for process in processes])
    begin = time.monotonic() + 1.5  # the shares have settled by then
    parts = ray.get([process.run.remote(concurrency, duration, begin, begin + seconds) for process in processes])
    for process in processes:
        ray.kill(process)
    runs = sorted(run for part, _ in parts for run in part)
    return runs, sum(calls for _, calls in parts), len(runs) / seconds


def overtaken(runs: Executions) -> float:
    """Return the fraction of executions that were overtaken by one submitted more than 2 ms later.

    `runs` is in order of submission.
    """
    submitted = [run[0] for run in runs]
    earliest_from = [run[1] for run in runs]
    for number in range(len(runs) - 2, -1, -1):
        earliest_from[number] = min(earliest_from[number], earliest_from[number + 1])
    later = (bisect_right(submitted, moment + 0.002) for moment, _ in runs)
    return sum(at < len(runs) and earliest_from[at] < run[1] for at, run in zip(later, runs, strict=True)) / len(runs)


def waits_ms(runs: Executions) -> list[float]:
    """Return the waiting time of each execution, in milliseconds."""
    return [(started - submitted) * 1000 for submitted, started in runs]


def many_waiters() -> dict[str, Any]:
    """Measure 100,000 coroutines that wait for the slots of one queue."""
    order: list[int] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def main() -> float:
        limiter = LocalLimiter(LIMIT)

        async def one(number: int) -> None:
            async with limiter.slot():
                order.append(number)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(one(number)) for number in range(MANY_WAITERS)]
        start = time.monotonic()
        await asyncio.gather(*tasks)
        return time.monotonic() - start

    elapsed = asyncio.run(main())
    if order != sorted(order):
        sys.exit("waiters were overtaken in one process")
    return {
        "waiters": len(order),
        "waiters_grants_per_second": round(len(order) / elapsed),
        "waiters_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
    }


def many_holders() -> dict[str, Any]:
    """Measure one ledger with 4,000 holders under contention."""
    ledger, now = Ledger(LimitPolicy.fixed(MANY_HOLDERS * 2)), 0.0
    holders = [LeasedSlots(f"holder {number}") for number in range(MANY_HOLDERS)]
    reports, divisions, answers = [], [], []
    for turn in range(6):
        now += 1.0
        messages = [
            holder.report(now, in_use=holder.usable(now), wants=2 + (number + turn) % 4, hold=30.0)
            for number, holder in enumerate(holders)
        ]
        start = time.perf_counter()
        for message in messages:
            ledger.report(message, now)
        reports.append((time.perf_counter() - start) / MANY_HOLDERS * 1e6)
        start = time.perf_counter()
        ledger.divide(now)
        divisions.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        leases = [ledger.answer(holder.holder, due=True) for holder in holders]
        answers.append((time.perf_counter() - start) / MANY_HOLDERS * 1e6)
        for holder, lease in zip(holders, leases, strict=True):
            if lease is not None:
                holder.apply(lease)
    return {
        "holders": MANY_HOLDERS,
        "ledger_us_per_report": round(statistics.median(reports), 2),
        "ledger_us_per_answer": round(statistics.median(answers), 2),
        "ledger_ms_per_tick": round(statistics.median(divisions), 2),
        "ledger_reports_per_second_asked_for": round(MANY_HOLDERS / ledger.renewal_interval),
        "ledger_lease_seconds": ledger.ttl,
    }


def bare_calls() -> int:
    """Return the number of sequential calls per second to a Ray actor that does nothing."""
    semaphore = original_limiter.semaphore("bare", 1)
    ray.get(semaphore.current.remote())
    start, calls = time.monotonic(), 500
    for _ in range(calls):
        ray.get(semaphore.current.remote())
    return round(calls / (time.monotonic() - start))


def measure(seconds: float) -> dict[str, Any]:
    """Measure all figures."""
    ideal = LIMIT / EXECUTION_S
    figures: dict[str, Any] = {**many_waiters(), **many_holders(), "bare_ray_calls_per_second": bare_calls()}
    theirs, their_calls, their_rate = load(Theirs, f"theirs {time.time()}", LIMIT, 2 * LIMIT // PROCESSES, seconds)
    ours, calls, rate = load(Ours, f"ours {time.time()}", LIMIT, 2 * LIMIT // PROCESSES, seconds)
    demand = LIMIT // PROCESSES // 4
    easy, easy_calls, _ = load(OursUncontended, f"easy {time.time()}", LIMIT, demand, seconds, duration=0.001)
    figures |= {
        "executions_per_second_ideal": round(ideal),
        "executions_per_second": round(rate),
        "executions_per_second_original": round(their_rate),
        "throughput_vs_ideal": round(rate / ideal, 3),
        "throughput_vs_original": round(rate / their_rate, 2),
        "rpcs_per_execution_contended": round(calls / len(ours), 5),
        "rpcs_per_execution_uncontended": round(easy_calls / len(easy), 5),
        "rpcs_per_execution_original": round(their_calls / len(theirs), 5),
        "overtaken_fraction": round(overtaken(ours), 4),
        "overtaken_fraction_original": round(overtaken(theirs), 4),
        "wait_p99_ms_contended": round(statistics.quantiles(waits_ms(ours), n=100)[98], 1),
        "wait_p99_ms_contended_original": round(statistics.quantiles(waits_ms(theirs), n=100)[98], 1),
        "added_p99_ms_uncontended": round(statistics.quantiles(waits_ms(easy), n=100)[98], 3),
    }
    return figures


def measure_service(use_service: Any, seconds: float) -> dict[str, Any]:
    """Measure some figures of processes that use an HTTP service, as counted by the service."""
    from free_port import free_port

    from tests.limiter.service_client import running_service, start_here

    start = partial(start_here, env={"RAY_ADDRESS": ray.get_runtime_context().gcs_address})
    with (
        tempfile.TemporaryDirectory(prefix="service-") as folder,
        running_service(start_here, "127.0.0.1", free_port(), Path(folder)) as service,
    ):
        return dict(use_service(service, start, seconds))


def adaptive_limit(service: Any, start: Any, seconds: float) -> dict[str, Any]:
    """Change the capacity of the service, then let it reject everything."""
    from tests.limiter import service_scenarios as scenarios
    from tests.limiter.service_figures import refused_fraction

    with scenarios.adaptive_loads(service, f"adaptive {time.time()}") as loads:
        loads.start_all([start] * PROCESSES)
        capacities = scenarios.CAPACITY, scenarios.LOW_CAPACITY, scenarios.CAPACITY
        steps = scenarios.step_capacity(service, capacities, max(seconds, MIN_STEP_S))
        refused = refused_fraction(service.requests())
        rejection = scenarios.reject_everything(service, 3 * seconds)
    return {
        "adaptive_throughput_vs_ideal": round(min(step.throughput_vs_ideal for step in steps), 3),
        "adaptive_refused_fraction": round(refused, 4),
        "adaptive_oscillation": round(max(step.oscillation for step in steps), 3),
        "rejecting_endpoint_requests_per_s": round(rejection.requests_per_s, 3),
        "rejecting_endpoint_recovered_throughput": round(rejection.throughput_vs_ideal, 3),
    }


def rate(service: Any, start: Any, seconds: float) -> dict[str, Any]:
    """Use the service at a rate, first undisturbed, then while a process is killed and replaced."""
    from tests.limiter.service_client import ServiceLoads
    from tests.limiter.service_figures import RateStep, max_rate_ratio, median_utilisation, one_request

    service.set(capacity=1000)
    with ServiceLoads(service, resource=f"rate {time.time()}", limits={"rpm": RPM}, concurrency=12) as loads:
        begin = loads.start_all([start] * PROCESSES) + 2.0
        end = begin + RATE_MEASURE_S
        time.sleep(max(0.0, end - time.time()))
        loads.all[0].kill()
        loads.start(start).wait_until_ready()
        time.sleep(seconds)
        requests, stalls = service.requests(), service.stalls()
    used = median_utilisation(requests, RPM / 60, begin, end, RATE_PARTS, one_request)
    overshoot = max_rate_ratio(requests, [RateStep(0.0, RPM / 60)], RATE_WINDOW_S, one_request, stalls)
    return {"rate_utilisation": round(used, 3), "rate_overshoot": round(overshoot, 3)}


def budget(service: Any, start: Any, _: float) -> dict[str, Any]:
    """Spend a budget, while a process is killed and replaced."""
    from tests.limiter.service_client import ServiceLoads
    from tests.limiter.service_scenarios import slow_requests, wait_for_requests

    service.set(capacity=1000)
    limits = {"limit": 16, "budget": {"calls": BUDGET}}
    with ServiceLoads(service, resource=f"budget {time.time()}", limits=limits, concurrency=16) as loads:
        with slow_requests(service):
            loads.start_all([start] * PROCESSES)
        wait_for_requests(service, BUDGET // 10)
        loads.all[0].kill()
        if len(service.requests()) >= BUDGET:
            sys.exit("the budget was spent before a process was killed")
        with slow_requests(service):
            loads.start(start).wait_until_ready()
        for load in loads.all[1:]:
            load.result(timeout=120)
    return {"budget_overshoot": round(len(service.requests()) / BUDGET, 4)}


def measure_in_bounds(measure_part: Any, seconds: float) -> dict[str, Any]:
    """Repeat a measurement until it is within bounds, at most `MAX_MEASUREMENTS` times."""
    for _ in range(MAX_MEASUREMENTS):
        figures: dict[str, Any] = measure_part(seconds)
        if all(is_within(figures[name]) for name, is_within in BOUNDS.items() if name in figures):
            break
    return figures


def draw(path: Path) -> None:
    """Draw the executions per second at several limits, with leases and in the original design."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    limits = [8, 16, 32, 64]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(limits, [limit / EXECUTION_S for limit in limits], "--", color="0.6", label="ideal")
    for kind, label in ((Ours, "leases"), (Theirs, "original: two calls per execution")):
        rates = [load(kind, f"{label} {limit}", limit, 2 * limit // PROCESSES, 4.0)[2] for limit in limits]
        axes.plot(limits, rates, "o-", label=label)
    axes.set(xlabel="limit", ylabel="executions per second", xticks=limits, ylim=(0, None))
    axes.set_title(f"{PROCESSES} processes, {EXECUTION_S * 1000:.0f} ms per execution, demand twice the limit")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure for a shorter time and draw no picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # for Ray's workers
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init("local", num_cpus=4, object_store_memory=10**8, **quiet)
    sys.path.append(str(here.parent))  # for tests.limiter
    figures = measure_in_bounds(measure, 4.0 if options.quick else 12.0)
    for use_service in (adaptive_limit, rate, budget):
        figures |= measure_in_bounds(partial(measure_service, use_service), 3.0 if options.quick else 12.0)
    if not options.quick:
        draw(here.parent / "docs/images/limiter.png")
    ray.shutdown()
    report(figures, BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
