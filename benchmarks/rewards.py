"""Measure the overhead of grading over sending the same programs to the same sandbox directly.

    python benchmarks/rewards.py [--quick] [--json]

The batch consists of solutions with 20 test cases each, of programs and of functions: correct ones, wrong ones, some
that crash, a few that never end. Every case runs. `wrong_scores` counts the scores that differ from the intended ones.
`vs_bare_sandbox` is the time for grading divided by the time for the same requests, prepared beforehand and sent by a
plain HTTP client with the same concurrency that checks only the status. The two alternate, a quarter of the batch at a
time. `in_flight_most` is the maximum that the server reported when it was polled.

Exits with status 1 if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import aiohttp
import orjson
import uvloop
from report import report

from toolroll.rewards.cases import Cases, read_cases
from toolroll.rewards.grader import CodeGrader, GraderSettings, Solution
from toolroll.sandbox.client import SandboxClient

CASES_PER_SOLUTION = 20
MAX_IN_FLIGHT = 16
PARTS = 4
ENDLESS_PROGRAM_TIMEOUT_S = 0.5
BOUNDS: dict[str, Callable[[float], bool]] = {
    "wrong_scores": lambda value: value == 0,
    "vs_bare_sandbox": lambda value: value < 1.3,
    "in_flight_most": lambda value: value <= MAX_IN_FLIGHT,
}


class ExpectedGrade(NamedTuple):
    """An answer, its cases, and the score that it must get."""

    answer: str
    cases: Cases
    score: float
    truth: dict[str, Any]
    """The cases, as in a data set."""


PROGRAM = "n = int(input())\n{extra}\nprint('sum', sum(range(n)))"
FUNCTION = """
class Solution:
    def total(self, n: int, more: List[int]) -> int:
        {extra}
        return sum(range(n))
"""
DEFECTS: list[tuple[str, Callable[[int], bool]]] = [
    ("pass", lambda n: False),
    ("pass", lambda n: False),
    ("n += n % 4 == 0", lambda n: n % 4 == 0),
    ("1 // (n % 5)", lambda n: n % 5 == 0),
    ("print('noise')", lambda n: False),
]
"""A line of a solution, and the inputs for which it makes the solution fail. The last one only affects programs."""


def batch(count: int) -> Iterator[ExpectedGrade]:
    """Yield solutions of every kind in turn."""
    numbers = range(1, CASES_PER_SOLUTION + 1)
    for number in range(count):
        as_program = bool(number % 2)
        is_endless = number % 64 == 13
        line, fails = DEFECTS[number // 2 % len(DEFECTS)]
        if is_endless:
            line, fails = "while n == 7: pass", lambda n: n == 7
        failed = [fails(n) or (as_program and "noise" in line) for n in numbers]
        totals = [sum(range(n)) for n in numbers]
        truth = {
            "inputs": [f"{n}\n" if as_program else [n, [number]] for n in numbers],
            "outputs": [f"sum {total}\n" if as_program else total for total in totals],
            **({} if as_program else {"fn_name": "total"}),
            **({"timeout": ENDLESS_PROGRAM_TIMEOUT_S} if is_endless else {}),
        }
        code = (PROGRAM if as_program else FUNCTION).format(extra=line)
        score = failed.count(False) / CASES_PER_SOLUTION
        yield ExpectedGrade(f"Here:\n```python\n# {number}\n{code}\n```\n", read_cases(truth), score, truth)


def requests_of(part: list[ExpectedGrade], settings: GraderSettings) -> list[bytes]:
    """Return the requests that the grader sends for these solutions, in the same order."""
    solutions = [Solution(one.answer, one.cases, settings) for one in part]
    bodies = []
    for case in range(CASES_PER_SOLUTION):
        for solution in solutions:
            run = solution.prepare(solution.cases[case])
            texts = {"code": run.code, "stdin": run.stdin, "language": "python"}
            bodies.append(orjson.dumps({**texts, "run_timeout": solution.timeout, "compile_timeout": 10}))
    return bodies


async def send_directly(url: str, bodies: list[bytes]) -> float:
    """Send the requests with a plain HTTP client and return the time in seconds."""
    remaining = iter(bodies)
    headers = {"Content-Type": "application/json"}

    async def work(session: aiohttp.ClientSession) -> None:
        for body in remaining:
            async with session.post(f"{url}/run_code", data=body) as response:
                assert response.status == 200
                await response.read()

    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=MAX_IN_FLIGHT)) as session:
        started_at = time.perf_counter()
        await asyncio.gather(*(work(session) for _ in range(MAX_IN_FLIGHT)))
        return time.perf_counter() - started_at


async def watch(url: str, seen: list[int]) -> None:
    """Poll the number of requests at the server."""
    async with SandboxClient(url) as client:
        while True:
            ping = await client.ping()
            seen.append(ping.running + ping.waiting)
            await asyncio.sleep(0.25)


async def grade_timed(grader: CodeGrader, part: list[ExpectedGrade]) -> tuple[float, int]:
    """Grade the answers. Return the time in seconds, and the number of wrong scores."""
    started_at = time.perf_counter()
    grades = await grader.grade_all([(one.answer, one.cases) for one in part])
    seconds = time.perf_counter() - started_at
    return seconds, sum(grade.score != one.score for grade, one in zip(grades, part, strict=True))


async def measure(url: str, count: int) -> dict[str, float]:
    """Return all figures."""
    settings = GraderSettings(sandbox_fusion_url=(url,), rate_limit=MAX_IN_FLIGHT, continuous=True)
    grader, everything = CodeGrader(settings), list(batch(count))
    await grade_timed(grader, everything[:2])  # connections, caches
    grading_s = direct_s = 0.0
    wrong, seen = 0, [0]
    for number in range(PARTS):
        part = everything[number::PARTS]
        bodies = requests_of(part, settings)
        if number % 2:
            direct_s += await send_directly(url, bodies)
        watching = asyncio.create_task(watch(url, seen))
        seconds, wrong_here = await grade_timed(grader, part)
        watching.cancel()
        grading_s, wrong = grading_s + seconds, wrong + wrong_here
        if not number % 2:
            direct_s += await send_directly(url, bodies)
    return {
        "solutions": count,
        "cases": count * CASES_PER_SOLUTION,
        "wrong_scores": wrong,
        "in_flight_most": max(seen),
        "cases_per_s": round(count * CASES_PER_SOLUTION / grading_s, 1),
        "cases_per_s_bare": round(count * CASES_PER_SOLUTION / direct_s, 1),
        "vs_bare_sandbox": round(grading_s / direct_s, 3),
    }


@contextmanager
def serving() -> Iterator[str]:
    command = [sys.executable, "-m", "toolroll.cli", "sandbox", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        try:
            yield next(found[1] for line in process.stdout if (found := re.search(r"serving on (\S+)", line)))
        finally:
            process.send_signal(signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 solutions instead of 512")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with serving() as url:
        figures = uvloop.run(measure(url, 64 if options.quick else 512))
    report(figures, BOUNDS, as_json=options.json)


if __name__ == "__main__":
    main()
