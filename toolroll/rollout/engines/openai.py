"""Chat engine for servers with OpenAI's `/v1/chat/completions`. For evaluation: trajectories contain no tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from yarl import URL

from toolroll._internal.text import replace_lone_surrogates_in_json
from toolroll.http import HttpRequest
from toolroll.images import Image
from toolroll.rollout.engines.base import ChatReply, FinishType, SamplingParams
from toolroll.rollout.engines.http_engine import MAX_CONNECTIONS, HttpEngine, retry_policy, timings_of
from toolroll.schemas import JsonDict, Message

OPENAI_FINISH_TYPES = {"length": FinishType.LENGTH, "abort": FinishType.ABORT, "content_filter": FinishType.ABORT}
"""All other finish reasons, such as `stop`, `tool_calls` and non-standard ones, are STOP."""


class OpenAIEngine(HttpEngine):
    """Chat engine for one or several OpenAI-compatible servers. Any event loop can use it, and it can be pickled.

    Args:
        urls: Base URLs as in OpenAI's `base_url`. `/v1` is appended to URLs without a path.
        model: Name of the model at the server.
        api_key: API key. The environment variable `OPENAI_API_KEY` by default.
        max_connections: Maximum number of connections to each server, for each event loop. Further calls wait.

    Raises:
        ConfigError: If a URL or `max_connections` is invalid, or no URL is given.

    Example:
        async with OpenAIEngine("http://127.0.0.1:30000", model="Qwen/Qwen3-8B") as engine:
            messages = [Message(role="user", content="Hello")]
            reply = await engine.chat("t7/0", messages, tools=[], sampling_params={"max_new_tokens": 512})
            print(reply.message.content)
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
        super().__init__(bases, token=key, max_connections=max_connections)

    async def chat(
        self,
        request_id: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> ChatReply:
        """Generate the next message of a conversation.

        Args:
            request_id: Id of this call, for messages.
            messages: Conversation so far.
            tools: Schemas of the available tools.
            sampling_params: Sampling parameters of the server. `max_new_tokens` is sent as `max_tokens`. If the server
                expects another name, such as `max_completion_tokens`, use that name instead.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`. One hour by default.
            affinity: Calls with the same affinity go to the same server.

        Returns:
            The message of the assistant.

        Raises:
            EngineUnavailable: If no server returned a message before the retries or the deadline were exhausted.
            EngineRefused: If a message or a parameter is invalid.
        """
        params = dict(sampling_params)
        if (max_new_tokens := params.pop("max_new_tokens", None)) is not None:
            params["max_tokens"] = max_new_tokens
        if tools:
            params["tools"] = list(tools)

        def body(attempt_id: str) -> dict[str, Any]:
            return {"model": self.model, "messages": [_to_wire(message) for message in messages], **params}

        policy = retry_policy(deadline)
        return await self._http.send(
            HttpRequest("/chat/completions", _parse_reply, policy, body=body, name=request_id, affinity=affinity)
        )


def _to_wire(message: Message) -> dict[str, Any]:
    """Return a message as JSON, with images as URLs, the arguments of calls as text, and without lone surrogates."""
    fields: JsonDict = message.model_dump(exclude={"content"}, exclude_none=True)
    if message.content is not None:
        fields["content"] = message.content
    if isinstance(message.content, list):
        fields["content"] = list(map(_part_to_wire, message.content))
    fields = replace_lone_surrogates_in_json(fields)
    for call in fields.get("tool_calls", ()):
        if not isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return fields


def _part_to_wire(part: JsonDict) -> JsonDict:
    image = part.get("image")
    return {"type": "image_url", "image_url": {"url": image.url}} if isinstance(image, Image) else part


def _parse_reply(content: bytes, request: HttpRequest[Any]) -> ChatReply:
    response = orjson.loads(content)
    choice = response["choices"][0]
    fields = choice["message"]
    calls = [
        {"id": call.get("id"), "function": _parse_function(call["function"])} for call in fields.get("tool_calls") or ()
    ]
    message = Message(
        role="assistant",
        content=fields.get("content"),
        reasoning_content=fields.get("reasoning_content") or fields.get("reasoning"),
        tool_calls=calls or None,  # type: ignore[arg-type]  # pydantic converts them
    )
    cached_tokens = ((response.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    finish = OPENAI_FINISH_TYPES.get(choice.get("finish_reason"), FinishType.STOP)
    return ChatReply(message=message, finish=finish, timings=timings_of(request, cached_tokens=cached_tokens))


def _parse_function(function: Any) -> dict[str, Any]:
    """Return the function of a tool call, which the model may have left incomplete."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        arguments = "" if arguments is None else orjson.dumps(arguments).decode()
    return {"name": function.get("name") or "", "arguments": arguments}


def _with_version(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix("/chat/completions")
    return base + "/v1" if "://" in base and URL(base).path in ("", "/") else base
