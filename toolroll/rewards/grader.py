"""Score solutions by running them against test cases in a sandbox.

    grader = CodeGrader(GraderSettings(sandbox_fusion_url="http://10.0.0.1:8080", rate_limit=32))
    grade = await grader.grade(answer, read_cases({"inputs": ["3 4"], "outputs": ["7"]}))
    grade.score                                                       # 1.0, 0.0, or None

Invariants:

- A score depends only on the solution. A failure of the sandbox or the limiter gives None, never 0. If all cases must
  pass, one case that really failed gives 0, whatever happened to the others.
- Each case has its own result, and no solution influences the result of another.
- Cases of all solutions run concurrently, within the limit of the sandbox, and in about as many tasks as the limit
  allows. The first cases of all solutions run first, then the second ones. If all cases must pass, the remaining cases
  of a failed solution are skipped.
- A sandbox that is down does not block callers for long: after twice as many consecutive failures as cases run at once,
  counted over all calls of a grader, only one case every `PROBE_INTERVAL_S` is sent until one succeeds.
- A cancelled `grade` or `grade_all` leaves no tasks behind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any

from pydantic import Field

from toolroll._internal.code_fences import extract_program
from toolroll._internal.text import shorten
from toolroll.errors import InfraFault, SandboxRefused
from toolroll.rewards.cases import AssertCase, CallCase, Case, Cases, KnownLanguage, StdinCase
from toolroll.rewards.comparison import comparable_lines, first_difference, same_value
from toolroll.rewards.harness import Harness, HarnessRun
from toolroll.sandbox.execution import Execution, ExecutionOutcome
from toolroll.sandbox.limited import LimitedSandbox, LimitedSandboxSettings

logger = logging.getLogger(__name__)

EXTRA_QUEUED_CASES = 2
"""Number of cases that wait for a slot in addition to the running ones, so that no slot is ever idle."""
MAX_SHOWN_CHARS = 200
"""Maximum number of characters of an output, a value or an error in the detail of a result."""
PROBE_INTERVAL_S = 5.0
"""Interval between two cases that test whether a sandbox that was down is available again."""
FAULT_LOG_INTERVAL_S = 30.0
"""Minimum interval between two log lines about infrastructure failures."""


class GraderSettings(LimitedSandboxSettings):
    """Settings of a grader."""

    timeout: float = Field(default=10, gt=0, allow_inf_nan=False)
    """Timeout for one case, in seconds. The ground truth may override it."""
    language: KnownLanguage = "python"
    """Language of the solutions. The ground truth may override it."""
    continuous: bool = False
    """True for the fraction of cases that pass as the score, False for 1 if all cases pass and 0 otherwise."""
    float_tolerance: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Maximum difference to an expected number x, as a fraction of max(1, |x|)."""


class Verdict(StrEnum):
    """The result of a case."""

    PASSED = "passed"
    WRONG = "wrong"
    """The program ran, and its output or return value differs from the expected one."""
    FAILED = "failed"
    """The program crashed or returned nothing."""
    TIMEOUT = "timeout"
    COMPILE_FAILED = "compile_failed"
    OUT_OF_MEMORY = "out_of_memory"
    SKIPPED = "skipped"
    """The case was not run, because it could not change the score."""
    INFRA = "infra"
    """The sandbox or the limiter failed, so the result is unknown."""

    @property
    def is_failure(self) -> bool:
        """True if the solution failed the case."""
        return self not in (Verdict.PASSED, Verdict.SKIPPED, Verdict.INFRA)


@dataclass(frozen=True)
class CaseResult:
    """The verdict on one case, with details."""

    verdict: Verdict
    detail: str = ""
    """Explanation for people: the actual and the expected value, or the end of stderr."""
    execution_time: float = 0.0
    """Run time of the program, in seconds."""
    queue_wait: float = 0.0
    """Time until this process got its slot, in seconds."""
    attempts: int = 0
    """Number of requests that were sent to the sandbox."""


