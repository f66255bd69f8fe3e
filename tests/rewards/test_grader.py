"""A score depends only on the solution, whatever the sandbox does and however many are graded at once."""

import asyncio
import logging
import pickle
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox.fault_server import SUCCESS, Behaviour, FaultServer, after, answer, hang, program, raw

from toolroll.errors import ConfigError
from toolroll.rewards.cases import CallCase, Cases, StdinCase, read_cases
from toolroll.rewards.grader import (
    CaseResult,
    CaseSchedule,
    CodeGrader,
    FailureStreak,
    Grade,
    GraderSettings,
    Verdict,
    score_of,
)
from toolroll.sandbox import limited

pytestmark = pytest.mark.virtual_time

ADD = "```python\nprint(sum(map(int, input().split())))\n```"
SUMS = {"inputs": ["3 4", "1 1"], "outputs": ["7", "2"]}
TWO = Cases((StdinCase("", "2"),))
SANDBOX_ERROR = {"status": "SandboxError", "message": "no cgroup left"}


def grader_of(url: str, **settings: Any) -> CodeGrader:
    return CodeGrader(GraderSettings(sandbox_fusion_url=url, **settings))


async def grade_against(*script: Behaviour, cases: Cases = TWO, **settings: Any) -> tuple[Grade, FaultServer]:
    async with FaultServer(script) as server:
        return await grader_of(server.url, **settings).grade("print(2)", cases), server


