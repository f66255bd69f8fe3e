"""Fake inference servers with recorded wire formats: vLLM 0.32 with both of its APIs. The completion is `IDS`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

IDS = [504, 2798, 6330, 314, 2]
LOGPROBS = [-0.5, -1.25, -0.125, -2.0, -0.75]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(**routes: Handler) -> AsyncIterator[str]:
    """Serve POST routes, and yield the URL. `__` in a name is `/` in the path."""
    app = web.Application(client_max_size=2**30)
    for name, handler in routes.items():
        app.router.add_post("/" + name.replace("__", "/"), handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@dataclass
class FakeVLLM:
    """Fake vLLM, with `--enable-scale-out` or without. `bodies` has the received bodies by path."""

    scale_out: bool
    step: float = 0.0
    """Seconds per token."""
    shift: int = 0
    """Number of places by which the ids beside the log-probabilities are shifted."""
    shortened: int = 0
    """Number of ids that the server drops from the prompt."""
    used_prompt: list[int] | None = None
    """Ids of the prompt with placeholders for images, which the server returns."""
    bodies: dict[str, list[Any]] = field(default_factory=dict)
    disconnected: int = 0
    _aborts: dict[str, asyncio.Event] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        routes: dict[str, Handler] = {"v1__completions": self.completions}
        if self.scale_out:
            routes |= {"inference__v1__generate": self.generate, "inference__v1__abort_requests": self.abort}
        async with serving(**routes) as url:
            yield url

    async def generate(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        if any(number >= 49152 for number in body["token_ids"]):
            error = {"message": "Token id 49152 is out of vocabulary", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        name = f"generate-tokens-{body['request_id']}"
        count, finish = await self._sample(name, body["sampling_params"]["max_tokens"])
        content = [
            {"token_id": number, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for number, logprob in zip(self._logprob_ids(count), LOGPROBS, strict=False)
        ]
        choice = {"index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": IDS[:count]}
        choice |= {"logprobs": {"content": content}, "weight_versions": [{"version": "7", "start": 0, "end": count}]}
        usage = {
            "prompt_tokens": len(body["token_ids"]) - self.shortened,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        answer = {"request_id": name, "output_mode": "tokens", "choices": [choice], "usage": usage}
        if body.get("return_token_ids"):
            assert self.used_prompt is not None
            usage["prompt_tokens"] = len(self.used_prompt)
            answer["prompt_token_ids"] = self.used_prompt
        return web.json_response(answer)

    async def completions(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        count, finish = await self._sample(f"cmpl-{body['request_id']}", body["max_tokens"])
        tokens = [f"token_id:{number}" for number in self._logprob_ids(count)]
        logprobs = {"text_offset": [0] * count, "token_logprobs": LOGPROBS[:count], "tokens": tokens}
        choice = {"index": 0, "text": "".join(tokens), "logprobs": logprobs, "finish_reason": finish}
        choice |= {"stop_reason": None, "token_ids": IDS[:count], "prompt_token_ids": body["prompt"]}
        usage = {"prompt_tokens": len(body["prompt"]) - self.shortened, "prompt_tokens_details": None}
        return web.json_response({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage})

    def _logprob_ids(self, count: int) -> list[int]:
        return (IDS[self.shift :] + IDS[: self.shift])[:count]

    async def abort(self, request: web.Request) -> web.Response:
        for name in (await self._read(request))["request_ids"]:
            if event := self._aborts.get(name):
                event.set()
        return web.Response()

    async def _read(self, request: web.Request) -> Any:
        body = await request.json()
        self.bodies.setdefault(request.path, []).append(body)
        return body

    async def _sample(self, name: str, max_tokens: int) -> tuple[int, str]:
        """Return the number of sampled tokens and the finish reason."""
        aborted = self._aborts[name] = asyncio.Event()
        try:
            for count in range(min(max_tokens, len(IDS))):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), self.step)
                if aborted.is_set():
                    return count, "abort"
        except asyncio.CancelledError:
            self.disconnected += 1
            raise
        return min(max_tokens, len(IDS)), "length" if max_tokens < len(IDS) else "stop"
