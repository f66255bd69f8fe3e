"""The text that the model reads after a program ran.

It consists of stdout, stderr, and notes in brackets about everything else: a timeout, an exceeded memory limit,
truncated output, or the exit status of a program without output. A long stderr is truncated to its relevant part: the
first errors of a compiler, the last lines of a traceback.
"""

from __future__ import annotations

import signal

from toolroll.sandbox.execution import Execution, ExecutionOutcome

MAX_STDERR_CHARS = 4000
"""Maximum length of the stderr that the model reads. The rollout limits the length of the whole text."""
_TRUNCATION_MARK = "[...]"


def transcript(execution: Execution, run_timeout: float, memory_limit_mb: int | None = None) -> str:
    """Return the text that the model reads about an execution. It is never empty.

    Args:
        execution: Result of the program.
        run_timeout: Time limit of the program, in seconds.
        memory_limit_mb: Memory limit of the program, if known.
    """
    parts = [execution.stdout.rstrip("\n")]
    if execution.stdout_truncated:
        parts.append("[The output was truncated because it was too long.]")
    parts.append(_truncated_stderr(execution))
    parts.append(_outcome_note(execution, run_timeout, memory_limit_mb, has_output=any(parts)))
    if execution.session_is_over:
        parts.append("[The interpreter exited. All variables and functions of earlier programs are lost.]")
    return "\n".join(part for part in parts if part) or "[No output.]"


def _truncated_stderr(execution: Execution) -> str:
    text = execution.stderr.rstrip("\n")
    if len(text) > MAX_STDERR_CHARS:
        if execution.outcome is ExecutionOutcome.COMPILE_FAILED:
            return f"{text[:MAX_STDERR_CHARS]}\n{_TRUNCATION_MARK}"
        return f"{_TRUNCATION_MARK}\n{text[-MAX_STDERR_CHARS:]}"
    return f"{text}\n{_TRUNCATION_MARK}" if execution.stderr_truncated else text


def _outcome_note(execution: Execution, run_timeout: float, memory_limit_mb: int | None, *, has_output: bool) -> str:
    no_output = "" if has_output else " It produced no output."
    match execution.outcome:
        case ExecutionOutcome.OK:
            return ""
        case ExecutionOutcome.TIMEOUT:
            return f"[The program was stopped: it took longer than {run_timeout:.3g} s.{no_output}]"
        case ExecutionOutcome.OUT_OF_MEMORY:
            limit = f" of {memory_limit_mb} MB" if memory_limit_mb else ""
            return f"[The program was stopped: it exceeded its memory limit{limit}.{no_output}]"
        case ExecutionOutcome.COMPILE_TIMEOUT:
            return "[The compiler was stopped: it took too long.]"
        case ExecutionOutcome.COMPILE_FAILED:
            return "[The program did not compile.]"
    code = execution.return_code
    if code is not None and code < 0:
        name = next((one.name for one in signal.Signals if one == -code), "unknown")
        return f"[The program was terminated by signal {-code} ({name}).{no_output}]"
    return "" if execution.stderr else f"[The program failed with exit status {code}.]"
