"""An engine that asks the tool `look_up` about the word in the prompt, and answers with the tool's response."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.rollout.engines.scripted import ScriptedEngine


class QuestionEngine(ScriptedEngine):
    """Scripted engine whose output depends on the prompt.

    Args:
        urls: Not used.
        tokenizer: Directory of the tokenizer.
        environment: Environment variables to set in the process.
    """

    def __init__(self, urls: Any, *, tokenizer: str, environment: Mapping[str, str] = {}) -> None:
        from transformers import AutoTokenizer

        os.environ.update(environment)
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        super().__init__(self._answer)

    def _answer(self, request_id: str, prompt_ids: Sequence[int], turn: int) -> list[int]:
        text = self._tokenizer.decode(prompt_ids)
        word = re.findall(r"What is (\w+) \?", text)[-1]
        call = f"<tool_call>\n{json.dumps({'name': 'look_up', 'arguments': {'word': word}})}\n</tool_call>"
        answer = call if turn == 0 else f"Now I know {word}."
        return [
            *self._tokenizer.encode(answer, add_special_tokens=False),
            self._tokenizer.convert_tokens_to_ids("<|im_end|>"),
        ]
