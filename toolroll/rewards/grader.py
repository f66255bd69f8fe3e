"""CodeGrader: scores of solutions, by running them against test cases.

    grader = CodeGrader(GraderSettings(sandbox_fusion_url="http://10.0.0.1:8080", rate_limit=32))
    grade = await grader.grade(answer, read_cases({"inputs": ["3 4"], "outputs": ["7"]}))
    grade.score                                                       # 1.0, 0.0, or None

It promises:

- A score is the solution's own doing. What the sandbox did, or the limiter, is no score: it is None, never 0. Where all
  cases must pass, one that really failed decides, whatever became of the others.
- Every case's result is its own. No solution's doing touches another's.
- All cases of all solutions run concurrently, within the runner's limit, in as many tasks as that allows and no more.
  The first cases of all solutions go first, then the second ones: where all must pass, the rest of a solution that has
  failed isn't run.
- A sandbox that is down doesn't hold anybody up for hours: when twice as many cases in a row as run at once came to
  nothing, over all calls of a grader, then only one is tried every now and again until one comes through.
- A cancelled `grade` or `grade_all` leaves none of its tasks behind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field, field_validator

from toolroll.errors import InfraFault, SandboxRefused
from toolroll.rewards.cases import AssertCase, CallCase, Case, Cases, StdinCase, checked_language
from toolroll.rewards.comparison import first_difference, lines_of, same_value
from toolroll.rewards.fence import last_block
from toolroll.rewards.harness import Harness, Run
from toolroll.runner import CodeRunner, RunnerSettings
from toolroll.sandbox.execution import Execution, Outcome

logger = logging.getLogger(__name__)

MORE_THAN_RUN = 2
"""How many cases wait for a slot beside those that run, so that none is ever idle."""
SHOWN = 200
"""Characters of an output, a value or an error that a result's detail shows."""
PROBED = 5.0
"""Seconds between two cases that find out whether a sandbox that was down is up again."""
BETWEEN_WARNINGS = 30.0
"""Seconds between two log lines about the infrastructure."""


class GraderSettings(RunnerSettings):
    """How solutions are graded."""

    timeout: float = Field(default=10, gt=0, allow_inf_nan=False)
    """Seconds for a case. A ground truth's own goes before it."""
    language: str = "python"
    """Of the solutions. A ground truth's own goes before it."""
    continuous: bool = False
    """The score is the fraction of the cases that pass, and not 1 for all of them and else 0."""
    float_tolerance: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """How far a number may be from the expected one: this much of it, or of 1 where it is smaller than that."""

    @field_validator("language")
    @classmethod
    def _known(cls, given: str) -> str:
        return checked_language(given)


class Verdict(StrEnum):
    """What became of a case."""

    PASSED = "passed"
    WRONG = "wrong"
    """It ran, and said something else than was expected."""
    FAILED = "failed"
    """It crashed, or said nothing."""
    TIMEOUT = "timeout"
    COMPILE_FAILED = "compile_failed"
    OUT_OF_MEMORY = "out_of_memory"
    SKIPPED = "skipped"
    """It wasn't run, as it couldn't have changed the score any more."""
    INFRA = "infra"
    """The sandbox or the limiter failed; nothing is known of the solution."""

    @property
    def decides(self) -> bool:
        """Whether the solution failed here."""
        return self not in (Verdict.PASSED, Verdict.SKIPPED, Verdict.INFRA)


@dataclass(frozen=True)
class CaseResult:
    """What became of a case, in figures and in words."""

    verdict: Verdict
    detail: str = ""
    """What a person would want to know: what came instead of what, the end of stderr."""
    execution_time: float = 0.0
    queue_wait: float = 0.0
    """Seconds until this process had its slot."""
    attempts: int = 0


@dataclass(frozen=True)
class Grade:
    """What became of a solution."""

    score: float | None
    """None where the infrastructure failed: nothing to learn from."""
    cases: tuple[CaseResult, ...]
    program: str
    """What was run: the code in the answer."""


def score_of(verdicts: Sequence[Verdict], continuous: bool) -> float | None:
    """The score, from what became of the cases. Their order is of no account."""
    if not continuous and any(verdict.decides for verdict in verdicts):
        return 0.0
    if Verdict.INFRA in verdicts:
        return None
    return verdicts.count(Verdict.PASSED) / len(verdicts)