def verdicts(grade: Grade) -> list[str]:
    return [str(result.verdict) for result in grade.cases]


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the client give up on a sandbox soon."""
    for name in ("QUEUE_ALLOWANCE_S", "EXECUTION_OVERHEAD_S", "COMPILE_TIMEOUT_FLOOR_S"):
        monkeypatch.setattr(limited, name, 0.3)


# Results of programs


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("language", "right", "wrong", "broken"),
    [
        ("python", "a, b = map(int, input().split())\nprint(a + b)", "print(7)", "print("),
        ("bash", 'read a b\necho "$((a + b))"', "echo 7", "exit 3"),
        (
            "cpp",
            "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }",
            '#include <cstdio>\nint main() { puts("7"); }',
            "int main() { return x; }",
        ),
    ],
)
async def test_stdin_cases_in_each_language(
    sandbox_url: str, language: str, right: str, wrong: str, broken: str
) -> None:
    cases = read_cases({**SUMS, "language": language})
    answers = [f"So:\n```{language}\n{code}\n```\n" for code in (right, wrong, broken)]
    every = await grader_of(sandbox_url, continuous=True).grade_all([(answer, cases) for answer in answers])
    assert [grade.score for grade in every] == [1.0, 0.5, 0.0]
    assert verdicts(every[1]) == ["passed", "wrong"]
    assert every[1].cases[1].detail == "line 1: got '7', expected '2'"
    assert verdicts(every[2]) == ["compile_failed" if language == "cpp" else "failed"] * 2
    assert every[0].program == right
    assert all(result.attempts == 1 and result.execution_time > 0 for grade in every for result in grade.cases)


@pytest.mark.sandbox
async def test_asserts_of_other_languages_use_return_code(sandbox_url: str) -> None:
    cases = read_cases({"assert_case": ["[ $(f 2) = 4 ]", "[ $(f 2) = 5 ]"], "language": "sh"})
    grade = await grader_of(sandbox_url, continuous=True).grade("f() { echo $((2 * $1)); }", cases)
    assert (grade.score, verdicts(grade)) == (0.5, ["passed", "failed"])


@pytest.mark.sandbox
async def test_all_or_nothing_is_the_default(sandbox_url: str) -> None:
    cases = read_cases({"inputs": ["1"] * 3, "outputs": ["1", "2", "1"]})
    assert (await grader_of(sandbox_url).grade("print(1)", cases)).score == 0.0
    assert (await grader_of(sandbox_url).grade(ADD, read_cases(SUMS))).score == 1.0


@pytest.mark.sandbox
async def test_time_and_memory_limits(sandbox_url: str) -> None:
    grader = grader_of(sandbox_url, timeout=0.5, memory_limit_mb=64)
    slow = await grader.grade("import time\nprint('so far', flush=True)\ntime.sleep(9)", TWO)
    large = await grader.grade("x = b'x' * 10**9", TWO)
    assert (verdicts(slow), verdicts(large)) == (["timeout"], ["out_of_memory"])
    many = await grader.grade(
        "def f():\n    x = []\n    while True: x.append(str(len(x)))", Cases((CallCase("f", (), 1),), timeout=20)
    )
    assert verdicts(many) == ["out_of_memory"]
    patient = await grader.grade("import time\ntime.sleep(0.8)\nprint(2)", Cases(TWO.cases, timeout=5))
    assert patient.score == 1.0, "the timeout of the ground truth applies"


@pytest.mark.sandbox
async def test_tolerance_applies_to_output_and_values(sandbox_url: str) -> None:
    cases = Cases((StdinCase("", "0.333333"), CallCase("f", (), [1, 0.333333])))
    solution = "def f(): return [1, 1 / 3]\nif __name__ == '__main__': print(1 / 3)"
    assert (await grader_of(sandbox_url, continuous=True).grade(solution, cases)).score == 0.0
    assert (await grader_of(sandbox_url, float_tolerance=1e-5).grade(solution, cases)).score == 1.0


@pytest.mark.sandbox
async def test_truncated_output_may_be_correct(sandbox_url: str) -> None:
    long = 1_500_000
    right, other = f"print('x' * {long})", f"print('y' * {long})"
    expected = Cases((StdinCase("", "x" * long),))
    grader = grader_of(sandbox_url)
    assert (await grader.grade(right, expected)).score is None, "the output may be correct: the sandbox kept too little"
    assert (await grader.grade(right, TWO)).score == 0.0, "more output does not avoid a wrong verdict"
    assert (await grader.grade(other, Cases((StdinCase("", f"x\n{'x' * long}"),)))).score == 0.0
    returns = Cases((CallCase("f", (), ["x" * long]),))
    assert (await grader.grade(f"def f(): return ['x' * {long}]", returns)).score is None
    assert (await grader.grade(f"def f(): return ['x' * {long}]", Cases((CallCase("f", (), 1),)))).score == 0.0


async def test_each_case_has_its_own_result() -> None:
    """Regression: a compile error in one case marked every later case."""
    failed = {"status": "Finished", "execution_time": 0.1, "return_code": 1, "stdout": "", "stderr": "no ;"}
    compile_error = {**SUCCESS, "status": "Failed", "compile_result": failed, "run_result": None}
    crash = program(return_code=3, stderr="oh")
    script = [answer(), answer(body=compile_error), answer(), answer(body=crash), answer()]
    cases = Cases((StdinCase("", "2"),) * 5)
    grade, _ = await grade_against(*script, cases=cases, continuous=True, num_workers=1, rate_limit=1)
    assert sorted(verdicts(grade)) == ["compile_failed", "failed", "passed", "passed", "passed"]
    assert grade.score == 3 / 5


# Failures of the sandbox


@pytest.mark.parametrize(
    "bad",
    [
        answer(429, headers={"Retry-After": "0"}),
        answer(502, body=b"bad gateway"),
        answer(503, body=b""),
        answer(504, body=b""),
        answer(body=SANDBOX_ERROR),
        raw(b""),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
    ],
    ids=["429", "502", "503", "504", "SandboxError", "connection closed", "incomplete response"],
)
async def test_transient_faults_are_retried(bad: Behaviour) -> None:
    grade, _ = await grade_against(bad, bad, answer())
    assert grade.score == 1.0
    assert grade.cases[0].attempts == 3


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        answer(429),
        answer(500, body=b"oh"),
        answer(503, body=b""),
        answer(body=SANDBOX_ERROR),
        answer(body=b"garbage"),
        answer(body={"status": "Success", "run_result": 7}),
        answer(400, body={"detail": "language 'python' is not installed"}),
        answer(401, body=b"no"),
        raw(b""),
        raw(b"\0\1\2"),
        hang(),
        hang(b"HTTP/1.1 200 OK\r\n"),
    ],
)
async def test_sandbox_fault_gives_none(bad: Behaviour, continuous: bool) -> None:
    grade, _ = await grade_against(bad, timeout=0.2, continuous=continuous)
    assert grade.score is None
    assert verdicts(grade) == ["infra"]
    assert grade.cases[0].detail.startswith("Sandbox")


@pytest.mark.usefixtures("short_timeouts")
async def test_unreachable_sandbox_gives_none() -> None:
    async with FaultServer() as server:
        url = server.url
    assert (await grader_of(url).grade("print(2)", TWO)).score is None


async def test_slot_timeout_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MAX_WAIT_S", 0.2)
    async with FaultServer([after(1.0, answer())]) as server:
        grade = await grader_of(server.url, rate_limit=1, continuous=True).grade("x", Cases(TWO.cases * 2))
    assert grade.score is None
    assert sorted(verdicts(grade)) == ["infra", "passed"]
    assert any("SlotTimeout" in result.detail for result in grade.cases)


async def test_real_failure_decides_despite_infra_fault() -> None:
    rejected = answer(400, body={"detail": "no"})
    for script in ([rejected, answer(body=program(return_code=1))], [answer(body=program(return_code=1)), rejected]):
        cases = Cases(TWO.cases * 2)
        grade, _ = await grade_against(*script, cases=cases)
        assert (grade.score, set(verdicts(grade))) == (0.0, {"infra", "failed"})
        grade, _ = await grade_against(*script, cases=cases, continuous=True)
        assert grade.score is None


@pytest.mark.sandbox
async def test_missing_language_affects_no_other_solution(sandbox_url: str) -> None:
    strange = Cases(TWO.cases * 30, language="cuda")
    every = await grader_of(sandbox_url, rate_limit=2).grade_all([("x", strange), ("print(2)", Cases(TWO.cases * 3))])
    assert [grade.score for grade in every] == [None, 1.0]
    assert "SandboxRefused" in every[0].cases[0].detail


@pytest.mark.usefixtures("short_timeouts")
async def test_batch_gives_up_on_unreachable_sandbox(caplog: pytest.LogCaptureFixture) -> None:
    async with FaultServer() as server:
        url = server.url
    grader = grader_of(url, rate_limit=2)
    with caplog.at_level(logging.WARNING, logger="toolroll.rewards"):
        every = await asyncio.wait_for(grader.grade_all([("x", Cases(TWO.cases * 100))] * 20), 20)
    assert [grade.score for grade in every] == [None] * 20
    assert "not tried" in every[-1].cases[-1].detail
    assert [record.name for record in caplog.records].count("toolroll.rewards.grader") == 1, "not two thousand"


@pytest.mark.sandbox
async def test_internal_error_affects_no_other_grade(monkeypatch: pytest.MonkeyPatch, sandbox_url: str) -> None:
    grader = grader_of(sandbox_url)
    run = grader.sandbox.run

    async def fails_for_one(code: str, *arguments: Any, **options: Any) -> Any:
        if "odd" in code:
            raise ArithmeticError("unexpected")
        return await run(code, *arguments, **options)

    monkeypatch.setattr(grader.sandbox, "run", fails_for_one)
    every = await grader.grade_all([("print(2)", TWO), ("odd", TWO), ("print(2)", TWO)])
    assert [grade.score for grade in every] == [1.0, None, 1.0]


# Concurrency


@pytest.mark.sandbox
async def test_batch_is_graded_in_order(sandbox_url: str) -> None:
    grader = grader_of(sandbox_url, rate_limit=4, continuous=True)
    solutions = [f"print({number} if int(input()) < {number} else 'no')" for number in range(12)]
    batch = [(one, Cases(tuple(StdinCase(str(i), str(n)) for i in range(5)))) for n, one in enumerate(solutions)]
    every = await grader.grade_all(batch)
    assert [grade.score for grade in every] == [min(number, 5) / 5 for number in range(12)]


async def test_requests_in_flight_reach_but_keep_the_limit() -> None:
    async with FaultServer([after(0.01, answer())]) as server:
        every = await grader_of(server.url, rate_limit=6).grade_all([("x", Cases(TWO.cases * 10))] * 10)
        assert {grade.score for grade in every} == {1.0}
        assert server.max_in_flight == 6
        assert len(server.requests) == 100


async def test_number_of_tasks_is_bounded_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    grader = grader_of("http://127.0.0.1:1", rate_limit=8)
    max_tasks = 0

    async def run(code: str, *arguments: Any, **options: Any) -> Any:
        nonlocal max_tasks
        max_tasks = max(max_tasks, len(asyncio.all_tasks()))
        await asyncio.sleep(0)
        return limited.RunResult(execution, 0.0, 1.0)

    async with FaultServer() as server:
        execution = (await grader_of(server.url).sandbox.run("2", run_timeout=1)).execution
    monkeypatch.setattr(grader.sandbox, "run", run)
    every = await grader.grade_all([("x", Cases(TWO.cases * 100))] * 100)
    assert {grade.score for grade in every} == {1.0}
    assert max_tasks <= 8 + 2 + 3


async def test_remaining_cases_of_failed_solution_are_skipped() -> None:
    async with FaultServer([answer()]) as server:
        grader = grader_of(server.url, rate_limit=2)
        batch = [("x", Cases((StdinCase("", "wrong"), *TWO.cases * 99))), ("x", Cases(TWO.cases * 3))]
        failed, passed = await grader.grade_all(batch)
        assert (failed.score, passed.score) == (0.0, 1.0)
        assert verdicts(failed).count("skipped") >= 95
        assert len(server.requests) <= 8


async def test_cancelled_grading_leaves_no_tasks() -> None:
    async with FaultServer([after(0.3, answer())]) as server:
        grader = grader_of(server.url, rate_limit=4)
        before = asyncio.all_tasks()
        grading = asyncio.create_task(grader.grade_all([("x", Cases(TWO.cases * 50))] * 50))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        sent = len(server.requests)
        await asyncio.sleep(0.6)  # requests in flight complete, and no more are sent
        left = {task for task in asyncio.all_tasks() - before if "FaultServer" not in repr(task)}
        assert not left
        assert len(server.requests) == sent <= 4
        assert (await grader.grade("x", TWO)).score == 1.0, "the grader remains usable"


async def test_cases_of_wrong_language_are_rejected_first() -> None:
    async with FaultServer() as server:
        with pytest.raises(ValueError, match="fn_name requires the language 'python', got 'cpp'"):
            await grader_of(server.url, language="c++").grade_all([("x", TWO), ("x", Cases((CallCase("f", (), 1),)))])
        assert not server.requests


def test_invalid_settings_are_rejected() -> None:
    assert grader_of("http://x", language="c++").settings.language == "cpp"
    for wrong in ({"timeout": 0}, {"language": "klingon"}, {"float_tolerance": -1}, {"nothing": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            grader_of("http://x", **wrong)
    with pytest.raises(ConfigError):
        grader_of("x")


@pytest.mark.sandbox
async def test_grader_can_be_pickled(sandbox_url: str) -> None:
    grader = pickle.loads(pickle.dumps(grader_of(sandbox_url, timeout=3)))
    assert (await grader.grade(ADD, read_cases(SUMS))).score == 1.0


# Scheduling and scores

OUTCOMES = st.sampled_from([*Verdict.__members__.values()]).filter(lambda verdict: verdict is not Verdict.SKIPPED)
PATTERNS = st.lists(st.lists(OUTCOMES, min_size=1, max_size=6), max_size=6)


def run_schedule(
    schedule: CaseSchedule, pattern: Sequence[Sequence[Verdict]], at_once: int, seed: int
) -> list[tuple[int, int]]:
    """Run all cases with `at_once` workers, ending in random order. Return the cases in the order of their start."""
    chance, started, running = random.Random(seed), [], []
    while True:
        while len(running) < at_once and (turn := schedule.next()) is not None:
            started.append(turn)
            running.append(turn)
        if not running:
            return started
        solution, case = running.pop(chance.randrange(len(running)))
        schedule.record(solution, case, CaseResult(pattern[solution][case]))


def reference_score(outcomes: Sequence[Verdict], continuous: bool) -> float | None:
    """Return the score if every case is run."""
    if continuous:
        return None if "infra" in outcomes else sum(outcome == "passed" for outcome in outcomes) / len(outcomes)
    if all(outcome == "passed" for outcome in outcomes):
        return 1.0
    return None if all(outcome in ("passed", "infra") for outcome in outcomes) else 0.0


@given(PATTERNS, st.booleans(), st.integers(1, 5), st.integers())
def test_scores_equal_those_of_running_all_cases(
    pattern: list[list[Verdict]], continuous: bool, at_once: int, seed: int
) -> None:
    schedule = CaseSchedule([len(outcomes) for outcomes in pattern], continuous=continuous)
    started = run_schedule(schedule, pattern, at_once, seed)
    expected = [reference_score(outcomes, continuous) for outcomes in pattern]
    assert [schedule.score(number) for number in range(len(pattern))] == expected
    assert len(set(started)) == len(started)
    for solution, outcomes in enumerate(pattern):
        for case, outcome in enumerate(outcomes):
            found = schedule.results[solution][case].verdict
            assert found == (outcome if (solution, case) in started else "skipped")
        if all(outcome == "passed" for outcome in outcomes):
            assert Verdict.SKIPPED not in [result.verdict for result in schedule.results[solution]]


@given(PATTERNS, st.booleans(), st.integers())
def test_sequential_schedule_runs_only_needed_cases(pattern: list[list[Verdict]], continuous: bool, seed: int) -> None:
    started = run_schedule(CaseSchedule([*map(len, pattern)], continuous=continuous), pattern, 1, seed)
    for solution, outcomes in enumerate(pattern):
        ends = [outcome == "infra" if continuous else outcome not in ("passed", "infra") for outcome in outcomes]
        needed = ends.index(True) + 1 if True in ends else len(outcomes)
        assert sum(turn[0] == solution for turn in started) == needed


@given(PATTERNS, st.integers(1, 5), st.integers())
def test_solutions_take_turns(pattern: list[list[Verdict]], at_once: int, seed: int) -> None:
    passing = [[Verdict.PASSED] * len(outcomes) for outcomes in pattern]
    started = run_schedule(CaseSchedule([*map(len, passing)], continuous=False), passing, at_once, seed)
    assert started == sorted(started, key=lambda turn: turn[::-1])


def test_streak_of_faults_allows_only_probes() -> None:
    streak = FailureStreak(3)
    for _ in range(3):
        assert streak.allows_attempt(0.0)
        streak.record(True)
    assert [streak.allows_attempt(now) for now in (1.0, 2.0, 5.9, 6.5, 7.0)] == [True, False, False, True, False]
    streak.record(False)
    assert all(streak.allows_attempt(7.0) for _ in range(5))


async def test_single_answers_give_up_on_unreachable_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolroll.sandbox.limited.QUEUE_ALLOWANCE_S", 0.2)
    monkeypatch.setattr("toolroll.sandbox.limited.MAX_WAIT_S", 0.2)
    async with FaultServer() as server:
        pass
    grader = CodeGrader(GraderSettings(sandbox_fusion_url=server.url, rate_limit=2))
    started_at = time.monotonic()
    for _ in range(200):
        assert (await grader.grade("print(1)", read_cases({"inputs": [""], "outputs": ["1"]}))).score is None
    assert time.monotonic() - started_at < 10


@given(st.lists(OUTCOMES, min_size=1), st.booleans(), st.randoms())
def test_order_of_cases_does_not_matter(outcomes: list[Verdict], continuous: bool, chance: random.Random) -> None:
    shuffled = outcomes.copy()
    chance.shuffle(shuffled)
    assert score_of(outcomes, continuous) == score_of(shuffled, continuous) == reference_score(outcomes, continuous)
