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
from toolroll.limiter.settings import ResourceLimits
from toolroll.rollout.engines.base import ChatReply, FinishType, SamplingParams
from toolroll.rollout.engines.http_engine import MAX_CONNECTIONS, HttpEngine, retry_policy, timings_of
from toolroll.schemas import JsonDict, Message

OPENAI_FINISH_TYPES = {"length": FinishType.LENGTH, "abort": FinishType.ABORT}
"""All other finish reasons, such as `stop`, `tool_calls`, `content_filter` and non-standard ones, are STOP."""
CHARS_PER_TOKEN = 4
"""Assumed number of characters per token, if the cost of a request is estimated."""


class OpenAIEngine(HttpEngine):
    """Chat engine for one or several OpenAI-compatible servers. Any event loop can use it, and it can be pickled.

    Args:
        urls: Base URLs as in OpenAI's `base_url`. `/v1` is appended to URLs without a path.
        model: Name of the model at the server.
        api_key: API key. The environment variable `OPENAI_API_KEY` by default.
        max_connections: Maximum number of connections to each server, for each event loop. Further calls wait.
        limits: Limits of the requests: `ResourceLimits` or its fields. Each attempt uses a slot. It is assumed to cost
            one token for every `CHARS_PER_TOKEN` characters of the messages and tools, and the maximum length of the
            reply. If the server reports its usage, the cost is corrected.

    Raises:
        ConfigError: If a URL, `max_connections` or the limits are invalid, or no URL is given.

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
        limits: ResourceLimits | Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        bases = [_with_version(url) for url in ([urls] if isinstance(urls, str) else urls)]
        key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        super().__init__(bases, token=key, max_connections=max_connections, limits=limits)

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
            BudgetExhausted: If the budget of the engine's limits is spent.
        """
        params = dict(sampling_params)
        if (max_new_tokens := params.pop("max_new_tokens", None)) is not None:
            params["max_tokens"] = max_new_tokens
        if tools:
            params["tools"] = list(tools)

        def body(attempt_id: str) -> dict[str, Any]:
            return {"model": self.model, "messages": [_to_wire(message) for message in messages], **params}

        policy = retry_policy(deadline)
        estimate = 0 if self.limits is None else _estimate_tokens(messages, params)
        in_slot = self._in_slot(estimate, _used_tokens, policy.deadline)
        options: dict[str, Any] = {"name": request_id, "affinity": affinity, "around_attempt": in_slot}
        return await self._http.send(HttpRequest("/chat/completions", _parse_reply, policy, body=body, **options))


def _used_tokens(reply: ChatReply) -> int | None:
    return reply.tokens


def _estimate_tokens(messages: Sequence[Message], params: SamplingParams) -> int:
    """Return a rough estimate of the tokens of a request and its reply. Images count as no tokens."""
    texts = [json.dumps(params.get("tools", []), default=str)]
    for message in messages:
        parts = message.content if isinstance(message.content, list) else [{"text": message.content or ""}]
        texts += (str(part.get("text") or "") for part in parts)
        texts += (str(call.function.arguments) for call in message.tool_calls or ())
    max_new_tokens = params.get("max_tokens") or params.get("max_completion_tokens") or 0
    return sum(map(len, texts)) // CHARS_PER_TOKEN + max_new_tokens


def _to_wire(message: Message) -> dict[str, Any]:
    """Return a message as JSON, with images as URLs, the arguments of calls as text, and without lone surrogates."""
    fields: JsonDict = message.model_dump(exclude={"content"}, exclude_none=True)
    if message.content is not None:
        fields["content"] = message.content
    if isinstance(message.content, list):
        fields["content"] = list(map(_part_to_wire, message.content))
    fields = replace_lone_surrogates_in_json(fields)
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments_to_wire(call["function"]["arguments"])
    return fields


def _arguments_to_wire(arguments: Any) -> str:
    """Return the arguments of a call as the text of a JSON object, `{}` if the model wrote something else.

    Many chat templates need an object, so that servers reject other text. The answer to the call has the error.
    """
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    try:
        return arguments if isinstance(json.loads(arguments), dict) else "{}"
    except (ValueError, RecursionError):
        return "{}"


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
    usage = response.get("usage") or {}
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    finish = OPENAI_FINISH_TYPES.get(choice.get("finish_reason"), FinishType.STOP)
    timings = timings_of(request, cached_tokens=cached_tokens)
    tokens = usage.get("total_tokens")
    known_tokens = tokens if isinstance(tokens, int) else None
    return ChatReply(message=message, finish=finish, timings=timings, tokens=known_tokens)


def _parse_function(function: Any) -> dict[str, Any]:
    """Return the function of a tool call, which the model may have left incomplete."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        arguments = "" if arguments is None else orjson.dumps(arguments).decode()
    return {"name": function.get("name") or "", "arguments": arguments}


def _with_version(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix("/chat/completions")
    return base + "/v1" if "://" in base and URL(base).path in ("", "/") else base
