"""What the model is shown, whatever the program did."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from toolroll.sandbox.execution import Execution, Outcome
from toolroll.tools.transcript import MOST_STDERR, transcript

DONE = Execution(
    outcome=Outcome.OK,
    files={},
    queue_time=None,
    endpoint="http://x:1",
    attempts=1,
    stdout="",
    stderr="",
    stdout_truncated=False,
    stderr_truncated=False,
    return_code=0,
    execution_time=0.1,
    compile_result=None,
    run_result=None,
    session_is_new=None,
    session_died=None,
    session_is_over=None,
)


@given(
    changes=st.fixed_dictionaries(
        {
            "outcome": st.sampled_from(Outcome),
            "stdout": st.text(),
            "stderr": st.text(),
            "stdout_truncated": st.booleans(),
            "stderr_truncated": st.booleans(),
            "return_code": st.none() | st.integers(-70, 255),
            "session_is_over": st.sampled_from([None, True, False]),
        }
    )
)
def test_all_that_was_written_is_shown_and_it_is_never_empty(changes: dict[str, object]) -> None:
    done = dataclasses.replace(DONE, **changes)
    said = transcript(done, run_timeout=2)
    assert said
    assert said.startswith(done.stdout.rstrip("\n"))
    assert done.stderr.rstrip("\n") in said
    assert ("too long" in said) >= done.stdout_truncated
    if done.outcome is not Outcome.OK:
        assert said != dataclasses.replace(done, outcome=Outcome.OK).stdout.rstrip("\n") or done.stderr
    if done.outcome is Outcome.TIMEOUT:
        assert "longer than 2 s" in said


def test_of_a_long_stderr_the_part_that_matters_is_kept() -> None:
    long = "first " + "x" * 10_000 + " last"
    crash = transcript(dataclasses.replace(DONE, outcome=Outcome.FAILED, return_code=1, stderr=long), run_timeout=1)
    assert crash.startswith("[...]\n")
    assert crash.endswith(" last")
    compiler = dataclasses.replace(DONE, outcome=Outcome.COMPILE_FAILED, return_code=1, stderr=long)
    said = transcript(compiler, run_timeout=1)
    assert said.startswith("first ")
    assert said.endswith("[...]\n[The program did not compile.]")
    assert max(len(crash), len(said)) < MOST_STDERR + 100


def test_how_each_end_reads() -> None:
    def said(outcome: Outcome, return_code: int | None = 1, **more: object) -> str:
        done = dataclasses.replace(DONE, outcome=outcome, return_code=return_code, **more)
        return transcript(done, run_timeout=30, memory_limit_mb=512)

    assert said(Outcome.OK, 0) == "[No output.]"
    assert said(Outcome.FAILED, 3) == "[The program failed with exit status 3.]"
    assert said(Outcome.FAILED, -11) == "[The program was ended by signal 11 (SIGSEGV). It had written nothing.]"
    assert said(Outcome.FAILED, -77, stdout="a") == "a\n[The program was ended by signal 77 (unknown).]"
    assert said(Outcome.TIMEOUT, None, stdout="a\n") == "a\n[The program was stopped: it took longer than 30 s.]"
    assert said(Outcome.COMPILE_TIMEOUT, None) == "[The compiler took too long and was stopped.]"
    assert said(Outcome.OUT_OF_MEMORY, -9) == (
        "[The program was stopped: it reached its memory limit of 512 MB. It had written nothing.]"
    )
