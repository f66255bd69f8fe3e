"""Stand-in for two models behind an OpenAI-compatible server, so that the example needs neither a GPU nor a network.

The model `student` answers the questions of `questions.jsonl`, some of them incompletely. The model `judge`
compares words. Neither is a language model: replace them by real ones for real rewards.

Like a hosted service, the server limits the requests to the judge per minute (`--rpm`), counted over the last 10
seconds, and rejects further ones with status 429 and a `Retry-After` header. `GET /stats` returns what it has received.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import time
from collections import deque
from pathlib import Path
from typing import Any

from aiohttp import web

WINDOW_S = 10.0
"""Time over which requests to the judge are counted."""
CHARS_PER_TOKEN = 4
MODELS = ("student", "judge")
STUDENT_LATENCY_S, JUDGE_LATENCY_S = 0.1, 0.3


class StandIn:
    """The server's models, and the requests that they have received.

    Args:
        rpm: Maximum number of requests to the judge per minute.
        references: Reference answers, by question.
    """

    def __init__(self, rpm: float, references: dict[str, str]) -> None:
        self.stats = {"accepted": 0, "rejected": 0, "tokens": 0, "max_concurrent": 0}
        self._allowed = int(rpm * WINDOW_S / 60)
        self._references = references
        self._recent: deque[float] = deque()
        """Times of the accepted requests to the judge in the last 10 seconds."""
        self._concurrent = 0
        self._random = random.Random(8)  # noqa: S311 (mistakes of a model)

    async def complete(self, request: web.Request) -> web.Response:
        """Answer a request to `/v1/chat/completions`."""
        body = await request.json()
        prompt = body["messages"][-1]["content"]
        if body["model"] == "student":
            await asyncio.sleep(STUDENT_LATENCY_S)
            return _completion(prompt, self._answer(prompt))
        if (retry_after := self._retry_after()) is not None:
            self.stats["rejected"] += 1
            error = {"error": {"message": "Rate limit reached for model `judge`.", "code": "rate_limit_exceeded"}}
            return web.json_response(error, status=429, headers={"Retry-After": f"{retry_after:.0f}"})
        self._concurrent += 1
        self.stats["accepted"] += 1
        self.stats["max_concurrent"] = max(self.stats["max_concurrent"], self._concurrent)
        await asyncio.sleep(JUDGE_LATENCY_S)
        self._concurrent -= 1
        reply = f"Score: {_judge(prompt)}"
        self.stats["tokens"] += _usage(prompt, reply)["total_tokens"]
        return _completion(prompt, reply)

    async def show_stats(self, _: web.Request) -> web.Response:
        """Answer a request to `/stats`."""
        return web.json_response(self.stats)

    def _retry_after(self) -> float | None:
        """Return the seconds until a request to the judge is allowed, or count the request and return None."""
        now = time.monotonic()
        while self._recent and self._recent[0] <= now - WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._allowed:
            return max(1.0, self._recent[0] + WINDOW_S - now)
        self._recent.append(now)
        return None

    def _answer(self, question: str) -> str:
        words = self._references.get(question, "I do not know.").split()
        return " ".join(words[: self._random.choice((2, len(words) // 2, len(words), len(words)))])


def _judge(prompt: str) -> int:
    """Return a score from 0 to 10: the fraction of the reference's words that the answer has."""
    reference, answer = (
        set(re.findall(r"\w+", re.findall(rf"^{name}: (.*)$", prompt, re.MULTILINE)[0].lower()))
        for name in ("Reference", "Answer")
    )
    return round(10 * len(reference & answer) / len(reference))


def _usage(prompt: str, reply: str) -> dict[str, int]:
    prompt_tokens, reply_tokens = len(prompt) // CHARS_PER_TOKEN, len(reply) // CHARS_PER_TOKEN + 1
    total = prompt_tokens + reply_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": reply_tokens, "total_tokens": total}


def _completion(prompt: str, reply: str) -> web.Response:
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
    return web.json_response({"object": "chat.completion", "choices": [choice], "usage": _usage(prompt, reply)})


async def list_models(_: web.Request) -> web.Response:
    """Answer a request to `/v1/models`."""
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})


async def serve(port: int, rpm: float) -> None:
    """Serve until interrupted. Port 0 chooses a free port."""
    lines = Path(__file__).with_name("questions.jsonl").read_text(encoding="utf-8").splitlines()
    stand_in = StandIn(rpm, {row["question"]: row["reference"] for row in map(json.loads, lines)})
    app = web.Application()
    app.router.add_post("/v1/chat/completions", stand_in.complete)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/stats", stand_in.show_stats)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"Stand-in models at http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stand-in for an OpenAI-compatible server with two models.")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--rpm", type=float, default=600, help="requests to the judge per minute")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.port, arguments.rpm))
