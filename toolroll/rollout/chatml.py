"""ChatMLRenderer: conversations of Qwen2.5, SmolLM2 and their like, as tokens.

    <|im_start|>role
    text<|im_end|>

Tools are told in the system message and called in the Hermes form; a tool answers in a `<tool_response>` in a user's
turn, and answers that follow one another share it. It is a renderer as the package `renderers` wants it, and loads
there by `CustomRendererConfig(import_path="toolroll.rollout.chatml.ChatMLRenderer")`.

Promises:

- No text becomes a special token, and no tool's text a marker: a tool that prints `<|im_end|>` ends no turn.
- What follows a turn depends on whether the turn was closed and on nothing before it (`suffix`). So going on costs the
  same however long the conversation is, and the old tokens stay a prefix because they aren't touched.
- A turn that the model wrote as it is written here renders to the very tokens that sampling and `suffix` give. For that
  the model's header is encoded by itself, as it is when the model begins to write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from renderers.base import ParsedResponse, RenderedTokens, extract_message_tool_names, reject_assistant_in_extension
from renderers.configs import BaseRendererConfig

from toolroll.errors import ConfigError
from toolroll.rollout.hermes import CLOSE, OPEN, THINK, THOUGHT, parse_hermes
from toolroll.rollout.vocabulary import Vocabulary

START, END = "<|im_start|>", "<|im_end|>"
ANSWER, ANSWERED = "<tool_response>", "</tool_response>"
TAIL = 16
"""So many of the prompt's last tokens are looked at, to see whether it opens a reasoning block."""

# The words that the models were trained on.
TOOLS_BEFORE = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

ChatMessage = Mapping[str, Any]


class ChatMLConfig(BaseRendererConfig):  # type: ignore[misc,unused-ignore]
    """What differs between the models of the family."""

    default_system: str | None = None
    """The system message of a conversation that has none; None: there is none then, unless there are tools."""

    _internal_fields = frozenset({"default_system"})


