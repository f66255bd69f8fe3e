"""Run the lanes of the test suite, and print how many tests each had, how long it took and what failed.

A lane is a marker of pytest (see `markers` in pyproject.toml); `engines` is several, and `bench` runs the benchmarks.
Lanes run in parallel if the machine has enough cores. What follows `--` is passed to pytest:

    python scripts/run_lanes.py
    python scripts/run_lanes.py unit ray
    python scripts/run_lanes.py unit -- --hypothesis-profile=nightly
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
BENCHMARKS = (
    "tools",
    "mcp_client",
    "limiter",
    "sandbox",
    "rewards",
    "rollout",
    "records",
    "replay",
    "cluster",
    "trl",
    "formats",
    "images",
)
CORES = os.cpu_count() or 1
# Lanes that share a server of SGLang, which takes a minute to start.
ENGINES = ("sglang", "trl", "verl")
# Number of cores that a lane uses. Those that measure time use all, so that nothing runs beside them.
LANES = dict.fromkeys(("unit", "process", "viewer", "sandbox"), 2)
LANES |= dict.fromkeys(("ray", "engines", *ENGINES, "e2e"), 1)  # these wait, often for an engine with one thread
LANES |= {"timing": CORES, "bench": CORES}
# Lanes with two test processes. The others share one Ray cluster or one engine.
IN_PARALLEL = ("unit", "process", "viewer", "sandbox")
NO_TESTS_COLLECTED = 5


@dataclass
class Result:
    """Counts and duration of one lane, and the names of what failed in it."""

    lane: str
    tests: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class FreeCores:
    """The cores that no running lane uses."""

    def __init__(self) -> None:
        self._free = CORES
        self._changed = threading.Condition()

    @contextmanager
    def use(self, count: int) -> Iterator[None]:
        """Wait until `count` cores are free, and use them."""
        count = min(count, CORES)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


def run_tests(lane: str, options: list[str], output: IO[bytes] | None) -> Result:
    """Run the tests of a lane."""
    markers = ENGINES if lane == "engines" else [lane]
    command = [Path(sys.executable).with_name("pytest"), *(f"--lane={marker}" for marker in markers), *options]
    if lane in IN_PARALLEL:
        command += ["--numprocesses", str(LANES[lane]), "--dist", "loadfile"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        report = Path(directory) / "report.xml"
        command += [f"--junitxml={report}"]
        # Ray joins the latest cluster whose address it finds in this directory, also that of another lane.
        environment = {**os.environ, "RAY_TMPDIR": directory}
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, env=environment).returncode
        suite = ET.parse(report).getroot()[0] if report.exists() else ET.Element("testsuite")
    failures = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if status not in (0, NO_TESTS_COLLECTED) and not failures:
        failures = [f"pytest exited with status {status}"]
    counts = suite.attrib
    return Result(lane, int(counts.get("tests", 0)), len(failures), int(counts.get("skipped", 0)), failures=failures)


def run_benchmarks(output: IO[bytes] | None) -> Result:
    """Run all benchmarks in their short form. A benchmark fails if a ratio is out of its bounds."""
    result = Result("bench", tests=len(BENCHMARKS))
    for name in BENCHMARKS:
        command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--quick", "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        os.write(sys.stdout.fileno() if output is None else output.fileno(), done.stdout)
        if done.returncode:
            lines = done.stdout.decode(errors="replace").splitlines() or [f"exited with status {done.returncode}"]
            result.failed += 1
            result.failures.append(f"{name}: {lines[-1]}")
    return result


def run_lane(lane: str, options: list[str], output: IO[bytes] | None) -> Result:
    """Run a lane and measure its duration."""
    began = time.monotonic()
    result = run_benchmarks(output) if lane == "bench" else run_tests(lane, options, output)
    result.seconds = time.monotonic() - began
    return result


def run_lanes(lanes: list[str], options: list[str]) -> list[Result]:
    """Start the lanes in order, each when enough cores are free. The output of a lane is printed when it ends."""
    cores, results = FreeCores(), {}
    started = threading.Semaphore(1)  # keeps the order: a lane does not start before those that precede it
    printing = threading.Lock()

    def run(lane: str) -> None:
        with cores.use(LANES[lane]):
            started.release()
            with tempfile.TemporaryFile() as output:
                results[lane] = run_lane(lane, options, output)
                output.seek(0)
                with printing:
                    print(f"\n=== lane {lane}", flush=True)
                    sys.stdout.buffer.write(output.read())
                    sys.stdout.buffer.flush()

    threads = []
    for lane in lanes:
        started.acquire()
        threads.append(threading.Thread(target=run, args=[lane]))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return [results[lane] for lane in lanes]


def table(results: list[Result], seconds: float) -> str:
    """Return the results as a table with a total."""
    total = Result("total", seconds=seconds)
    for result in results:
        total.tests += result.tests
        total.failed += result.failed
        total.skipped += result.skipped
    rows = [f"{'lane':8} {'tests':>6} {'failed':>7} {'skipped':>8} {'seconds':>8}"]
    rows += [f"{r.lane:8} {r.tests:6} {r.failed:7} {r.skipped:8} {r.seconds:8.0f}" for r in [*results, total]]
    return "\n".join(rows)


def main() -> int:
    """Run the lanes and return the exit status."""
    arguments, options = sys.argv[1:], list[str]()
    if "--" in arguments:
        split = arguments.index("--")
        arguments, options = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lanes", nargs="*", metavar="LANE", help=f"default: all of {', '.join(LANES)}")
    lanes = parser.parse_args(arguments).lanes or [lane for lane in LANES if lane not in ENGINES]
    if unknown := set(lanes) - set(LANES):
        parser.error(f"unknown lanes: {', '.join(sorted(unknown))}. Expected: {', '.join(LANES)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for commands in the background
    # Programs that the tests start by name are those of this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    began = time.monotonic()
    results = [run_lane(lanes[0], options, None)] if len(lanes) == 1 else run_lanes(lanes, options)
    print("\n" + table(results, time.monotonic() - began), flush=True)
    for result in results:
        for failure in result.failures:
            print(f"failed in {result.lane}: {failure}", flush=True)
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
