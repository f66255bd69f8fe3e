"""Deterministic dumps in the formats of toolroll and of verl."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolroll.errors import Fault
from toolroll.records.writer import RecordWriter
from toolroll.rollout.engines.base import GenerationTimings
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, Rewards, Trajectory, TurnRecord
from toolroll.schemas import FunctionCall, Message, ToolCall

SYSTEM = "You are a careful mathematician. Use the code_interpreter for every calculation."
PROBLEMS = (
    (
        "Mariana keeps 48 jars of fig jam on her shelf, and half that number in a box beside the door. "
        "What is the number of jars that she kept in these two places?",
        "72",
        "shelf = 48\nbox = shelf // 2\nprint(shelf + box)",
    ),
    (
        "A swing hangs on 2 metres of rope and half as much chain. What do rope and chain measure in total, in m?",
        "3",
        "rope = 2\nchain = rope / 2\nprint(rope + chain)",
    ),
    (
        "Pavel has 3 baskets in each of 3 weeks, and 60 apples go into each basket of his. "
        "What number of apples is that in all?",
        "540",
        "# baskets × weeks × apples\nprint(3 * 3 * 60)",
    ),
    (
        "Hillside farm keeps twice the hives of the greenhouse, which keeps 4 times those of the orchard. "
        "At 20 hives in that orchard, what is the number of hives in all of these?",
        "260",
        "orchard = 20\ngreenhouse = 4 * orchard\nhillside = 2 * greenhouse\nprint(orchard + greenhouse + hillside)",
    ),
)


Encode = Callable[[str], list[int]]


def trajectory(step: int, group: int, sample: int, chance: random.Random, encode: Encode | None = None) -> Trajectory:
    """Return a conversation with thinking, tool calls and an answer, which is correct more often in later steps."""
    encode = encode or (lambda text: [chance.randrange(1000) for _ in range(max(1, len(text) // 4))])
    question, answer, code = PROBLEMS[group % len(PROBLEMS)]
    skill = min(0.95, 0.25 + 0.07 * step)
    crashes = chance.random() > skill
    right = chance.random() < skill
    infra = chance.random() < 0.03
    messages = [Message(role="system", content=SYSTEM), Message(role="user", content=question)]
    turns: list[TurnRecord] = []
    calls: list[CallRecord] = []
    tokens = TokenStream(encode(f"system\n{SYSTEM}\nuser\n{question}\nassistant\n"))
    rounds = [code.replace("print", "prnt"), code] if crashes else [code]
    for turn, program in enumerate(rounds):
        thought = f"I should compute this.\nThe question is about {question.split()[0]}, so I set up the numbers."
        text = "Let me calculate." if turn == 0 else "That was a typing error. Again:"
        arguments = json.dumps({"name": "code_interpreter", "arguments": {"code": program}})
        written = f"<think>\n{thought}\n</think>\n{text}\n<tool_call>\n{arguments}\n</tool_call>"
        _sample(tokens, turns, turn, encode(written), chance, step)
        call = ToolCall(id=f"call_{turn}", function=FunctionCall(name="code_interpreter", arguments={"code": program}))
        thinking = thought if turn == 0 else None
        messages.append(Message(role="assistant", content=text, reasoning_content=thinking, tool_calls=[call]))
        record = _call(turn, program, answer, chance, infra)
        calls.append(record)
        if record.fault is Fault.INFRA:
            break
        messages.append(Message(role="tool", content=record.answer, tool_call_id=f"call_{turn}", name=record.tool))
        tokens.append_unsampled(encode(f"\ntool\n{record.answer}\nassistant\n"), turn=turn)
    else:
        text = f"The program says so.\n\n#### {answer if right else int(answer) + chance.randrange(1, 9)}"
        _sample(tokens, turns, len(rounds), encode(text), chance, step)
        messages.append(Message(role="assistant", content=text))
    score = None if infra else float(right)
    reason = FinishReason.INFRA if infra else FinishReason.STOP if right or not crashes else FinishReason.LENGTH
    return Trajectory(
        request_id=f"{step:04x}{group:04x}-{sample:04x}-4000-8000-{chance.randrange(16**12):012x}",
        group=f"gsm8k/{group}",
        sample=sample,
        messages=messages,
        tokens=tokens,
        finish_reason=reason,
        outcome="infra" if infra else "ok",
        error=calls[-1].error if infra else None,
        fidelity=Fidelity.EXACT,
        logprobs_mode="processed_logprobs",
        rewards=Rewards(
            total=score,
            steps=tuple(call.reward or 0.0 for call in calls),
            tools={"code_interpreter": 0.0},
            functions={} if infra else {"gsm8k": float(right)},
        ),
        turns=turns,
        calls=calls,
        seconds=round(sum(turn.timings.total for turn in turns) + sum(call.seconds for call in calls), 3),
        extra={"ground_truth": answer, "difficulty": group},
    )


def _sample(
    tokens: TokenStream, turns: list[TurnRecord], turn: int, ids: list[int], chance: random.Random, step: int
) -> None:
    logprobs = [-(abs(chance.gauss(0, 0.4)) ** 3) * 12 for _ in ids]
    version = f"v{step}"
    tokens.append_sampled(ids, logprobs, turn=turn, weight_version=version)
    took = GenerationTimings(total=round(len(ids) * 0.021, 3), queue=0.004, cached_tokens=64 * turn)
    turns.append(TurnRecord(turn=turn, tokens=len(ids), finish="stop", weight_version=version, timings=took))


def _call(turn: int, program: str, answer: str, chance: random.Random, infra: bool) -> CallRecord:
    waited, ran = round(chance.random() * 0.02, 4), round(0.03 + chance.random() * 0.1, 4)
    metrics: dict[str, Any] = {"queue_wait": waited, "execution_time": ran, "attempts": 1}
    fields: dict[str, Any] = {
        "turn": turn,
        "tool": "code_interpreter",
        "arguments": {"code": program},
        "seconds": round(waited + ran + 0.004, 4),
        "metrics": metrics,
    }
    if infra:
        metrics["attempts"] = 5
        error = "The sandbox at http://sandbox:8080 could not be reached in 5 attempts: connection refused."
        return CallRecord(**fields, answer="", fault=Fault.INFRA, error=error)
    if "prnt" in program:
        line = program.count("\n") + 1
        error = (
            f'Traceback (most recent call last):\n  File "main.py", line {line}, in <module>\n'
            "NameError: name 'prnt' is not defined"
        )
        return CallRecord(**fields, answer=error, fault=Fault.POLICY, error=error, reward=-0.05)
    return CallRecord(**fields, answer=answer, reward=0.0)


def write_toolroll_run(
    directory: Path,
    steps: Sequence[int] = (1, 2, 10),
    groups: int = 4,
    samples: int = 4,
    encode: Encode | None = None,
) -> Path:
    """Write a run with RecordWriter."""
    for step in steps:
        chance = random.Random(step)
        with RecordWriter(directory) as writer:
            for group in range(groups):
                for sample in range(samples):
                    writer.append(trajectory(step, group, sample, chance, encode), step)
        path = directory / f"{step}.jsonl"
        path.write_bytes(re.sub(rb'"written_at":[\d.]+', b'"written_at":1760000000.0', path.read_bytes()))
    return directory


def write_verl_run(directory: Path, steps: Sequence[int] = (1, 2)) -> Path:
    """Write a run in verl's formats: v0 with extra info of the reward function, v1 with `uid`."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps):
        lines = []
        for group, (question, answer, code) in enumerate(PROBLEMS):
            call = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
            line: dict[str, Any] = {
                "input": f"system\n{SYSTEM}\nuser\n{question}\nassistant\n",
                "output": f"<think>\nEasy.\n</think>\nLet me see.\n<tool_call>\n{call}\n</tool_call>\nuser\n"
                f"<tool_response>\n{answer}\n</tool_response>\nassistant\nSo it is.\n#### {answer}",
                "gts": answer,
                "score": 1.0 if group % 2 else 0.0,
                "step": step,
            }
            line |= {"acc": bool(group % 2), "format": 0.5} if number % 2 == 0 else {"uid": f"q{group}_0_0"}
            lines.append(json.dumps(line, ensure_ascii=False))
        (directory / f"{step}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory
