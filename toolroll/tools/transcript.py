"""What the model is shown of a program that ran: what a person at a terminal would want to read.

First stdout, then stderr, then, in brackets, whatever can't be seen from these: that the time or the memory ran out,
that output was cut, how a program ended that said nothing. Of a long stderr the part that matters is kept: a compiler's
first errors, a traceback's last lines. Pure.
"""

from __future__ import annotations

import signal

from toolroll.sandbox.execution import Execution, Outcome

MOST_STDERR = 4000
"""Characters of stderr that are shown. What a program prints is another matter: how much of it the rollout decides."""
_CUT = "[...]"


def transcript(execution: Execution, *, run_timeout: float, memory_limit_mb: int | None = None) -> str:
    """The text for the model. It is never empty."""
    parts = [execution.stdout.rstrip("\n")]
    if execution.stdout_truncated:
        parts.append("[The output was cut here: it was too long.]")
    parts.append(_stderr(execution))
    said = any(parts)
    parts += _notes(execution, run_timeout, memory_limit_mb, said=said)
    if execution.session_is_over:
        parts.append("[The interpreter has ended: what earlier programs had defined is gone.]")
    return "\n".join(part for part in parts if part) or "[No output.]"


def _stderr(execution: Execution) -> str:
    text = execution.stderr.rstrip("\n")
    if len(text) > MOST_STDERR:
        if execution.outcome is Outcome.COMPILE_FAILED:
            return f"{text[:MOST_STDERR]}\n{_CUT}"
        return f"{_CUT}\n{text[-MOST_STDERR:]}"
    return f"{text}\n{_CUT}" if execution.stderr_truncated else text


def _notes(execution: Execution, run_timeout: float, memory_limit_mb: int | None, *, said: bool) -> list[str]:
    so_far = "" if said else " It had written nothing."
    match execution.outcome:
        case Outcome.OK:
            return []
        case Outcome.TIMEOUT:
            return [f"[The program was stopped: it took longer than {run_timeout:.3g} s.{so_far}]"]
        case Outcome.OUT_OF_MEMORY:
            limit = f" of {memory_limit_mb} MB" if memory_limit_mb else ""
            return [f"[The program was stopped: it reached its memory limit{limit}.{so_far}]"]
        case Outcome.COMPILE_TIMEOUT:
            return ["[The compiler took too long and was stopped.]"]
        case Outcome.COMPILE_FAILED:
            return ["[The program did not compile.]"]
    code = execution.return_code
    if code is not None and code < 0:
        return [f"[The program was ended by signal {-code} ({_signal_name(-code)}).{so_far}]"]
    return [] if execution.stderr else [f"[The program failed with exit status {code}.]"]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