@dataclass(frozen=True)
class Grade:
    """The result of one solution."""

    score: float | None
    """Number from 0 to 1, or None if the infrastructure failed. Exclude None from the loss."""
    cases: tuple[CaseResult, ...]
    program: str
    """The program that was run: the code in the answer."""


def score_of(verdicts: Sequence[Verdict], continuous: bool) -> float | None:
    """Return the score of a solution. The order of the verdicts does not matter."""
    if not continuous and any(verdict.is_failure for verdict in verdicts):
        return 0.0
    if Verdict.INFRA in verdicts:
        return None
    return verdicts.count(Verdict.PASSED) / len(verdicts)


class CaseSchedule:
    """Decides which case runs next, and collects the results. Pure: no clock, no I/O.

    Solutions take turns, with one case each. A case that cannot change the score of its solution is skipped: after a
    failure if all cases must pass, after an infra fault if the score is a fraction.

    Args:
        counts: Number of cases of each solution.
        continuous: Whether the score is a fraction.
    """

    def __init__(self, counts: Sequence[int], *, continuous: bool) -> None:
        self.results = [[CaseResult(Verdict.INFRA, "not run")] * count for count in counts]
        """Results of each solution. A case that is missed by mistake leaves its solution without a score."""
        self._continuous = continuous
        rounds = range(max(counts, default=0))
        self._turns = ((solution, case) for case in rounds for solution, count in enumerate(counts) if case < count)
        self._decided = [False] * len(counts)

    def next(self) -> tuple[int, int] | None:
        """Return the solution and the case to run next, or None if no case is left."""
        for solution, case in self._turns:
            if not self._decided[solution]:
                return solution, case
            self.results[solution][case] = CaseResult(Verdict.SKIPPED)
        return None

    def record(self, solution: int, case: int, result: CaseResult) -> None:
        """Record the result of a case."""
        self.results[solution][case] = result
        if result.verdict is Verdict.INFRA if self._continuous else result.verdict.is_failure:
            self._decided[solution] = True

    def score(self, solution: int) -> float | None:
        """Return the score of a solution after all cases have been run or skipped."""
        return score_of([result.verdict for result in self.results[solution]], self._continuous)


class FailureStreak:
    """Counts consecutive infra faults. Pure: the caller passes the time.

    Args:
        threshold: Number of faults after which only one case every `PROBE_INTERVAL_S` is allowed.
    """

    def __init__(self, threshold: int) -> None:
        self.length = 0
        self._threshold = threshold
        self._next_probe = 0.0

    def allows_attempt(self, now: float) -> bool:
        """Return True if a case may be sent to the sandbox."""
        if self.length < self._threshold:
            return True
        if now < self._next_probe:
            return False
        self._next_probe = now + PROBE_INTERVAL_S
        return True

    def record(self, is_fault: bool) -> None:
        """Record the outcome of an attempt."""
        self.length = self.length + 1 if is_fault else 0


class Solution:
    """A program and its cases, with the settings that apply to them.

    Args:
        answer: The model's answer, with the program in it.
        cases: The test cases.
        settings: Settings of the grader.

    Raises:
        ValueError: If the cases require another language.
    """

    def __init__(self, answer: str, cases: Cases, settings: GraderSettings) -> None:
        self.language = cases.language or settings.language
        self.timeout = cases.timeout or settings.timeout
        self.program = extract_program(answer, self.language)
        self.cases = cases.cases
        self._harness = cache(partial(Harness, self.program))
        if self.language != "python" and any(isinstance(case, CallCase) for case in self.cases):
            raise ValueError(f"fn_name requires the language 'python', got {self.language!r}")

    def prepare(self, case: Case) -> HarnessRun:
        """Return the program to run for a case, and its input."""
        match case:
            case StdinCase():
                return HarnessRun(self.program, case.stdin, "")
            case CallCase():
                return self._harness(case.fn_name).prepare(case.arguments)
            case AssertCase() if self.language == "python":
                return self._harness(None).prepare(case.code)
            case AssertCase():
                return HarnessRun(f"{self.program}\n\n{case.code}\n", "", "")


