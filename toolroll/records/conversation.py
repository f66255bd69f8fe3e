"""Convert between a conversation and its text.

verl dumps the decoded text of prompt and response, usually without special tokens. Of the ChatML template, only the
role on its own line remains then. `parse_messages` reads a conversation from either form. For other templates it
returns two messages, the prompt and the response. No text is lost except for the markers.

`format_messages` writes messages in the same form, for use without a tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MessageDict = dict[str, Any]

CHATML_START = re.compile(r"<\|im_start\|>(system|developer|user|assistant|tool)\n")
CHATML_END = "<|im_end|>"
BARE_START = re.compile(r"\A(system|developer|user)\n")
ROLE_LINE = re.compile(r"(?:\A|\n)(system|developer|user|assistant|tool)(?:\n|\Z)")
THINKING = re.compile(r"\A\s*<think>\n?(.*?)\n?</think>\n*", re.DOTALL)
# Blocks must not nest, so that matching takes linear time if a model repeats the same marker thousands of times.
TOOL_RESPONSE = re.compile(r"<tool_response>\n?((?:(?!<tool_response>).)*?)\n?</tool_response>\s*", re.DOTALL)
TOOL_CALL = re.compile(r"\n?<tool_call>\n?((?:(?!<tool_call>).)*?)\n?</tool_call>", re.DOTALL)


def parse_messages(prompt: str, response: str) -> list[MessageDict]:
    """Return the conversation in the `input` and `output` of a record."""
    if CHATML_START.search(prompt):
        pieces = _split_chatml(prompt + response)
    elif BARE_START.match(prompt):
        pieces = _split_bare(prompt, response)
    else:
        pieces = [("user", prompt), ("assistant", response)]
    return [message for role, text in pieces for message in _messages(role, text)]


def count_turns_and_calls(prompt: str, response: str) -> tuple[int, int]:
    """Return the number of model turns and of tool calls in the `output` of a record."""
    if CHATML_START.search(prompt):
        later_turns = sum(match[1] == "assistant" for match in CHATML_START.finditer(response))
    elif BARE_START.match(prompt):
        later_turns = sum(role == "assistant" for role, _ in _split_bare_response(response)[1:])
    else:
        later_turns = 0
    return 1 + later_turns, response.count("<tool_call>")


def format_messages(messages: Sequence[Mapping[str, Any]], sampled: int) -> tuple[str, str]:
    """Return prompt and response as text.

    Args:
        messages: The conversation.
        sampled: Number of assistant messages, at the end of the conversation, that the model sampled.
    """
    assistant = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    first = assistant[-min(sampled, len(assistant))] if assistant and sampled else len(messages)
    prompt = "".join(f"{message['role']}\n{_text(message)}\n" for message in messages[:first])
    response = "\n".join(f"{message['role']}\n{_text(message)}" for message in messages[first:])
    return f"{prompt}assistant\n", response.removeprefix("assistant\n")


def _split_chatml(text: str) -> list[tuple[str, str]]:
    before, *parts = CHATML_START.split(text)
    pieces = [("system", before)] if before.strip() else []
    for role, part in zip(parts[::2], parts[1::2], strict=True):
        content, _, rest = part.partition(CHATML_END)
        pieces.append((role, content + rest.rstrip()))
    return pieces


def _split_bare(prompt: str, response: str) -> list[tuple[str, str]]:
    _, *parts = ROLE_LINE.split(prompt)
    pieces = list(zip(parts[::2], parts[1::2], strict=True))
    rest = _split_bare_response(response)
    if pieces[-1][0] == "assistant":  # the template may have started the response, for example with <think>
        rest[0] = "assistant", pieces.pop()[1] + rest[0][1]
    return pieces + rest


def _split_bare_response(response: str) -> list[tuple[str, str]]:
    """Split a response by role. Assistant and other roles alternate: a role out of turn is part of the text."""
    pieces: list[tuple[str, str]] = []
    role, start = "assistant", 0
    for match in ROLE_LINE.finditer(response):
        if match[1] in ("user", "tool", "assistant") and (match[1] == "assistant") != (role == "assistant"):
            pieces.append((role, response[start : match.start()]))
            role, start = match[1], match.end()
    last = response[start:]
    if pieces and role != "assistant" and not last.startswith("<tool_response>"):  # not a role: no turn follows it
        before = pieces.pop()[1]
        return [*pieces, ("assistant", f"{before}\n{role}\n{last}")]
    return [*pieces, (role, last)]


def _messages(role: str, text: str) -> list[MessageDict]:
    if role == "user" and TOOL_RESPONSE.search(text) and not TOOL_RESPONSE.sub("", text).strip():
        return [{"role": "tool", "content": match[1]} for match in TOOL_RESPONSE.finditer(text)]
    if role != "assistant":
        return [{"role": role, "content": text}]
    message: MessageDict = {"role": role, "content": text}
    if thinking := THINKING.match(text):
        message |= {"content": text[thinking.end() :], "reasoning_content": thinking[1]}
    calls = [_parse_call(match[1]) for match in TOOL_CALL.finditer(message["content"])]
    if calls and None not in calls:
        message |= {"content": TOOL_CALL.sub("", message["content"]), "tool_calls": calls}
    return [message]


def _parse_call(text: str) -> MessageDict | None:
    try:
        call = json.loads(text, strict=False)
        return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", f"({part.get('type')})")) for part in content)
    parts = [f"<think>\n{message['reasoning_content']}\n</think>\n"] if message.get("reasoning_content") else []
    parts += [content] if content else []
    for call in message.get("tool_calls") or ():
        parts.append(f"<tool_call>\n{_format_call(call['function'])}\n</tool_call>")
    return "\n".join(parts)


def _format_call(function: Mapping[str, Any]) -> str:
    try:
        return json.dumps({name: function[name] for name in ("name", "arguments")}, ensure_ascii=False, default=str)
    except RecursionError:
        return f'{{"name": "{function["name"]}"}}'