class ChatMLRenderer:
    """Renders, parses and goes on. It keeps nothing of any conversation."""

    config_class: ClassVar[type[ChatMLConfig]] = ChatMLConfig

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        self.config = config or ChatMLConfig()
        self.vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        marks = self.vocabulary.marks
        if START not in marks or END not in marks:
            raise ConfigError(
                f"This tokenizer has no tokens {START} and {END}, which ChatML is made of. Name another format, "
                "e.g. 'template' for the tokenizer's own."
            )
        self._start, self._end = marks[START], marks[END]
        self._newline = self.vocabulary.encode("\n")
        self._header = [self._start, *self.vocabulary.encode("assistant\n")]
        self._stops = [self._end, *(marks[token] for token in ("<|endoftext|>",) if token in marks)]

    @property
    def is_prefix_stable(self) -> bool:
        """Every turn is written the same, whatever follows."""
        return True

    def get_stop_token_ids(self) -> list[int]:
        """`<|im_end|>`, and `<|endoftext|>` where there is one."""
        return list(self._stops)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """The whole conversation. `is_content` isn't told."""
        draft = _Draft()
        rest = 0
        system = self.config.default_system
        if messages and messages[0].get("role") in ("system", "developer"):
            system, rest = _text(messages[0]), 1
        told = _told(tools) if tools else ""
        if system is not None or told:
            self._turn(draft, "system", told.lstrip("\n") if system is None else system + told, rest - 1)
        self._turns(draft, messages, rest)
        if add_generation_prompt:
            draft.add(self._header, -1)
        return _rendered(draft, messages)

    def render_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """The whole conversation, as ids only."""
        ids: list[int] = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids
        return ids

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # JSON tells the types itself
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """What the model wrote, up to the first stop token."""
        return parse_turn(self.vocabulary, token_ids, self._stops, prompt_ids)

    def suffix(self, sampled_ids: Sequence[int], new_messages: Sequence[ChatMessage]) -> list[int]:
        """What follows the model's turn: its close if it hasn't one, the new messages, and the header of the next."""
        draft = _Draft()
        self._follow(draft, sampled_ids, new_messages)
        return draft.ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # they are in the system message already
    ) -> RenderedTokens | None:
        """The old ids with `suffix` after them. None only where there is nothing new, or a turn of the model's."""
        if not new_messages or reject_assistant_in_extension(list(new_messages)):
            return None
        draft = _Draft()
        draft.add(previous_prompt_ids, -1)
        draft.add(previous_completion_ids, -1)
        self._follow(draft, previous_completion_ids, new_messages)
        return _rendered(draft, new_messages)

    def _follow(self, draft: _Draft, sampled_ids: Sequence[int], new_messages: Sequence[ChatMessage]) -> None:
        closed = bool(sampled_ids) and sampled_ids[-1] == self._end
        draft.add(self._newline if closed else [self._end, *self._newline], -1)
        self._turns(draft, new_messages, 0)
        draft.add(self._header, -1)

    def _turns(self, draft: _Draft, messages: Sequence[ChatMessage], begin: int) -> None:
        for number in range(begin, len(messages)):
            message = messages[number]
            match message.get("role"):
                case "assistant":
                    self._own_turn(draft, message, number)
                case "tool":
                    first = number == begin or messages[number - 1].get("role") != "tool"
                    last = number + 1 == len(messages) or messages[number + 1].get("role") != "tool"
                    self._answer(draft, _text(message), number, first=first, last=last)
                case "developer":
                    self._turn(draft, "system", _text(message), number)
                case role:
                    self._turn(draft, str(role), _text(message), number)

    def _turn(self, draft: _Draft, role: str, text: str, number: int) -> None:
        written = self.vocabulary.encode_with_markers(f"{role}\n{text}")
        draft.add([self._start, *written, self._end, *self._newline], number)

    def _own_turn(self, draft: _Draft, message: ChatMessage, number: int) -> None:
        """A turn of the model's: only the header and the last newline weren't its to write."""
        text = _text(message)
        if thought := message.get("reasoning_content"):
            text = f"{THINK}\n{thought}\n{THOUGHT}\n\n{text}"
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call
            arguments = function.get("arguments", {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            name = json.dumps(function.get("name"), ensure_ascii=False)
            text += f'{chr(10) if text else ""}{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}'
        draft.add(self._header, number)
        draft.add([*self.vocabulary.encode_with_markers(text), self._end], number, sampled=True)
        draft.add(self._newline, number)

    def _answer(self, draft: _Draft, text: str, number: int, *, first: bool, last: bool) -> None:
        """A tool's answer. Its text can't close it: markers are ids here, or else are text like any other."""
        encode, marks = self.vocabulary.encode, self.vocabulary.marks
        before = "user\n" if first else "\n"
        ids = [self._start] if first else []
        if ANSWER in marks and ANSWERED in marks:
            ids += [*encode(before), marks[ANSWER], *encode(f"\n{text}\n"), marks[ANSWERED]]
        else:
            ids += encode(f"{before}{ANSWER}\n{text}\n{ANSWERED}")
        draft.add([*ids, self._end, *self._newline] if last else ids, number)


class _Draft:
    """Tokens as they are put together: whose each is, and whether the model would write it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.numbers: list[int] = []
        self.sampled: list[bool] = []

    def add(self, ids: Sequence[int], number: int, *, sampled: bool = False) -> None:
        self.ids += ids
        self.numbers += [number] * len(ids)
        self.sampled += [sampled] * len(ids)


def parse_turn(
    vocabulary: Vocabulary, ids: Sequence[int], stops: Sequence[int], prompt_ids: Sequence[int] | None
) -> ParsedResponse:
    """Read what was sampled after this prompt, up to the first stop token."""
    end = next((place for place, number in enumerate(ids) if number in stops), len(ids))
    before = vocabulary.decode(prompt_ids[-TAIL:]) if prompt_ids else ""
    return parse_hermes(vocabulary, ids[:end], thinking=before.rstrip().endswith(THINK))


def _text(message: ChatMessage) -> str:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise ConfigError(f"ChatML has text only, and a message has a part of type {part.get('type')!r}.")
    return "".join(str(part.get("text", "")) for part in content)


def _told(tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools, as the system message tells them."""
    listed = "".join(f"\n{json.dumps(dict(tool), ensure_ascii=False)}" for tool in tools)
    return f"{TOOLS_BEFORE}{listed}{TOOLS_AFTER}"


def _rendered(draft: _Draft, messages: Sequence[ChatMessage]) -> RenderedTokens:
    return RenderedTokens(
        token_ids=draft.ids,
        message_indices=draft.numbers,
        sampled_mask=draft.sampled,
        message_roles=[str(message.get("role") or "") for message in messages],
        message_tool_names=extract_message_tool_names(list(messages)),
    )
