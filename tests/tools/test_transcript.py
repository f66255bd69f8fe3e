"""Tests of the text that the model reads after a program ran."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from toolroll.sandbox.execution import Execution, ExecutionOutcome
from toolroll.tools.transcript import MAX_STDERR_CHARS, transcript

DONE = Execution(
    outcome=ExecutionOutcome.OK,
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
            "outcome": st.sampled_from(ExecutionOutcome),
            "stdout": st.text(),
            "stderr": st.text(),
            "stdout_truncated": st.booleans(),
            "stderr_truncated": st.booleans(),
            "return_code": st.none() | st.integers(-70, 255),
            "session_is_over": st.sampled_from([None, True, False]),
        }
    )
)
def test_transcript_contains_output_and_is_never_empty(changes: dict[str, object]) -> None:
    done = dataclasses.replace(DONE, **changes)
    text = transcript(done, run_timeout=2)
    assert text
    assert text.startswith(done.stdout.rstrip("\n"))
    assert done.stderr.rstrip("\n") in text
    assert ("too long" in text) >= done.stdout_truncated
    if done.outcome is not ExecutionOutcome.OK:
        assert text != dataclasses.replace(done, outcome=ExecutionOutcome.OK).stdout.rstrip("\n") or done.stderr
    if done.outcome is ExecutionOutcome.TIMEOUT:
        assert "longer than 2 s" in text


def test_long_stderr_is_truncated_to_relevant_part() -> None:
    long = "first " + "x" * 10_000 + " last"
    crash = transcript(
        dataclasses.replace(DONE, outcome=ExecutionOutcome.FAILED, return_code=1, stderr=long), run_timeout=1
    )
    assert crash.startswith("[...]\n")
    assert crash.endswith(" last")
    compiler = dataclasses.replace(DONE, outcome=ExecutionOutcome.COMPILE_FAILED, return_code=1, stderr=long)
    text = transcript(compiler, run_timeout=1)
    assert text.startswith("first ")
    assert text.endswith("[...]\n[The program did not compile.]")
    assert max(len(crash), len(text)) < MAX_STDERR_CHARS + 100


def test_outcome_notes() -> None:
    def note(outcome: ExecutionOutcome, return_code: int | None = 1, **more: object) -> str:
        done = dataclasses.replace(DONE, outcome=outcome, return_code=return_code, **more)
        return transcript(done, run_timeout=30, memory_limit_mb=512)

    assert note(ExecutionOutcome.OK, 0) == "[No output.]"
    assert note(ExecutionOutcome.FAILED, 3) == "[The program failed with exit status 3.]"
    assert (
        note(ExecutionOutcome.FAILED, -11)
        == "[The program was terminated by signal 11 (SIGSEGV). It produced no output.]"
    )
    assert note(ExecutionOutcome.FAILED, -77, stdout="a") == "a\n[The program was terminated by signal 77 (unknown).]"
    assert (
        note(ExecutionOutcome.TIMEOUT, None, stdout="a\n") == "a\n[The program was stopped: it took longer than 30 s.]"
    )
    assert note(ExecutionOutcome.COMPILE_TIMEOUT, None) == "[The compiler was stopped: it took too long.]"
    assert note(ExecutionOutcome.OUT_OF_MEMORY, -9) == (
        "[The program was stopped: it exceeded its memory limit of 512 MB. It produced no output.]"
    )