class Agenda:
    """Which case is run next, and what became of each. Pure: no clock, no I/O.

    Solutions take turns, a case each. A case that can't change its solution's score is skipped: after a failure where
    all must pass, after a fault of the infrastructure where the fraction counts.
    """

    def __init__(self, counts: Sequence[int], *, continuous: bool) -> None:
        self.results = [[CaseResult(Verdict.INFRA, "not run")] * count for count in counts]
        """Of each solution. Whatever is left out by mistake leaves it without a score, not with a wrong one."""
        self._continuous = continuous
        self._turns = deque((solution, 0) for solution, count in enumerate(counts) if count)
        self._decided = [False] * len(counts)

    def next(self) -> tuple[int, int] | None:
        """The solution and the case to be run next; None when there is no more to do."""
        while self._turns:
            solution, case = self._turns.popleft()
            if self._decided[solution]:
                results = self.results[solution]
                results[case:] = [CaseResult(Verdict.SKIPPED)] * (len(results) - case)
                continue
            if case + 1 < len(self.results[solution]):
                self._turns.append((solution, case + 1))
            return solution, case
        return None

    def note(self, solution: int, case: int, result: CaseResult) -> None:
        """What became of a case."""
        self.results[solution][case] = result
        if result.verdict is Verdict.INFRA if self._continuous else result.verdict.decides:
            self._decided[solution] = True

    def score(self, solution: int) -> float | None:
        """A solution's score, when all is done."""
        return score_of([result.verdict for result in self.results[solution]], self._continuous)


class Streak:
    """Faults of the infrastructure in a row. Pure: the clock is the caller's.

    After `enough` of them nothing more is tried, but for one case every `PROBED` seconds.
    """

    def __init__(self, enough: int) -> None:
        self.length = 0
        self._enough = enough
        self._next = 0.0

    def may_try(self, now: float) -> bool:
        """Whether there is hope for a case."""
        if self.length < self._enough:
            return True
        if now < self._next:
            return False
        self._next = now + PROBED
        return True

    def note(self, is_fault: bool) -> None:
        """A case was tried."""
        self.length = self.length + 1 if is_fault else 0


class Solution:
    """A program and its cases, as they are run."""

    def __init__(self, answer: str, cases: Cases, settings: GraderSettings) -> None:
        self.language = cases.language or settings.language
        self.timeout = cases.timeout or settings.timeout
        self.program = last_block(answer, self.language)
        self.cases = cases.cases
        self._harnesses: dict[str | None, Harness] = {}
        if self.language != "python" and any(isinstance(case, CallCase) for case in self.cases):
            raise ValueError(f"fn_name is for Python only, and the language is {self.language!r}")

    def begin(self, case: Case) -> Run:
        """The program for a case, and what it reads. Without a marker where no harness is around it."""
        match case:
            case StdinCase():
                return Run(self.program, case.stdin, "")
            case CallCase():
                return self._harness(case.fn_name).begin(case.arguments)
            case AssertCase() if self.language == "python":
                return self._harness(None).begin(case.code)
            case AssertCase():
                return Run(f"{self.program}\n\n{case.code}\n", "", "")

    def _harness(self, fn_name: str | None) -> Harness:
        if fn_name not in self._harnesses:
            self._harnesses[fn_name] = Harness(self.program, fn_name)
        return self._harnesses[fn_name]


def judge(case: Case, run: Run, execution: Execution, tolerance: float | None = None) -> tuple[Verdict, str]:
    """What a program did, held against what was expected of it. With the detail for a person."""
    match execution.outcome:
        case Outcome.OK:
            pass
        case Outcome.COMPILE_TIMEOUT:
            return Verdict.COMPILE_FAILED, "the compiler ran out of time"
        case outcome:
            ended = f"return code {execution.return_code}" if outcome is Outcome.FAILED else outcome.replace("_", " ")
            return Verdict(outcome), _with_end(ended, execution.stderr or execution.stdout)
    match case:
        case StdinCase():
            return _judge_output(case, execution, tolerance)
        case AssertCase():
            reached = not run.marker or run.said(execution.stdout) == "true"
            return (Verdict.PASSED, "") if reached else _unsaid("all asserts had run", execution)
        case CallCase():
            return _judge_value(case, run, execution, tolerance)


def _judge_output(case: StdinCase, execution: Execution, tolerance: float | None) -> tuple[Verdict, str]:
    line = first_difference(execution.stdout, case.expected, tolerance)
    if line is None:
        return Verdict.PASSED, ""
    ours, theirs = lines_of(execution.stdout), lines_of(case.expected)
    if execution.stdout_truncated and _may_go_on(ours, theirs, line, exactly=tolerance is None):
        return Verdict.INFRA, _too_long(execution)
    got, expected = ("nothing" if line >= len(lines) else _shown(lines[line]) for lines in (ours, theirs))
    return Verdict.WRONG, f"line {line + 1}: got {got}, expected {expected}"


def _may_go_on(kept: list[str], expected: list[str], line: int, *, exactly: bool) -> bool:
    """Whether output of which only the beginning was kept may be right, where that is all one knows: as far as it goes
    it is, and more is expected than was kept. A program that writes on and on is wrong, and finds no way out here."""
    if line >= len(expected) or line < len(kept) - 1:
        return False
    # The cut may go through a character, or through a number that is right within the tolerance.
    return line == len(kept) or not exactly or expected[line].startswith(kept[line].rstrip("\ufffd"))


