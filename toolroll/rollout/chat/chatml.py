"""Renderer for ChatML, the chat format of Qwen2.5, SmolLM2 and similar models.

    <|im_start|>role
    text<|im_end|>

The system message lists the tools, and the model calls them in the Hermes format. Tool responses are `<tool_response>`
blocks in a user turn, which consecutive responses share. The renderer implements the interface of the package
`renderers`: `CustomRendererConfig(import_path="toolroll.rollout.chat.chatml.ChatMLRenderer")` loads it there.

Invariants:

- Text never becomes a special token, and the text of a tool never becomes a marker: a tool that prints `<|im_end|>`
  does not end a turn.
- The ids after a turn depend only on the new messages and on whether the turn was closed (`suffix`). The cost of a turn
  therefore does not depend on the length of the conversation, and earlier ids remain a prefix.
- A turn that the model wrote in this format renders to the ids that sampling and `suffix` give. For this the header of
  an assistant turn is encoded separately, as it is in a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from renderers.base import RenderedTokens, extract_message_tool_names, reject_assistant_in_extension
from renderers.configs import BaseRendererConfig

from toolroll.errors import ConfigError
from toolroll.rollout.chat.hermes import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, HermesRenderer
from toolroll.rollout.chat.parsed_turn import Tools
from toolroll.rollout.chat.vocabulary import Vocabulary

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"

# The wording that the models were trained with.
TOOLS_HEADER = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_FOOTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

ChatMessage = Mapping[str, Any]


class ChatMLConfig(BaseRendererConfig):  # type: ignore[misc,unused-ignore]
    """Differences between the models of the family."""

    default_system: str | None = None
    """System message of a conversation that has none. With None, such a conversation has one only if it has tools."""

    _internal_fields = frozenset({"default_system"})


class ChatMLRenderer(HermesRenderer):
    """Stateless renderer and parser for ChatML.

    Args:
        tokenizer: A tokenizer of transformers, or a Vocabulary.
        config: Settings of the model.

    Raises:
        ConfigError: If the tokenizer has no ChatML tokens.
    """

    config_class: ClassVar[type[ChatMLConfig]] = ChatMLConfig
    is_prefix_stable = True
    """The ids of a turn do not depend on later messages."""

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        super().__init__(tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer))
        self.config = config or ChatMLConfig()
        control_tokens = self.vocabulary.control_tokens
        if TURN_START not in control_tokens or TURN_END not in control_tokens:
            raise ConfigError(
                f"The tokenizer has no tokens {TURN_START} and {TURN_END}, which ChatML requires. Choose another "
                "format, e.g. 'template' for the tokenizer's chat template."
            )
        self._start, self._end = control_tokens[TURN_START], control_tokens[TURN_END]
        self._newline = self.vocabulary.encode("\n")
        self._header = [self._start, *self.vocabulary.encode("assistant\n")]
        self._stop_ids = [control_tokens[text] for text in (TURN_END, "<|endoftext|>") if text in control_tokens]

    def render(
        self, messages: Sequence[ChatMessage], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Render a conversation. `is_content` of the result is not set."""
        draft = _new_draft(messages)
        system, first = self.config.default_system, 0
        if messages and messages[0].get("role") in ("system", "developer"):
            system, first = _text(messages[0]), 1
        schemas = "".join(f"\n{json.dumps(dict(tool), ensure_ascii=False)}" for tool in tools or ())
        tool_list = f"{TOOLS_HEADER}{schemas}{TOOLS_FOOTER}" if tools else ""
        if system is not None or tool_list:
            text = tool_list.lstrip("\n") if system is None else system + tool_list
            self._add_turn(draft, "system", text, first - 1)
        self._add_turns(draft, messages, first)
        if add_generation_prompt:
            _add(draft, self._header, -1)
        return draft

    def render_ids(
        self, messages: Sequence[ChatMessage], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render a conversation and return only the ids."""
        ids: list[int] = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids
        return ids

    def suffix(self, sampled_ids: Sequence[int], new_messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids after a sampled turn: its end if missing, the new messages, the header of the next turn."""
        return list(self._add_suffix(RenderedTokens(), sampled_ids, new_messages).token_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        *,
        tools: Tools | None = None,  # not needed: the system message contains them
    ) -> RenderedTokens | None:
        """Return the previous ids and `suffix`, or None without new messages or if one is an assistant message."""
        if not new_messages or reject_assistant_in_extension(list(new_messages)):
            return None
        draft = _new_draft(new_messages)
        _add(draft, [*previous_prompt_ids, *previous_completion_ids], -1)
        return self._add_suffix(draft, previous_completion_ids, new_messages)

    def _add_suffix(
        self, draft: RenderedTokens, sampled_ids: Sequence[int], new_messages: Sequence[ChatMessage]
    ) -> RenderedTokens:
        is_closed = bool(sampled_ids) and sampled_ids[-1] == self._end
        _add(draft, self._newline if is_closed else [self._end, *self._newline], -1)
        self._add_turns(draft, new_messages, 0)
        _add(draft, self._header, -1)
        return draft

    def _add_turns(self, draft: RenderedTokens, messages: Sequence[ChatMessage], first: int) -> None:
        for index in range(first, len(messages)):
            message = messages[index]
            match message.get("role"):
                case "assistant":
                    self._add_assistant_turn(draft, message, index)
                case "tool":
                    opens = index == first or messages[index - 1].get("role") != "tool"
                    closes = index + 1 == len(messages) or messages[index + 1].get("role") != "tool"
                    self._add_tool_response(draft, _text(message), index, opens=opens, closes=closes)
                case role:
                    self._add_turn(draft, "system" if role == "developer" else str(role), _text(message), index)

    def _add_turn(self, draft: RenderedTokens, role: str, text: str, index: int) -> None:
        ids = self.vocabulary.encode_with_markers(f"{role}\n{text}")
        _add(draft, [self._start, *ids, self._end, *self._newline], index)

    def _add_assistant_turn(self, draft: RenderedTokens, message: ChatMessage, index: int) -> None:
        text = _text(message)
        if reasoning := message.get("reasoning_content"):
            text = f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{text}"
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call
            arguments = function.get("arguments", {})
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            name = json.dumps(function.get("name"), ensure_ascii=False)
            separator = "\n" if text else ""
            text += f'{separator}{CALL_OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CALL_CLOSE}'
        _add(draft, self._header, index)
        _add(draft, [*self.vocabulary.encode_with_markers(text), self._end], index, sampled=True)
        _add(draft, self._newline, index)

    def _add_tool_response(self, draft: RenderedTokens, text: str, index: int, *, opens: bool, closes: bool) -> None:
        """Add a tool response. Consecutive responses share a user turn, which the first opens and the last closes."""
        encode, control_tokens = self.vocabulary.encode, self.vocabulary.control_tokens
        header = "user\n" if opens else "\n"
        ids = [self._start] if opens else []
        if RESPONSE_OPEN in control_tokens and RESPONSE_CLOSE in control_tokens:
            body = [control_tokens[RESPONSE_OPEN], *encode(f"\n{text}\n"), control_tokens[RESPONSE_CLOSE]]
            ids += [*encode(header), *body]
        else:
            ids += encode(f"{header}{RESPONSE_OPEN}\n{text}\n{RESPONSE_CLOSE}")
        _add(draft, [*ids, self._end, *self._newline] if closes else ids, index)


def _new_draft(messages: Sequence[ChatMessage]) -> RenderedTokens:
    roles = [str(message.get("role") or "") for message in messages]
    return RenderedTokens(message_roles=roles, message_tool_names=extract_message_tool_names(list(messages)))


def _add(draft: RenderedTokens, ids: Sequence[int], message_index: int, *, sampled: bool = False) -> None:
    """Append ids of a message. `sampled` means that the model would sample them."""
    draft.token_ids += ids
    draft.message_indices += [message_index] * len(ids)
    draft.sampled_mask += [sampled] * len(ids)


def _text(message: ChatMessage) -> str:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise ConfigError(f"ChatML supports text only, got a message part of type {part.get('type')!r}.")
    return "".join(str(part.get("text", "")) for part in content)
