"""The model of `toolroll demo`: an engine that plays a model which solves word problems with tools.

It has the tokenizer in the directory `model`, a byte-level BPE that `scripts/make_demo_tokenizer.py` trains on
toolroll's documentation.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolroll.rollout.engines.scripted import ScriptedEngine

MODEL_DIR = Path(__file__).with_name("model")
SECONDS_PER_TOKEN = 0.02
CODE_RUNS = 0.8
"""Probability that the program runs. Otherwise it uses a name that does not exist."""
ANSWER_IS_RIGHT = 0.75
CHECKS_ANSWER = 0.7
CALLS_EXISTING_TOOL = 0.9


class DemoModel(ScriptedEngine):
    """Plays a model that runs a program, may check the result, and answers.

    It makes the mistakes of a small model: programs that fail, calls of tools that do not exist, wrong answers.

    Args:
        urls: Ignored. Engines of a run get it.
        problems: File of the problems, in the format of GSM8K.
        seconds_per_token: Duration of each token.
        seed: Seed of the mistakes.
    """

    def __init__(
        self, urls: object = None, *, problems: str, seconds_per_token: float = SECONDS_PER_TOKEN, seed: int = 8
    ) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR), local_files_only=True)
        self._answers = dict(_read_problems(Path(problems)))
        self._random = random.Random(seed)  # noqa: S311 (mistakes of a model)
        super().__init__(self._next_turn, seconds_per_token=seconds_per_token)

    def _next_turn(self, request_id: str, prompt_ids: Sequence[int], turn: int) -> list[int]:
        prompt = self._tokenizer.decode(prompt_ids)
        answer = next(answer for question, answer in self._answers.items() if question in prompt)
        text = self._text(answer, turn)
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]

    def _text(self, answer: str, turn: int) -> str:
        calculations, number = re.findall(r"<<(.+?)=", answer), answer.rpartition("#### ")[2]
        if not self._happens(ANSWER_IS_RIGHT):
            number = str(int(number) + 1)
        if turn == 0:
            code = f"print({calculations[-1]})" if self._happens(CODE_RUNS) else "print(result)"
            return f"I compute it.\n{_call('code_interpreter', code=code)}"
        if turn == 1 and self._happens(CHECKS_ANSWER):
            return _call("calc_gsm8k_reward" if self._happens(CALLS_EXISTING_TOOL) else "check", answer=number)
        return f"Step by step, that makes {number}.\n#### {number}"

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability


def _read_problems(file: Path) -> Iterable[tuple[str, str]]:
    for line in file.read_text().splitlines():
        problem = json.loads(line)
        yield problem["question"], problem["answer"]


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
