"""OpenAIEngine: asks any server that has OpenAI's `/v1/chat/completions`, text in and text out. For evaluation.

engine = OpenAIEngine("http://127.0.0.1:30000", model="Qwen/Qwen3-8B")
reply = await engine.chat("t7/0", [Message(role="user", content="Hello")], tools=[], sampling_params={})
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import orjson
from yarl import URL

from toolroll.rollout.engines.call import Call
from toolroll.rollout.engines.engine import Finish, Reply, SamplingParams
from toolroll.rollout.engines.servers import MAX_CONNECTIONS, Servers, by, timings_of
from toolroll.sandbox.protocol import scrub
from toolroll.schemas import JsonDict, Message

FINISH = {"length": Finish.LENGTH, "abort": Finish.ABORT, "content_filter": Finish.ABORT}
"""All others, `stop` and `tool_calls` and what a server made up itself, are STOP."""


class OpenAIEngine:
    """Asks for messages, at one server or several. Any event loop may use it, and it pickles.

    Args:
        urls: As OpenAI's `base_url`. Where there is no path, it is `/v1`.
        model: Its name at the server.
        api_key: By default, what the environment has as OPENAI_API_KEY.
        max_connections: Per server and event loop; more calls wait for one.
    """

    def __init__(
        self,
        urls: str | Sequence[str] = "https://api.openai.com/v1",
        *,
        model: str,
        api_key: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.model = model
        bases = [_with_version(url) for url in ([urls] if isinstance(urls, str) else urls)]
        key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        self._servers = Servers(bases, token=key, max_connections=max_connections)

    async def chat(
        self,
        request_id: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> Reply:
        """Ask for the next message.

        `sampling_params` are the server's own, but for `max_new_tokens`, which goes as `max_tokens`. For a server that
        wants another name, such as `max_completion_tokens`, give that one.
        """
        params = dict(sampling_params)
        if (most := params.pop("max_new_tokens", None)) is not None:
            params["max_tokens"] = most
        if tools:
            params["tools"] = list(tools)

        def body(attempt_id: str) -> dict[str, Any]:
            return {"model": self.model, "messages": [_written(message) for message in messages], **params}

        return await self._servers.ask(Call(request_id, "/chat/completions", body, _reply, by(deadline), affinity))

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._servers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.close()


def _written(message: Message) -> dict[str, Any]:
    """A message for the wire, where arguments are text, and no text has half a character."""
    written: JsonDict = scrub(message.model_dump(exclude_none=True))
    for call in written.get("tool_calls", ()):
        if not isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return written


def _reply(answer: Any, call: Call[Any]) -> Reply:
    choice = answer["choices"][0]
    said = choice["message"]
    calls = [{"id": one.get("id"), "function": _function(one["function"])} for one in said.get("tool_calls") or ()]
    message = Message(
        role="assistant",
        content=said.get("content"),
        reasoning_content=said.get("reasoning_content") or said.get("reasoning"),
        tool_calls=calls or None,  # type: ignore[arg-type]  # pydantic reads them
    )
    cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    finish = FINISH.get(choice.get("finish_reason"), Finish.STOP)
    return Reply(message=message, finish=finish, timings=timings_of(call, cached_tokens=cached))


def _function(said: Any) -> dict[str, Any]:
    """A call's function, as far as the model wrote one."""
    arguments = said.get("arguments")
    if not isinstance(arguments, str | dict):
        arguments = "" if arguments is None else orjson.dumps(arguments).decode()
    return {"name": said.get("name") or "", "arguments": arguments}


def _with_version(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix("/chat/completions")
    return base + "/v1" if "://" in base and URL(base).path in ("", "/") else base
