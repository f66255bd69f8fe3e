"""Sample trajectories, strategies for arbitrary ones, and lines as verl writes them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from strategies import JSON

from toolroll.errors import Fault
from toolroll.rollout.engines.base import GenerationTimings
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, Rewards, Trajectory, TurnRecord
from toolroll.schemas import FunctionCall, Message, ToolCall


def trajectory(
    number: int = 0, *, score: float | None = 1.0, text: str = "6 times 7 is 42.", **other: Any
) -> Trajectory:
    """Return a trajectory with a question, a call of the code interpreter, and an answer."""
    tokens = TokenStream([1, 2, 3, 4])
    tokens.append_sampled([5, 6, 7], [-0.5, -0.25, -0.125], turn=0, weight_version="3")
    tokens.append_unsampled([8, 9], turn=0)
    tokens.append_sampled([10, 11], [-1.0, -2.0], turn=1, weight_version="3")
    arguments = {"code": "print(6 * 7)"}
    call = ToolCall(id="call_0_0", function=FunctionCall(name="code_interpreter", arguments=arguments))
    metrics = {"queue_wait": 0.25, "sandbox_wait": 0.01, "execution_time": 0.5, "attempts": 1, "outcome": "ok"}
    given: dict[str, Any] = {
        "request_id": f"request-{number}",
        "group": str(number // 8),
        "sample": number % 8,
        "messages": [
            Message(role="user", content="What is 6 times 7?"),
            Message(role="assistant", content="", reasoning_content="Let me compute.", tool_calls=[call]),
            Message(role="tool", content="42\n", tool_call_id="call_0_0", name="code_interpreter"),
            Message(role="assistant", content=text),
        ],
        "tokens": tokens,
        "finish_reason": FinishReason.STOP,
        "outcome": "ok",
        "fidelity": Fidelity.EXACT,
        "logprobs_mode": "processed_logprobs",
        "rewards": Rewards(total=score, steps=(0.0, 0.0), tools={"code_interpreter": 0.0}, functions={"right": score}),
        "turns": [
            TurnRecord(
                turn=turn,
                tokens=count,
                finish="stop",
                weight_version="3",
                timings=GenerationTimings(total=0.5, queue=0.1),
            )
            for turn, count in enumerate((3, 2))
        ],
        "calls": [
            CallRecord(
                turn=0, tool="code_interpreter", arguments=arguments, answer="42\n", seconds=0.75, metrics=metrics
            )
        ],
        "seconds": 2.0,
        "extra": {"ground_truth": "42"},
    }
    return Trajectory(**{**given, **other})


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
"""Includes lone surrogates, which models write."""
SURROGATE_FREE = st.text(max_size=12)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def streams(draw: st.DrawFn) -> TokenStream:
    """Generate tokens of up to three turns, with any log-probabilities or none."""
    ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)
    stream = TokenStream(draw(ids))
    has_logprobs = draw(st.booleans())
    for turn in range(draw(st.integers(0, 3))):
        sampled = draw(ids)
        logprobs = [draw(st.floats(width=32)) for _ in sampled] if has_logprobs else None
        stream.append_sampled(sampled, logprobs, turn=turn, weight_version=draw(st.none() | ANY_TEXT))
        stream.append_unsampled(draw(ids), turn=turn)
    return stream


MESSAGES = st.builds(
    lambda role, content, reasoning, calls, name, other: Message(
        role=role, content=content, reasoning_content=reasoning, tool_calls=calls, name=name, **other
    ),
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.none() | ANY_TEXT,
    st.none() | ANY_TEXT,
    st.none()
    | st.lists(
        st.builds(
            lambda call_id, name, arguments: ToolCall(
                id=call_id, function=FunctionCall(name=name, arguments=arguments)
            ),
            st.none() | ANY_TEXT,
            ANY_TEXT,
            ANY_TEXT | st.dictionaries(ANY_TEXT, JSON, max_size=2),
        ),
        max_size=2,
    ),
    st.none() | ANY_TEXT,
    st.dictionaries(st.sampled_from(["weight", "note"]), JSON | ANY_TEXT, max_size=2),
)
CALLS = st.builds(
    CallRecord,
    turn=st.integers(0, 5),
    tool=st.none() | ANY_TEXT,
    arguments=st.none() | ANY_TEXT | st.dictionaries(ANY_TEXT, JSON, max_size=2),
    answer=ANY_TEXT,
    fault=st.none() | st.sampled_from(Fault),
    error=st.none() | ANY_TEXT,
    reward=st.none() | NUMBERS,
    seconds=NUMBERS,
    metrics=st.dictionaries(ANY_TEXT, JSON, max_size=2),
)
TURNS = st.builds(
    TurnRecord,
    turn=st.integers(0, 5),
    tokens=st.integers(0, 2**40),
    finish=ANY_TEXT,
    weight_version=st.none() | ANY_TEXT,
    timings=st.builds(
        GenerationTimings, total=NUMBERS, queue=st.none() | NUMBERS, cached_tokens=st.none() | st.integers(0, 9)
    ),
)
REWARDS = st.builds(
    Rewards,
    total=st.none() | NUMBERS,
    steps=st.lists(NUMBERS, max_size=3).map(tuple),
    tools=st.dictionaries(ANY_TEXT, NUMBERS, max_size=2),
    functions=st.dictionaries(ANY_TEXT, st.none() | NUMBERS, max_size=2),
)
TRAJECTORIES = st.builds(
    Trajectory,
    request_id=ANY_TEXT,
    group=ANY_TEXT,
    sample=st.integers(0, 2**31),
    messages=st.lists(MESSAGES, max_size=4),
    tokens=streams(),
    earlier=st.lists(streams(), max_size=2),
    finish_reason=st.sampled_from(FinishReason),
    outcome=st.sampled_from(["ok", "infra"]),
    error=st.none() | ANY_TEXT,
    fidelity=st.sampled_from(Fidelity),
    logprobs_mode=st.sampled_from(["processed_logprobs", "raw_logprobs", None]),
    rewards=REWARDS,
    turns=st.lists(TURNS, max_size=3),
    calls=st.lists(CALLS, max_size=3),
    seconds=NUMBERS,
    extra=st.dictionaries(ANY_TEXT, JSON, max_size=2),
)


VERL_PROMPT = "system\nYou are a helpful assistant.\nuser\nWhat is 6 times 7?\nassistant\n"
VERL_ANSWER = (
    "<think>\nUse the tool.\n</think>\n\nI compute.\n"
    '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
    "\nuser\n<tool_response>\n42\n</tool_response>\nassistant\n6 times 7 is #### 42"
)
"""Qwen's template decoded without special tokens, with a tool call."""


def verl_line(step: int, number: int = 0, *, score: float = 1.0, version: str = "0.6", **extras: Any) -> dict[str, Any]:
    """Return the fields of one sample in a dump of verl.

    0.6 and 0.7 write five keys and the extra values of the reward function. 0.8 adds `request_id`, if there is one. The
    newer trainer of 0.9 ("v1") adds `uid`, composed of the prompt's id, the sample and the part.
    """
    line = {"input": VERL_PROMPT, "output": VERL_ANSWER, "gts": "42", "score": score, "step": step, **extras}
    if version == "0.8":
        line["request_id"] = f"verl-{number}"
    if version == "0.9":
        line["uid"] = f"0d9a4a66-9c9e-4d9b_{number}_0"
    return line


def write_verl(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a file like verl: with the standard library's JSON encoder, in UTF-8, including NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