def judge(case: Case, run: HarnessRun, execution: Execution, tolerance: float | None = None) -> tuple[Verdict, str]:
    """Compare the execution of a program with the expectation of a case.

    Returns:
        The verdict, and a detail for people.
    """
    outcome = execution.outcome
    if outcome is ExecutionOutcome.COMPILE_TIMEOUT:
        return Verdict.COMPILE_FAILED, "the compiler timed out"
    if outcome is not ExecutionOutcome.OK:
        code = execution.return_code
        message = f"return code {code}" if outcome is ExecutionOutcome.FAILED else outcome.replace("_", " ")
        return Verdict(outcome), _with_last_output(message, execution.stderr or execution.stdout)
    match case:
        case StdinCase():
            return _judge_output(case, execution, tolerance)
        case AssertCase():
            if not run.marker or run.result(execution.stdout) == "true":
                return Verdict.PASSED, ""
            return _ended_early("all asserts had run", execution)
        case CallCase():
            return _judge_value(case, run, execution, tolerance)


def _judge_output(case: StdinCase, execution: Execution, tolerance: float | None) -> tuple[Verdict, str]:
    index = first_difference(execution.stdout, case.expected, tolerance)
    if index is None:
        return Verdict.PASSED, ""
    got, expected = comparable_lines(execution.stdout), comparable_lines(case.expected)
    if execution.stdout_truncated and _may_be_correct(got, expected, index, exact=tolerance is None):
        return Verdict.INFRA, _output_limit_too_low(execution)
    got_line, expected_line = (_shorten(lines[index]) if index < len(lines) else "nothing" for lines in (got, expected))
    return Verdict.WRONG, f"line {index + 1}: got {got_line}, expected {expected_line}"


def _may_be_correct(kept: list[str], expected: list[str], index: int, *, exact: bool) -> bool:
    """Return True if truncated output may be correct: it matches as far as it was kept, and more is expected.

    A program cannot avoid a wrong verdict by printing without end.
    """
    if index >= len(expected) or index < len(kept) - 1:
        return False
    # The output may be truncated within a character, or within a number that is correct given the tolerance.
    return index == len(kept) or not exact or expected[index].startswith(kept[index].rstrip("\ufffd"))


def _judge_value(case: CallCase, run: HarnessRun, execution: Execution, tolerance: float | None) -> tuple[Verdict, str]:
    result = run.result(execution.stdout)
    if result is None:
        if execution.stdout_truncated and len(json.dumps(case.expected)) > len(execution.stdout.encode()):
            return Verdict.INFRA, _output_limit_too_low(execution)
        return _ended_early(f"{case.fn_name} had returned", execution)
    try:
        value = json.loads(result)
    except (ValueError, RecursionError) as error:  # only possible if the program wrote the result itself
        return Verdict.FAILED, f"the return value of {case.fn_name} is not valid JSON: {error}"
    if any(same_value(value, accepted, tolerance) for accepted in (case.expected, *case.alternatives)):
        return Verdict.PASSED, ""
    return Verdict.WRONG, f"got {_shorten(value)}, expected {_shorten(case.expected)}"


def _ended_early(milestone: str, execution: Execution) -> tuple[Verdict, str]:
    return Verdict.FAILED, _with_last_output(f"the program ended before {milestone}", execution.stderr)


def _output_limit_too_low(execution: Execution) -> str:
    return f"{execution.endpoint} keeps less output than the case expects. Raise its option --output-kb."


def _shorten(value: Any) -> str:
    return shorten(repr(value), MAX_SHOWN_CHARS)


def _with_last_output(message: str, output: str) -> str:
    output = output.strip()
    end = output if len(output) <= MAX_SHOWN_CHARS else f"…{output[-MAX_SHOWN_CHARS:]}"
    return f"{message}: {end}" if end else message


