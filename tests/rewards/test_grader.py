"""A score is the solution's own doing, whatever the sandbox does, and however many are graded at once."""

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

from toolroll import runner as runner_module
from toolroll.errors import ConfigError
from toolroll.rewards.cases import CallCase, Cases, StdinCase, read_cases
from toolroll.rewards.grader import Agenda, CaseResult, CodeGrader, Grade, GraderSettings, Streak, Verdict, score_of

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
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that gives a sandbox up soon."""
    for name in ("QUEUE_ALLOWANCE", "MARGIN", "COMPILE_TIME"):
        monkeypatch.setattr(runner_module, name, 0.3)


# What a program did


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
async def test_stdin_and_stdout(sandbox_url: str, language: str, right: str, wrong: str, broken: str) -> None:
    cases = read_cases({**SUMS, "language": language})
    answers = [f"So:\n```{language}\n{code}\n```\n" for code in (right, wrong, broken)]
    every = await grader_of(sandbox_url, continuous=True).grade_all([(answer, cases) for answer in answers])
    assert [grade.score for grade in every] == [1.0, 0.5, 0.0]
    assert verdicts(every[1]) == ["passed", "wrong"]
    assert every[1].cases[1].detail == "line 1: got '7', expected '2'"
    assert verdicts(every[2]) == ["compile_failed" if language == "cpp" else "failed"] * 2
    assert every[0].program == right
    assert all(result.attempts == 1 and result.execution_time > 0 for grade in every for result in grade.cases)


async def test_asserts_of_other_languages_go_by_the_return_code(sandbox_url: str) -> None:
    cases = read_cases({"assert_case": ["[ $(f 2) = 4 ]", "[ $(f 2) = 5 ]"], "language": "sh"})
    grade = await grader_of(sandbox_url, continuous=True).grade("f() { echo $((2 * $1)); }", cases)
    assert (grade.score, verdicts(grade)) == (0.5, ["passed", "failed"])


async def test_all_or_nothing_is_the_default(sandbox_url: str) -> None:
    cases = read_cases({"inputs": ["1"] * 3, "outputs": ["1", "2", "1"]})
    assert (await grader_of(sandbox_url).grade("print(1)", cases)).score == 0.0
    assert (await grader_of(sandbox_url).grade(ADD, read_cases(SUMS))).score == 1.0


async def test_limits(sandbox_url: str) -> None:
    grader = grader_of(sandbox_url, timeout=0.5, memory_limit_mb=64)
    slow = await grader.grade("import time\nprint('so far', flush=True)\ntime.sleep(9)", TWO)
    large = await grader.grade("x = b'x' * 10**9", TWO)
    assert (verdicts(slow), verdicts(large)) == (["timeout"], ["out_of_memory"])
    many = await grader.grade(
        "def f():\n    x = []\n    while True: x.append(str(len(x)))", Cases((CallCase("f", (), 1),), timeout=20)
    )
    assert verdicts(many) == ["out_of_memory"]
    patient = await grader.grade("import time\ntime.sleep(0.8)\nprint(2)", Cases(TWO.cases, timeout=5))
    assert patient.score == 1.0, "the ground truth's own time goes before"


async def test_a_tolerance(sandbox_url: str) -> None:
    cases = Cases((StdinCase("", "0.333333"), CallCase("f", (), [1, 0.333333])))
    solution = "def f(): return [1, 1 / 3]\nif __name__ == '__main__': print(1 / 3)"
    assert (await grader_of(sandbox_url, continuous=True).grade(solution, cases)).score == 0.0
    assert (await grader_of(sandbox_url, float_tolerance=1e-5).grade(solution, cases)).score == 1.0


async def test_more_output_than_the_sandbox_keeps(sandbox_url: str) -> None:
    long = 1_500_000
    right, other = f"print('x' * {long})", f"print('y' * {long})"
    expected = Cases((StdinCase("", "x" * long),))
    grader = grader_of(sandbox_url)
    assert (await grader.grade(right, expected)).score is None, "it may be right: the sandbox kept too little"
    assert (await grader.grade(right, TWO)).score == 0.0, "no way out of being wrong"
    assert (await grader.grade(other, Cases((StdinCase("", f"x\n{'x' * long}"),)))).score == 0.0
    returns = Cases((CallCase("f", (), ["x" * long]),))
    assert (await grader.grade(f"def f(): return ['x' * {long}]", returns)).score is None
    assert (await grader.grade(f"def f(): return ['x' * {long}]", Cases((CallCase("f", (), 1),)))).score == 0.0


async def test_every_case_has_its_own_result() -> None:
    """A compile error in one case marked every later one."""
    failed = {"status": "Finished", "execution_time": 0.1, "return_code": 1, "stdout": "", "stderr": "no ;"}
    compile_error = {**SUCCESS, "status": "Failed", "compile_result": failed, "run_result": None}
    crash = program(return_code=3, stderr="oh")
    script = [answer(), answer(body=compile_error), answer(), answer(body=crash), answer()]
    cases = Cases((StdinCase("", "2"),) * 5)
    grade, _ = await grade_against(*script, cases=cases, continuous=True, num_workers=1, rate_limit=1)
    assert sorted(verdicts(grade)) == ["compile_failed", "failed", "passed", "passed", "passed"]
    assert grade.score == 3 / 5


# What the sandbox did


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
    ids=["429", "502", "503", "504", "SandboxError", "connection closed", "half an answer"],
)
async def test_what_passes_is_tried_again(bad: Behaviour) -> None:
    grade, server = await grade_against(bad, bad, answer())
    assert grade.score == 1.0
    assert grade.cases[0].attempts == len(server.requests) == 3


@pytest.mark.usefixtures("hasty")
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
async def test_a_fault_of_the_sandbox_is_no_score(bad: Behaviour, continuous: bool) -> None:
    grade, _ = await grade_against(bad, timeout=0.2, continuous=continuous)
    assert grade.score is None
    assert verdicts(grade) == ["infra"]
    assert grade.cases[0].detail.startswith("Sandbox")


@pytest.mark.usefixtures("hasty")
async def test_a_sandbox_that_is_not_there_is_no_score() -> None:
    async with FaultServer() as server:
        url = server.url
    assert (await grader_of(url).grade("print(2)", TWO)).score is None


async def test_no_slot_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PATIENCE", 0.2)
    async with FaultServer([after(1.0, answer())]) as server:
        grade = await grader_of(server.url, rate_limit=1, continuous=True).grade("x", Cases(TWO.cases * 2))
    assert grade.score is None
    assert sorted(verdicts(grade)) == ["infra", "passed"]
    assert any("SlotTimeout" in result.detail for result in grade.cases)


async def test_where_all_must_pass_one_real_failure_decides() -> None:
    refused = answer(400, body={"detail": "no"})
    for script in ([refused, answer(body=program(return_code=1))], [answer(body=program(return_code=1)), refused]):
        cases = Cases(TWO.cases * 2)
        grade, _ = await grade_against(*script, cases=cases)
        assert (grade.score, set(verdicts(grade))) == (0.0, {"infra", "failed"})
        grade, _ = await grade_against(*script, cases=cases, continuous=True)
        assert grade.score is None


async def test_a_missing_language_costs_the_others_nothing(sandbox_url: str) -> None:
    strange = Cases(TWO.cases * 30, language="cuda")
    every = await grader_of(sandbox_url, rate_limit=2).grade_all([("x", strange), ("print(2)", Cases(TWO.cases * 3))])
    assert [grade.score for grade in every] == [None, 1.0]
    assert "SandboxRefused" in every[0].cases[0].detail


@pytest.mark.usefixtures("hasty")
async def test_a_sandbox_that_is_down_is_given_up_for_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    async with FaultServer() as server:
        url = server.url
    grader = grader_of(url, rate_limit=2)
    with caplog.at_level(logging.WARNING, logger="toolroll.rewards"):
        every = await asyncio.wait_for(grader.grade_all([("x", Cases(TWO.cases * 100))] * 20), 20)
    assert [grade.score for grade in every] == [None] * 20
    assert "not tried" in every[-1].cases[-1].detail
    assert [record.name for record in caplog.records].count("toolroll.rewards.grader") == 1, "not two thousand"


async def test_a_fault_of_ours_costs_no_other_its_grade(monkeypatch: pytest.MonkeyPatch, sandbox_url: str) -> None:
    grader = grader_of(sandbox_url)
    run = grader.runner.run

    async def fails_for_one(code: str, *rest: Any, **more: Any) -> Any:
        if "odd" in code:
            raise ArithmeticError("never thought of")
        return await run(code, *rest, **more)

    monkeypatch.setattr(grader.runner, "run", fails_for_one)
    every = await grader.grade_all([("print(2)", TWO), ("odd", TWO), ("print(2)", TWO)])
    assert [grade.score for grade in every] == [1.0, None, 1.0]


# Many at once


async def test_a_batch_is_graded_in_order_and_runs_no_more_than_it_may(sandbox_url: str) -> None:
    grader = grader_of(sandbox_url, rate_limit=4, continuous=True)
    solutions = [f"print({number} if int(input()) < {number} else 'no')" for number in range(12)]
    batch = [(one, Cases(tuple(StdinCase(str(i), str(n)) for i in range(5)))) for n, one in enumerate(solutions)]
    every = await grader.grade_all(batch)
    assert [grade.score for grade in every] == [min(number, 5) / 5 for number in range(12)]


async def test_at_the_sandbox_there_are_as_many_as_allowed() -> None:
    async with FaultServer([after(0.01, answer())]) as server:
        every = await grader_of(server.url, rate_limit=6).grade_all([("x", Cases(TWO.cases * 10))] * 10)
        assert {grade.score for grade in every} == {1.0}
        assert server.most == 6
        assert len(server.requests) == 100


async def test_a_hundred_thousand_cases_are_not_as_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    grader = grader_of("http://127.0.0.1:1", rate_limit=8)
    most = 0

    async def run(code: str, *rest: Any, **more: Any) -> Any:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0)
        return execution, 0.0, 1.0

    async with FaultServer() as server:
        execution = (await grader_of(server.url).runner.run("2", run_timeout=1)).execution
    monkeypatch.setattr(grader.runner, "run", run)
    every = await grader.grade_all([("x", Cases(TWO.cases * 100))] * 500)
    assert {grade.score for grade in every} == {1.0}
    assert most <= 8 + 2 + 3


async def test_a_failed_solution_is_not_run_any_further() -> None:
    async with FaultServer([answer()]) as server:
        grader = grader_of(server.url, rate_limit=2)
        batch = [("x", Cases((StdinCase("", "wrong"), *TWO.cases * 99))), ("x", Cases(TWO.cases * 3))]
        failed, passed = await grader.grade_all(batch)
        assert (failed.score, passed.score) == (0.0, 1.0)
        assert verdicts(failed).count("skipped") >= 95
        assert len(server.requests) <= 8


async def test_cancelled_it_leaves_nothing_behind() -> None:
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
        await asyncio.sleep(0.6)  # what was sent goes on to its end, and no more is sent
        left = {task for task in asyncio.all_tasks() - before if "FaultServer" not in repr(task)}
        assert not left
        assert len(server.requests) == sent <= 4
        assert (await grader.grade("x", TWO)).score == 1.0, "and it can be used again"


async def test_cases_that_do_not_fit_the_language_are_refused_before_anything_runs() -> None:
    async with FaultServer() as server:
        with pytest.raises(ValueError, match="fn_name is for Python only"):
            await grader_of(server.url, language="c++").grade_all([("x", TWO), ("x", Cases((CallCase("f", (), 1),)))])
        assert not server.requests


def test_settings() -> None:
    assert grader_of("http://x", language="c++").settings.language == "cpp"
    for wrong in ({"timeout": 0}, {"language": "klingon"}, {"float_tolerance": -1}, {"nothing": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            grader_of("http://x", **wrong)
    with pytest.raises(ConfigError):
        grader_of("x")


async def test_it_pickles(sandbox_url: str) -> None:
    grader = pickle.loads(pickle.dumps(grader_of(sandbox_url, timeout=3)))
    assert (await grader.grade(ADD, read_cases(SUMS))).score == 1.0


# What runs next, and what the score is

OUTCOMES = st.sampled_from([*Verdict.__members__.values()]).filter(lambda verdict: verdict is not Verdict.SKIPPED)
PATTERNS = st.lists(st.lists(OUTCOMES, min_size=1, max_size=6), max_size=6)


def carry_out(agenda: Agenda, pattern: Sequence[Sequence[Verdict]], at_once: int, seed: int) -> list[tuple[int, int]]:
    """Run an agenda with so many workers, whose cases end in any order. The cases in the order of their beginning."""
    chance, begun, running = random.Random(seed), [], []
    while True:
        while len(running) < at_once and (turn := agenda.next()) is not None:
            begun.append(turn)
            running.append(turn)
        if not running:
            return begun
        solution, case = running.pop(chance.randrange(len(running)))
        agenda.note(solution, case, CaseResult(pattern[solution][case]))


def one_by_one(outcomes: Sequence[Verdict], continuous: bool) -> float | None:
    """The score, written out: run everything, then look."""
    if continuous:
        return None if "infra" in outcomes else sum(outcome == "passed" for outcome in outcomes) / len(outcomes)
    if all(outcome == "passed" for outcome in outcomes):
        return 1.0
    return None if all(outcome in ("passed", "infra") for outcome in outcomes) else 0.0


@given(PATTERNS, st.booleans(), st.integers(1, 5), st.integers())
def test_the_scores_are_those_of_running_everything(
    pattern: list[list[Verdict]], continuous: bool, at_once: int, seed: int
) -> None:
    agenda = Agenda([len(outcomes) for outcomes in pattern], continuous=continuous)
    begun = carry_out(agenda, pattern, at_once, seed)
    assert [agenda.score(number) for number in range(len(pattern))] == [one_by_one(o, continuous) for o in pattern]
    assert len(set(begun)) == len(begun)
    for solution, outcomes in enumerate(pattern):
        for case, outcome in enumerate(outcomes):
            found = agenda.results[solution][case].verdict
            assert found == (outcome if (solution, case) in begun else "skipped")
        if all(outcome == "passed" for outcome in outcomes):
            assert Verdict.SKIPPED not in [result.verdict for result in agenda.results[solution]]


@given(PATTERNS, st.booleans(), st.integers())
def test_one_at_a_time_nothing_is_run_that_can_not_matter(
    pattern: list[list[Verdict]], continuous: bool, seed: int
) -> None:
    begun = carry_out(Agenda([*map(len, pattern)], continuous=continuous), pattern, 1, seed)
    for solution, outcomes in enumerate(pattern):
        ends = [outcome == "infra" if continuous else outcome not in ("passed", "infra") for outcome in outcomes]
        needed = ends.index(True) + 1 if True in ends else len(outcomes)
        assert sum(turn[0] == solution for turn in begun) == needed


@given(PATTERNS, st.integers(1, 5), st.integers())
def test_solutions_take_turns(pattern: list[list[Verdict]], at_once: int, seed: int) -> None:
    passing = [[Verdict.PASSED] * len(outcomes) for outcomes in pattern]
    begun = carry_out(Agenda([*map(len, passing)], continuous=False), passing, at_once, seed)
    assert begun == sorted(begun, key=lambda turn: turn[::-1])


def test_after_faults_in_a_row_one_is_tried_now_and_again() -> None:
    streak = Streak(3)
    for _ in range(3):
        assert streak.may_try(0.0)
        streak.note(True)
    assert [streak.may_try(now) for now in (1.0, 2.0, 5.9, 6.5, 7.0)] == [True, False, False, True, False]
    streak.note(False)
    assert all(streak.may_try(7.0) for _ in range(5))


async def test_a_sandbox_that_is_gone_holds_nobody_up_one_answer_at_a_time_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolroll.runner.QUEUE_ALLOWANCE", 0.2)
    monkeypatch.setattr("toolroll.runner.PATIENCE", 0.2)
    async with FaultServer() as server:
        pass
    grader = CodeGrader(GraderSettings(sandbox_fusion_url=server.url, rate_limit=2))
    began = time.monotonic()
    for _ in range(200):
        assert (await grader.grade("print(1)", read_cases({"inputs": [""], "outputs": ["1"]}))).score is None
    assert time.monotonic() - began < 10


@given(st.lists(OUTCOMES, min_size=1), st.booleans(), st.randoms())
def test_the_order_of_the_cases_is_of_no_account(
    outcomes: list[Verdict], continuous: bool, chance: random.Random
) -> None:
    shuffled = outcomes.copy()
    chance.shuffle(shuffled)
    assert score_of(outcomes, continuous) == score_of(shuffled, continuous) == one_by_one(outcomes, continuous)
