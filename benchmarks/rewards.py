"""What grading costs, beside sending the same programs to the same sandbox with nothing around it.

    python benchmarks/rewards.py [--quick] [--json]

A batch of solutions with 20 test cases each, of programs and of functions: right ones, wrong ones, some that crash, a
few that never end. Every case runs. `wrong_scores` counts the scores that are not what the batch was made to have.
`vs_bare_sandbox` is the time that grading took over the time for the same requests, prepared beforehand and sent by a
plain HTTP client at the same concurrency, which looks at the status only. Both are done in turns, a quarter of the
batch each. `in_flight_most` is what the server said when it was asked now and then.

Ends with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import aiohttp
import orjson
import uvloop

from toolroll.rewards.cases import Cases, read_cases
from toolroll.rewards.grader import CodeGrader, GraderSettings, Solution
from toolroll.sandbox.client import SandboxClient

CASES = 20
AT_ONCE = 16
PARTS = 4
TIME_OF_THE_SLOW = 0.5
BOUNDS: dict[str, Callable[[float], bool]] = {
    "wrong_scores": lambda value: value == 0,
    "vs_bare_sandbox": lambda value: value < 1.3,
    "in_flight_most": lambda value: value <= AT_ONCE,
}


class Graded(NamedTuple):
    """An answer, its cases, and the score that it must have."""

    answer: str
    cases: Cases
    score: float


PROGRAM = "n = int(input())\n{extra}\nprint('sum', sum(range(n)))"
FUNCTION = """
class Solution:
    def total(self, n: int, more: List[int]) -> int:
        {extra}
        return sum(range(n))
"""
SPOILT: list[tuple[str, Callable[[int], bool]]] = [
    ("pass", lambda n: False),
    ("pass", lambda n: False),
    ("n += n % 4 == 0", lambda n: n % 4 == 0),
    ("1 // (n % 5)", lambda n: n % 5 == 0),
    ("print('noise')", lambda n: False),
]
"""A line of a solution, and in which cases it fails by it. The last one spoils a program, but no function."""


def batch(count: int) -> Iterator[Graded]:
    """Solutions of every kind, one after another."""
    numbers = range(1, CASES + 1)
    for number in range(count):
        as_program = bool(number % 2)
        slow = number % 64 == 13
        line, fails = SPOILT[number // 2 % len(SPOILT)]
        if slow:
            line, fails = "while n == 7: pass", lambda n: n == 7
        spoilt = [fails(n) or (as_program and "noise" in line) for n in numbers]
        totals = [sum(range(n)) for n in numbers]
        truth = {
            "inputs": [f"{n}\n" if as_program else [n, [number]] for n in numbers],
            "outputs": [f"sum {total}\n" if as_program else total for total in totals],
            **({} if as_program else {"fn_name": "total"}),
            **({"timeout": TIME_OF_THE_SLOW} if slow else {}),
        }
        code = (PROGRAM if as_program else FUNCTION).format(extra=line)
        yield Graded(f"Here:\n```python\n# {number}\n{code}\n```\n", read_cases(truth), (CASES - sum(spoilt)) / CASES)


def requests_of(part: list[Graded], settings: GraderSettings) -> list[bytes]:
    """What the grader sends for these, in its order."""
    solutions = [Solution(one.answer, one.cases, settings) for one in part]
    bodies = []
    for case in range(CASES):
        for solution in solutions:
            run = solution.begin(solution.cases[case])
            texts = {"code": run.code, "stdin": run.stdin, "language": "python"}
            bodies.append(orjson.dumps({**texts, "run_timeout": solution.timeout, "compile_timeout": 10}))
    return bodies


async def bare(url: str, bodies: list[bytes]) -> float:
    """Seconds for these requests, and no more than is needed to send them."""
    left = iter(bodies)
    headers = {"Content-Type": "application/json"}

    async def work(session: aiohttp.ClientSession) -> None:
        for body in left:
            async with session.post(f"{url}/run_code", data=body) as response:
                assert response.status == 200
                await response.read()

    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(work(session) for _ in range(AT_ONCE)))
        return time.perf_counter() - began


async def watch(url: str, seen: list[int]) -> None:
    """How many are at the server, now and then."""
    async with SandboxClient(url) as client:
        while True:
            ping = await client.ping()
            seen.append(ping.running + ping.waiting)
            await asyncio.sleep(0.25)


async def graded(grader: CodeGrader, part: list[Graded]) -> tuple[float, int]:
    """Seconds for these, and how many scores are wrong."""
    began = time.perf_counter()
    grades = await grader.grade_all([(one.answer, one.cases) for one in part])
    seconds = time.perf_counter() - began
    return seconds, sum(grade.score != one.score for grade, one in zip(grades, part, strict=True))


async def measure(url: str, count: int) -> dict[str, float]:
    """Everything that is printed."""
    settings = GraderSettings(sandbox_fusion_url=(url,), rate_limit=AT_ONCE, continuous=True)
    grader, everything = CodeGrader(settings), list(batch(count))
    await graded(grader, everything[:2])  # connections, caches
    ours = bares = 0.0
    wrong, seen = 0, [0]
    for number in range(PARTS):
        part = everything[number::PARTS]
        bodies = requests_of(part, settings)
        if number % 2:
            bares += await bare(url, bodies)
        watching = asyncio.create_task(watch(url, seen))
        seconds, wrong_here = await graded(grader, part)
        watching.cancel()
        ours, wrong = ours + seconds, wrong + wrong_here
        if not number % 2:
            bares += await bare(url, bodies)
    return {
        "solutions": count,
        "cases": count * CASES,
        "wrong_scores": wrong,
        "in_flight_most": max(seen),
        "cases_per_s": round(count * CASES / ours, 1),
        "cases_per_s_bare": round(count * CASES / bares, 1),
        "vs_bare_sandbox": round(ours / bares, 3),
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
    parser.add_argument("--quick", action="store_true", help="256 solutions instead of 512")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with serving() as url:
        figures = uvloop.run(measure(url, 256 if options.quick else 512))
    print(json.dumps(figures) if options.json else "\n".join(f"{name:20} {value}" for name, value in figures.items()))
    if broken := [name for name, holds in BOUNDS.items() if not holds(figures[name])]:
        sys.exit(f"out of bounds: {', '.join(broken)}")


if __name__ == "__main__":
    main()