class CodeGrader:
    """Grades solutions. Can be used from any event loop, and can be pickled.

    Args:
        settings: Settings of the grader.
    """

    def __init__(self, settings: GraderSettings) -> None:
        self.settings = settings
        self.sandbox = LimitedSandbox(settings)
        self._max_tasks = self.sandbox.workers + EXTRA_QUEUED_CASES
        self._streak = FailureStreak(2 * self._max_tasks)
        self._last_log = float("-inf")
        self._unlogged_faults = 0

    async def grade(self, answer: str, cases: Cases) -> Grade:
        """Grade one answer.

        Args:
            answer: The model's answer, which may contain the program in a code fence.
            cases: The test cases.

        Returns:
            The grade.

        Raises:
            ValueError: If the cases require another language.
        """
        return (await self.grade_all([(answer, cases)]))[0]

    async def grade_all(self, answers: Sequence[tuple[str, Cases]]) -> list[Grade]:
        """Grade a batch of answers concurrently.

        Args:
            answers: Pairs of an answer and its test cases.

        Returns:
            The grades, in the order of the answers.

        Raises:
            ValueError: If cases require another language. Nothing is run then.
        """
        solutions = [Solution(answer, cases, self.settings) for answer, cases in answers]
        counts = [len(solution.cases) for solution in solutions]
        schedule = CaseSchedule(counts, continuous=self.settings.continuous)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._max_tasks, sum(counts))):
                tasks.create_task(self._run_cases(schedule, solutions))
        return [
            Grade(schedule.score(number), tuple(schedule.results[number]), solution.program)
            for number, solution in enumerate(solutions)
        ]

    async def _run_cases(self, schedule: CaseSchedule, solutions: Sequence[Solution]) -> None:
        while (turn := schedule.next()) is not None:
            solution, case = turn
            if self._streak.allows_attempt(time.monotonic()):
                result = await self._run_case(solutions[solution], solutions[solution].cases[case])
            else:
                result = CaseResult(Verdict.INFRA, f"not tried after {self._streak.length} consecutive infra faults")
            schedule.record(solution, case, result)

    async def _run_case(self, solution: Solution, case: Case) -> CaseResult:
        try:
            run = solution.prepare(case)
            ran = await self.sandbox.run(run.code, solution.language, stdin=run.stdin, run_timeout=solution.timeout)
            execution = ran.execution
            verdict, detail = judge(case, run, execution, self.settings.float_tolerance)
            self._streak.record(False)
            return CaseResult(verdict, detail, execution.execution_time, ran.waited, execution.attempts)
        except InfraFault as fault:
            self._streak.record(not isinstance(fault, SandboxRefused))  # a rejection concerns only this request
            self._log_fault(fault)
            queue_wait, attempts = fault.metrics.get("queue_wait", 0.0), fault.metrics.get("attempts", 0)
            return CaseResult(Verdict.INFRA, f"{type(fault).__name__}: {fault}", 0.0, queue_wait, attempts)
        except Exception as error:  # a bug in this package affects neither other grades nor gives a score of 0
            logger.exception("Cannot grade a case")
            return CaseResult(Verdict.INFRA, f"{type(error).__name__}: {error}")

    def _log_fault(self, fault: InfraFault) -> None:
        """Log a fault, with a limited rate: a sandbox that is down would fill the log."""
        self._unlogged_faults += 1
        if time.monotonic() - self._last_log > FAULT_LOG_INTERVAL_S:
            logger.warning(
                "%d cases could not be graded because of infra faults; their solutions have no score. Last fault: %s",
                self._unlogged_faults,
                fault,
            )
            self._last_log, self._unlogged_faults = time.monotonic(), 0

    def __reduce__(self) -> tuple[type[CodeGrader], tuple[GraderSettings]]:
        return CodeGrader, (self.settings,)
