"""Checks that a chat format fits a model, by rendering and parsing probe conversations.

A format that fails one of them would lose tool calls or train on prompts that the model never sees, mostly without an
error. `load_rendering` therefore accepts a format only if it passes all of them; `toolroll doctor MODEL` shows them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from toolroll.rollout.chat.parsed_turn import Tools, convert_arguments
from toolroll.rollout.chat.rendering import Continuation, Rendering
from toolroll.rollout.chat.template import (
    ANSWER,
    DESCRIPTION,
    PROBE_CALLS,
    PROBE_TOOLS,
    RESULT,
    common_length,
    link_to_call,
    turn_of,
)
from toolroll.schemas import JsonDict, Message

_CHAT: list[JsonDict] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]
_SYSTEM: JsonDict = {"role": "system", "content": "Be brief."}


def _tool_chat(name: str) -> list[JsonDict]:
    """Return a conversation that ends with the response to the last call of a probe."""
    turn = turn_of(PROBE_CALLS[name])
    return [_CHAT[0], turn, {"role": "tool", "content": RESULT, **link_to_call(turn)}]


PROMPTS: dict[str, tuple[list[JsonDict], Tools]] = {
    "question": (_CHAT[:1], ()),
    "chat": (_CHAT, ()),
    "system": ([_SYSTEM, *_CHAT], ()),
    "question with tools": (_CHAT[:1], PROBE_TOOLS),
    "chat with tools": (_CHAT, PROBE_TOOLS),
    "system with tools": ([_SYSTEM, *_CHAT], PROBE_TOOLS),
    "tool response": (_tool_chat("single"), PROBE_TOOLS),
    "nested arguments": (_tool_chat("nested"), PROBE_TOOLS),
    "unicode arguments": (_tool_chat("unicode"), PROBE_TOOLS),
}
"""Conversations that a format must render to the ids of the template."""


ApplyTemplate = Callable[[Sequence[JsonDict], Tools], Sequence[int]]


OPTIONAL = ("prompts", "earlier ids")
"""Checks that a format may fail if the user asks for it by name."""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool
    detail: str


def check_rendering(rendering: Rendering, apply_template: ApplyTemplate) -> list[Check]:
    """Check a rendering.

    Args:
        rendering: The rendering.
        apply_template: Renders a conversation with the tokenizer's chat template, in the tokenizer's own way. It may
            reject conversations, which are then not compared.

    Returns:
        The checks, in the order in which they matter.
    """
    checks: dict[str, Callable[[], str]] = {
        "prompts": lambda: _check_prompts(rendering, apply_template),
        "tools": lambda: _check_tools(rendering),
        "calls": lambda: _check_calls(rendering),
        "responses": lambda: _check_responses(rendering),
        "earlier ids": lambda: _check_earlier_ids(rendering),
        "turn end": lambda: _check_turn_end(rendering),
    }
    return [_run(name, check) for name, check in checks.items()]


class _Failed(Exception):
    """A check has failed."""


def _run(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Exception as error:  # a template may reject any conversation
        return Check(name, False, str(error) or type(error).__name__)


def _messages(plain: Sequence[JsonDict]) -> list[Message]:
    return [Message.model_validate(message) for message in plain]


def _check_prompts(rendering: Rendering, apply_template: ApplyTemplate) -> str:
    differing: list[str] = []
    rejected: list[str] = []
    for name, (messages, tools) in PROMPTS.items():
        renderings = (_try_template(apply_template, variant, tools) for variant in _variants(messages))
        expected = [ids for ids in renderings if ids is not None]
        if not expected:
            rejected.append(name)
        elif rendering.prompt(_messages(messages), tools) not in expected:
            differing.append(name)
    if differing:
        raise _Failed(f"differ from the chat template: {', '.join(differing)}")
    if len(rejected) == len(PROMPTS):
        return "not compared: the chat template rejects all probes"
    note = f"; not compared: {', '.join(rejected)}" if rejected else ""
    return f"{len(PROMPTS) - len(rejected)} of {len(PROMPTS)} equal to the chat template{note}"


def _variants(messages: Sequence[JsonDict]) -> list[list[JsonDict]]:
    """Return the ways in which templates expect a turn with calls: without text as "" or None, arguments as JSON."""
    return [
        [convert_arguments({**message, "content": message["content"] or empty}, convert) for message in messages]
        for empty, convert in product(("", None), (lambda value: value, partial(json.dumps, ensure_ascii=False)))
    ]


def _try_template(apply_template: ApplyTemplate, messages: Sequence[JsonDict], tools: Tools) -> list[int] | None:
    try:
        return list(apply_template(messages, tools))
    except Exception:  # a template may reject any conversation
        return None


def _check_tools(rendering: Rendering) -> str:
    if DESCRIPTION not in rendering.decode(rendering.prompt(_messages(_CHAT[:1]), PROBE_TOOLS)):
        raise _Failed("the prompt does not show the tools")
    return "the prompt shows them"


def _check_calls(rendering: Rendering) -> str:
    read: list[str] = []
    rejected: list[str] = []
    for name, calls in PROBE_CALLS.items():
        sampled = _sample_calls(rendering, calls)
        if sampled is None:
            rejected.append(name)
            continue
        parsed = rendering.parse(sampled, tools=PROBE_TOOLS, prompt_ids=())
        if [(call.name, call.arguments, call.problem) for call in parsed.calls] != [(*call, None) for call in calls]:
            raise _Failed(f"{name} calls are not read back as rendered: {rendering.decode(sampled).strip()[:200]!r}")
        read.append(name)
    if "single" not in read:
        raise _Failed("the format does not show tool calls")
    note = f"; the template rejects: {', '.join(rejected)}" if rejected else ""
    return f"{len(read)} of {len(PROBE_CALLS)} kinds read back as rendered{note}"


def _check_responses(rendering: Rendering) -> str:
    for number, step in enumerate(_two_turns(rendering)):
        if f"{RESULT}{number}" not in rendering.decode(step.ids):
            raise _Failed("the prompt does not show tool responses")
    turn = turn_of([*PROBE_CALLS["single"], *PROBE_CALLS["unicode"]])
    texts = [f"{RESULT} {text}" for text in ("first", "second " * 300)]
    new = [
        {"role": "tool", "content": text, "name": call["function"]["name"], "tool_call_id": call["id"]}
        for text, call in zip(texts, turn["tool_calls"], strict=True)
    ]
    messages = _messages([_CHAT[0], turn])
    ids = rendering.prompt(messages[:1], PROBE_TOOLS)
    shown = rendering.decode(rendering.bridge(ids, [], _messages(new), messages=messages, tools=PROBE_TOOLS).ids)
    if not all(text.strip() in shown for text in texts):
        raise _Failed("the prompt does not show all tool responses of a turn, or not their whole text")
    return "the prompt shows them"


def _check_earlier_ids(rendering: Rendering) -> str:
    if not any(step.rerendered for step in _two_turns(rendering)):
        return "kept over two turns"
    if rendering.keeps_thinking:
        raise _Failed("the conversation is rendered again after each turn")
    return "the conversation is rendered again after each turn, without the reasoning of earlier turns"


def _two_turns(rendering: Rendering) -> list[Continuation]:
    """Return the continuations of two turns with a call and its response."""
    messages = _messages(_CHAT[:1])
    ids = rendering.prompt(messages, PROBE_TOOLS)
    steps = []
    for number in range(2):
        turn = turn_of(PROBE_CALLS["single"])
        sampled = _sample_calls(rendering, PROBE_CALLS["single"]) or []
        new = _messages([{"role": "tool", "content": f"{RESULT}{number}", **link_to_call(turn)}])
        messages += _messages([turn])
        steps.append(rendering.bridge(ids, sampled, new, messages=messages, tools=PROBE_TOOLS))
        ids = steps[-1].ids if steps[-1].rerendered else [*ids, *sampled, *steps[-1].ids]
        messages += new
    return steps


def _check_turn_end(rendering: Rendering) -> str:
    ended = _sample(rendering, {"role": "assistant", "content": ANSWER}, keep_end=True)
    names = ", ".join(rendering.decode([token_id]) for token_id in rendering.stop_ids)
    if ended is None:
        raise _Failed(f"no stop token ({names or 'none'}) ends a rendered turn")
    return names


def _sample_calls(rendering: Rendering, calls: list[tuple[str, JsonDict]]) -> list[int] | None:
    for named_ids in (False, True):
        sampled = _sample(rendering, turn_of(calls, named_ids=named_ids))
        if sampled is not None:
            return sampled
    return None


def _sample(rendering: Rendering, turn: JsonDict, *, keep_end: bool = False) -> list[int] | None:
    """Return the ids of a turn as if they were sampled, or None if the format rejects the turn.

    They may contain the header of the turn, and do not contain its end unless it is asked for.
    """
    names = [call["function"]["name"] for call in turn.get("tool_calls", ())]
    for following in ([], _CHAT[:1]):  # some formats end a turn only if another message follows
        before, ids = _try(rendering, _CHAT[:1]), _try(rendering, [_CHAT[0], turn, *following])
        if before is None or ids is None:
            continue
        ids = ids[common_length(before, ids) :]
        if any(name not in rendering.decode(ids) for name in names):
            continue
        end = next((index for index, token_id in enumerate(ids) if index and token_id in rendering.stop_ids), None)
        if not keep_end:
            return ids[:end]
        if end is not None:
            return ids[: end + 1]
    return None


def _try(rendering: Rendering, messages: Sequence[JsonDict]) -> list[int] | None:
    try:
        return rendering.renderer.render_ids(messages, tools=PROBE_TOOLS)
    except Exception:  # a format may reject any conversation
        return None
