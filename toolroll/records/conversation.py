"""A conversation, out of text and into text.

verl dumps what a prompt and its answer decode to, most often without special tokens. What the ChatML template leaves of
itself then is a role alone on a line. `messages_of` reads a conversation out of either form; where it finds none,
there are two messages, the prompt and the answer. Nothing but markers is lost.

`text_of` writes messages in that same form, for those who have no tokenizer at hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

CHATML = re.compile(r"<\|im_start\|>(system|developer|user|assistant|tool)\n")
CHATML_END = "<|im_end|>"
BEGIN = re.compile(r"\A(system|developer|user)\n")
ROLE = re.compile(r"(?:\A|\n)(system|developer|user|assistant|tool)(?:\n|\Z)")
THINKING = re.compile(r"\A\s*<think>\n?(.*?)\n?</think>\n*", re.DOTALL)
# No block begins within another: a model that writes the same marker ten thousand times must not cost minutes.
ANSWER = re.compile(r"<tool_response>\n?((?:(?!<tool_response>).)*?)\n?</tool_response>\s*", re.DOTALL)
CALL = re.compile(r"\n?<tool_call>\n?((?:(?!<tool_call>).)*?)\n?</tool_call>", re.DOTALL)

ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)


def messages_of(prompt: str, answer: str) -> list[Message]:
    """The conversation in a dump's `input` and `output`."""
    if CHATML.search(prompt):
        pieces = _chatml(prompt + answer)
    elif BEGIN.match(prompt):
        pieces = _bare(prompt, answer)
    else:
        pieces = [("user", prompt), ("assistant", answer)]
    return [message for role, text in pieces for message in _messages(role, text)]


def turns_and_calls(prompt: str, answer: str) -> tuple[int, int]:
    """How many turns of the model and calls of tools are in a dump's `output`."""
    if CHATML.search(prompt):
        later = sum(found[1] == "assistant" for found in CHATML.finditer(answer))
    elif BEGIN.match(prompt):
        later = sum(role == "assistant" for role, _ in _answer_pieces(answer)[1:])
    else:
        later = 0
    return 1 + later, answer.count("<tool_call>")


def text_of(messages: Sequence[Mapping[str, Any]], sampled: int) -> tuple[str, str]:
    """The prompt and the answer, in which the model wrote the last `sampled` of the assistant's messages."""
    own = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    begin = own[-min(sampled, len(own))] if own and sampled else len(messages)
    prompt = "".join(f"{message['role']}\n{_text(message)}\n" for message in messages[:begin])
    answer = "\n".join(f"{message['role']}\n{_text(message)}" for message in messages[begin:])
    return f"{prompt}assistant\n", answer.removeprefix("assistant\n")


def _chatml(text: str) -> list[tuple[str, str]]:
    before, *pieces = CHATML.split(text)
    found = [("system", before)] if before.strip() else []
    for role, piece in zip(pieces[::2], pieces[1::2], strict=True):
        content, _, rest = piece.partition(CHATML_END)
        found.append((role, content + (rest.rstrip() if rest.strip() else "")))
    return found


def _bare(prompt: str, answer: str) -> list[tuple[str, str]]:
    _, *pieces = ROLE.split(prompt)
    found = list(zip(pieces[::2], pieces[1::2], strict=True))
    rest = _answer_pieces(answer)
    if found[-1][0] == "assistant":  # the template may have begun the answer, with <think> for instance
        rest[0] = "assistant", found.pop()[1] + rest[0][1]
    return found + rest


def _answer_pieces(answer: str) -> list[tuple[str, str]]:
    """The answer by roles. The model and the others speak in turns: a role out of turn is only a word on a line."""
    found: list[tuple[str, str]] = []
    role, begin = "assistant", 0
    for mark in ROLE.finditer(answer):
        if mark[1] in ("user", "tool", "assistant") and (mark[1] == "assistant") != (role == "assistant"):
            found.append((role, answer[begin : mark.start()]))
            role, begin = mark[1], mark.end()
    last = answer[begin:]
    if found and role != "assistant" and not last.startswith("<tool_response>"):  # nobody answered it
        before = found.pop()[1]
        return [*found, ("assistant", f"{before}\n{role}\n{last}")]
    return [*found, (role, last)]


def _messages(role: str, text: str) -> list[Message]:
    if role == "user" and ANSWER.search(text) and not ANSWER.sub("", text).strip():
        return [{"role": "tool", "content": found[1]} for found in ANSWER.finditer(text)]
    if role != "assistant":
        return [{"role": role, "content": text}]
    message: Message = {"role": role, "content": text}
    if thinking := THINKING.match(text):
        message |= {"content": text[thinking.end() :], "reasoning_content": thinking[1]}
    calls = [_call(found[1]) for found in CALL.finditer(message["content"])]
    if calls and None not in calls:
        message |= {"content": CALL.sub("", message["content"]), "tool_calls": calls}
    return [message]


def _call(text: str) -> Message | None:
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
        parts.append(f"<tool_call>\n{_json(call['function'])}\n</tool_call>")
    return "\n".join(parts)


def _json(function: Mapping[str, Any]) -> str:
    try:
        return ENCODER.encode({"name": function["name"], "arguments": function["arguments"]})
    except RecursionError:
        return f'{{"name": "{function["name"]}"}}'
