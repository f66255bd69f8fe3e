"""Test server behind verl's client and load balancer: scripted, or a relay to a real SGLang server.

It returns TokenOutput like verl's servers, and records prompts and outputs.
"""

import asyncio
import json
import os
import random
import re
import signal
from collections import Counter
from typing import Any

import aiohttp
from transformers import AutoTokenizer
from verl.workers.rollout.replica import TokenOutput

PIECE_CHARS = 3
"""Number of characters that are encoded at a time, which results in other ids than encoding the whole text."""
STEP = 4
"""Step of the trainer whose weights the server has."""


class Server:
    """Server whose `mode` is "scripted", "dying" or "real"."""

    def __init__(self, model: str, truths: dict[str, str]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.truths = truths
        self.stop = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.mode, self.settings = "scripted", {}
        self.random = random.Random(0)
        self.reset()

    def reset(self) -> None:
        self.outputs: list[tuple[list[int], list[int], list[float]]] = []
        self.asked: Counter[str] = Counter()
        self.ended = 0
        self.max_in_flight = self.in_flight = 0
        self.died = asyncio.Event()

    def set_mode(self, mode: str, **settings: Any) -> None:
        """Reset the server and change its mode."""
        self.mode, self.settings = mode, settings
        self.reset()

    def log(self) -> dict[str, Any]:
        """Return all prompts with their outputs, and the maximum number of requests in flight."""
        return {"outputs": self.outputs, "max_in_flight": self.max_in_flight}

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            if self.mode == "real":
                ids, logprobs, reason = await self._sample(prompt_ids, sampling_params, request_id)
            else:
                ids, reason = await self._scripted_turn(prompt_ids, sampling_params)
                logprobs = [-self.random.random() for _ in ids]
        finally:
            self.in_flight -= 1
        self.outputs.append((list(prompt_ids), ids, logprobs))
        logprobs_requested = sampling_params.get("logprobs")
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs if logprobs_requested else None,
            stop_reason=reason,
            extra_fields={"global_steps": STEP},
        )

    async def _scripted_turn(self, prompt_ids: list[int], params: dict[str, Any]) -> tuple[list[int], str]:
        text = self.tokenizer.decode(prompt_ids)
        question = next(one for one in self.truths if one in text)
        conversation = text.rpartition(question)[2]
        if found := re.search(r"I am number (\d+)\.", conversation):
            place = int(found[1])
        else:
            place = self.asked[question]
            self.asked[question] += 1
            if self.mode == "dying" and place >= self.settings["before"]:
                await self._kill_sandbox()
        await asyncio.sleep(0.01)
        words = self._script(question, conversation, place)
        ids = [
            one
            for start in range(0, len(words), PIECE_CHARS)
            for one in self._encode(words[start : start + PIECE_CHARS])
        ]
        max_new_tokens = params.get("max_new_tokens", len(ids) + 1)
        if len(ids) >= max_new_tokens:
            return ids[:max_new_tokens], "length"
        self.ended += "That is it." in words
        return [*ids, self.stop], "stop"

    def _script(self, question: str, conversation: str, place: int) -> str:
        """Return the model's next turn: define numbers, add them in the next turn, check the answer, and state it.

        For every eighth question, the model first writes a call that is not valid JSON. Every other answer is correct.
        """
        number, turn = list(self.truths).index(question), conversation.count("<|im_start|>assistant\n") - 1
        answer = self.truths[question] if (number + place) % 2 else "-1"
        who = f"I am number {place}.\n"
        if number % 8 == 3:
            if turn == 0:
                return who + "<tool_call>\n{'name': code_interpreter}\n</tool_call>"
            turn -= 1
        match turn:
            case 0:
                return who + call("code_interpreter", code=f"numbers = {re.findall(r'[0-9]+', question)}")
            case 1:
                return call("code_interpreter", code="print('sum', sum(map(int, numbers)))")
            case 2:
                return call("calc_gsm8k_reward", answer=answer)
        return f"That is it.\n#### {answer}"

    async def _kill_sandbox(self) -> None:
        """Wait until the first samples of each group have ended, then kill the sandbox."""
        async with asyncio.timeout(120):
            while self.ended < self.settings["when"]:
                await asyncio.sleep(0.02)
        if not self.died.is_set():
            self.died.set()
            os.killpg(self.settings["pid"], signal.SIGKILL)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def _sample(
        self, prompt_ids: list[int], params: dict[str, Any], request_id: str
    ) -> tuple[list[int], list[float], str]:
        wanted = {
            "stop_token_ids": params["stop_token_ids"],
            "max_new_tokens": min(64, params["max_new_tokens"]),
            "temperature": 0.0,  # a small model needs greedy sampling
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        body = {"rid": request_id, "input_ids": prompt_ids, "sampling_params": wanted, "return_logprob": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.settings["url"] + "/generate", json={**body, "logprob_start_len": -1}) as got,
        ):
            answer = await got.json()
        meta = answer["meta_info"]
        return answer["output_ids"], [one[0] for one in meta["output_token_logprobs"]], meta["finish_reason"]["type"]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