def _judge_value(case: CallCase, run: Run, execution: Execution, tolerance: float | None) -> tuple[Verdict, str]:
    said = run.said(execution.stdout)
    if said is None:
        if execution.stdout_truncated and len(json.dumps(case.expected)) > len(execution.stdout.encode()):
            return Verdict.INFRA, _too_long(execution)
        return _unsaid(f"{case.fn_name} had returned", execution)
    try:
        value = json.loads(said)
    except (ValueError, RecursionError) as error:  # only a program that wrote it itself comes to this
        return Verdict.FAILED, f"what {case.fn_name} returned can't be read: {error}"
    if any(same_value(value, one, tolerance) for one in (case.expected, *case.also)):
        return Verdict.PASSED, ""
    return Verdict.WRONG, f"got {_shown(value)}, expected {_shown(case.expected)}"


def _unsaid(what: str, execution: Execution) -> tuple[Verdict, str]:
    return Verdict.FAILED, _with_end(f"it ended before {what}", execution.stderr)


def _too_long(execution: Execution) -> str:
    return f"{execution.endpoint} keeps less of a program's output than is expected of it (option --output-kb)"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _with_end(said: str, text: str) -> str:
    """What is to be said, and the end of what the program wrote."""
    text = text.strip()
    end = text if len(text) <= SHOWN else f"…{text[-SHOWN:]}"
    return f"{said}: {end}" if end else said


class CodeGrader:
    """Grades solutions. Any event loop may use it, and it pickles."""

    def __init__(self, settings: GraderSettings) -> None:
        self.settings = settings
        self.runner = CodeRunner(settings)
        self._at_once = self.runner.workers + MORE_THAN_RUN
        self._streak = Streak(2 * self._at_once)
        self._warned = float("-inf")
        self._faults = 0

    async def grade(self, solution: str, cases: Cases) -> Grade:
        """The grade of one answer."""
        return (await self.grade_all([(solution, cases)]))[0]

    async def grade_all(self, solutions: Sequence[tuple[str, Cases]]) -> list[Grade]:
        """The grades of all, in order. Raises ValueError, before anything runs, where cases don't fit the language."""
        given = [Solution(answer, cases, self.settings) for answer, cases in solutions]
        counts = [len(solution.cases) for solution in given]
        agenda = Agenda(counts, continuous=self.settings.continuous)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._at_once, sum(counts))):
                tasks.create_task(self._work(agenda, given))
        return [
            Grade(agenda.score(number), tuple(agenda.results[number]), solution.program)
            for number, solution in enumerate(given)
        ]

    async def _work(self, agenda: Agenda, solutions: Sequence[Solution]) -> None:
        while (turn := agenda.next()) is not None:
            solution, case = turn
            if self._streak.may_try(time.monotonic()):
                result = await self._result(solutions[solution], case)
            else:
                result = CaseResult(Verdict.INFRA, f"not tried: the last {self._streak.length} came to nothing")
            agenda.note(solution, case, result)

    async def _result(self, solution: Solution, case: int) -> CaseResult:
        try:
            result = await self._run(solution, solution.cases[case])
            self._streak.note(False)
            return result
        except InfraFault as fault:
            self._streak.note(not isinstance(fault, SandboxRefused))  # which is this request's alone
            return self._fault(fault)
        except Exception as error:  # a fault of ours: it mustn't cost the others their grades, nor this one a 0
            logger.exception("Case %d could not be graded", case)
            return CaseResult(Verdict.INFRA, f"{type(error).__name__}: {error}")

    async def _run(self, solution: Solution, case: Case) -> CaseResult:
        run = solution.begin(case)
        execution, waited, _ = await self.runner.run(
            run.code, solution.language, stdin=run.stdin, run_timeout=solution.timeout
        )
        verdict, detail = judge(case, run, execution, self.settings.float_tolerance)
        return CaseResult(verdict, detail, execution.execution_time, waited, execution.attempts)

    def _fault(self, fault: InfraFault) -> CaseResult:
        """Also says so, once in a while: a sandbox that is down would fill the log."""
        self._faults += 1
        if time.monotonic() - self._warned > BETWEEN_WARNINGS:
            logger.warning(
                "The infrastructure failed, so %d cases could not be graded and their solutions have no score: %s",
                self._faults,
                fault,
            )
            self._warned, self._faults = time.monotonic(), 0
        waited, attempts = fault.metrics.get("queue_wait", 0.0), fault.metrics.get("attempts", 0)
        return CaseResult(Verdict.INFRA, f"{type(fault).__name__}: {fault}", 0.0, waited, attempts)

    def __reduce__(self) -> tuple[type[CodeGrader], tuple[GraderSettings]]:
        return CodeGrader, (self.settings,)
