"""An inference server of verl's, behind verl's own client and load balancer: scripted, or a relay to a real SGLang.

It answers as verl's servers do, with TokenOutput, and remembers what it was asked and what it gave.
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

PIECES = 3
"""Text is encoded in pieces of some characters each, which gives other ids than encoding it whole does."""
STEP = 4
"""Of the trainer, by whose weights it samples."""


class Server:
    """`mode` is what it does: "scripted", "dying", "real"."""

    def __init__(self, model: str, truths: dict[str, str]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.truths = truths
        self.stop = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.mode, self.settings = "scripted", {}
        self.random = random.Random(0)
        self.reset()

    def reset(self) -> None:
        self.gave: list[tuple[list[int], list[int], list[float]]] = []
        self.asked: Counter[str] = Counter()
        self.ended = 0
        self.most = self.in_flight = 0
        self.died = asyncio.Event()

    def become(self, mode: str, **settings: Any) -> None:
        """Begin anew, in another mode."""
        self.mode, self.settings = mode, settings
        self.reset()

    def told(self) -> dict[str, Any]:
        """What it gave, to which prompts."""
        return {"gave": self.gave, "most": self.most}

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            if self.mode == "real":
                ids, logprobs, reason = await self._sample(prompt_ids, sampling_params, request_id)
            else:
                ids, reason = await self._say(prompt_ids, sampling_params)
                logprobs = [-self.random.random() for _ in ids]
        finally:
            self.in_flight -= 1
        self.gave.append((list(prompt_ids), ids, logprobs))
        wanted = sampling_params.get("logprobs")
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs if wanted else None,
            stop_reason=reason,
            extra_fields={"global_steps": STEP},
        )

    async def _say(self, prompt_ids: list[int], params: dict[str, Any]) -> tuple[list[int], str]:
        text = self.tokenizer.decode(prompt_ids)
        question = next(one for one in self.truths if one in text)
        said = text.rpartition(question)[2]
        if found := re.search(r"I am number (\d+)\.", said):
            place = int(found[1])
        else:
            place = self.asked[question]
            self.asked[question] += 1
            if self.mode == "dying" and place >= self.settings["before"]:
                await self._die()
        await asyncio.sleep(0.01)
        words = self._script(question, said, place)
        ids = [one for start in range(0, len(words), PIECES) for one in self._encode(words[start : start + PIECES])]
        most = params.get("max_new_tokens", len(ids) + 1)
        if len(ids) >= most:
            return ids[:most], "length"
        self.ended += "That is it." in words
        return [*ids, self.stop], "stop"

    def _script(self, question: str, said: str, place: int) -> str:
        """What the model says: it keeps numbers, adds them up in the next turn, has its answer checked, and gives it.

        Every eighth question has it write a call that is no JSON first. Whether it is right goes by turns.
        """
        number, turn = list(self.truths).index(question), said.count("<|im_start|>assistant\n") - 1
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

    async def _die(self) -> None:
        """The first of each group go through; then the sandbox dies, and the others begin."""
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
            "temperature": 0.0,  # so small a model does best then
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
