"""Conversion between messages and tokens for a model family.

All trajectories share one `Rendering`, from any thread. Invariants:

- `bridge` never changes sampled ids. It returns the ids to append or, with `rerendered`, the whole conversation
  rendered again. Whether a renderer's result starts with the previous ids is verified.
- `parse` accepts any ids. A call that cannot be read has a problem, a message to the model.
- The text of a tool never becomes a control token. ChatML encodes it as text. For other renderers and templates, a
  space is inserted into text that spells one: `< |im_end|>`.

The renderers come from the package `renderers`, except ChatML and chat templates; `formats.py` selects one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolroll._internal.text import replace_lone_surrogates_in_json
from toolroll.errors import ConfigError
from toolroll.rollout.chat.parsed_turn import ParsedTurn, Tools, as_object, convert_arguments
from toolroll.rollout.chat.vocabulary import Vocabulary
from toolroll.schemas import JsonDict, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Continuation:
    """The ids that the engine receives for the next turn."""

    ids: list[int]
    rerendered: bool
    """False if `ids` follow the previous ids; True if they are the whole prompt, which may differ from these."""


class Rendering:
    """Messages ↔ tokens. Created by `load_rendering`.

    Args:
        name: Name of the chat format.
        renderer: Renderer with the interface of the package `renderers`.
        vocabulary: Vocabulary of the tokenizer.

    Attributes:
        name: Name of the chat format.
        stop_ids: Ids that end an assistant turn.
        vocab_size: Number of ids of the tokenizer.
        encode: Function that returns the ids of a text, without control tokens.
        decode: Function that returns the text of any ids, including control tokens.
    """

    def __init__(self, name: str, renderer: Any, vocabulary: Vocabulary) -> None:
        from toolroll.rollout.chat.chatml import ChatMLRenderer  # these modules need the extra `rollout`
        from toolroll.rollout.chat.template import TemplateRenderer

        self.name = name
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(renderer.get_stop_token_ids()))
        self.vocab_size = vocabulary.size
        self.encode, self.decode = vocabulary.encode, vocabulary.decode
        self._vocabulary = vocabulary
        self._renderer = renderer
        self._is_chatml = isinstance(renderer, ChatMLRenderer)
        self._is_template = isinstance(renderer, TemplateRenderer)

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of a conversation, up to the start of the next assistant turn.

        Raises:
            ConfigError: If `messages` is empty or the format rejects them.
        """
        if not messages:
            raise ConfigError("Expected at least one message, got none.")
        return self._render(list(map(self._to_plain, messages)), tools)

    def parse(self, ids: Sequence[int], *, tools: Tools, prompt_ids: Sequence[int]) -> ParsedTurn:
        """Parse the ids sampled after a prompt."""
        if not self._is_chatml and not self._is_template:
            ids, prompt_ids = list(ids), list(prompt_ids)  # other renderers compare them with lists
        try:
            response = self._renderer.parse_response(ids, tools=list(tools) or None, prompt_ids=prompt_ids)
        except Exception as error:  # the model can cause this, e.g. with deeply nested JSON
            logger.warning("format %s: parsing %d ids failed; treating them as text: %r", self.name, len(ids), error)
            return ParsedTurn(self.decode(ids))
        return ParsedTurn.from_renderer(response)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        messages: Sequence[Message],
        tools: Tools,
    ) -> Continuation:
        """Return the ids for the new messages, up to the start of the next assistant turn.

        Args:
            prompt_ids: Prompt of the last assistant turn.
            sampled_ids: Ids of that turn.
            new_messages: Messages after it.
            messages: Messages up to and including it. ChatML does not need them.
            tools: Tool schemas.

        Returns:
            The ids to append, or the whole conversation rendered again.

        Raises:
            ConfigError: If the conversation has to be rendered again and the format rejects it.
        """
        new = list(map(self._to_plain, new_messages))
        if self._is_chatml:
            return Continuation(self._renderer.suffix(sampled_ids, new), rerendered=False)
        suffix = self._find_suffix(list(prompt_ids), list(sampled_ids), messages, new, tools)
        if suffix is not None:
            return Continuation(suffix, rerendered=False)
        return Continuation(self._render_repaired([*map(self._to_plain, messages), *new], tools), rerendered=True)

    def _find_suffix(
        self, prompt: list[int], sampled: list[int], messages: Sequence[Message], new: list[JsonDict], tools: Tools
    ) -> list[int] | None:
        """Return the ids that the renderer appends, or None if its result does not start with the previous ids."""
        suffix: list[int] | None = None
        previous = prompt + sampled
        try:
            if self._is_template:
                suffix = self._renderer.suffix(sampled, list(map(self._to_plain, messages)), new, tools)
            else:
                bridged = self._renderer.bridge_to_next_turn(prompt, sampled, new, tools=list(tools) or None)
                if bridged is not None and bridged.token_ids[: len(previous)] == previous:
                    suffix = bridged.token_ids[len(previous) :] or None
        except Exception as error:  # the model can cause this, e.g. by invalid arguments; rendering again helps
            level = logging.DEBUG if self._is_template else logging.WARNING
            logger.log(level, "format %s: bridge after %d ids failed: %r", self.name, len(sampled), error)
        return suffix

    def _render(self, messages: list[JsonDict], tools: Tools) -> list[int]:
        try:
            return list(self._renderer.render_ids(messages, tools=list(tools) or None, add_generation_prompt=True))
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages[-6:])
            raise ConfigError(
                f"The format {self.name!r} cannot render this conversation ({roles}): "
                f"{str(error).rstrip('.'):.300}. Change the messages, or choose another format."
            ) from error

    def _render_repaired(self, messages: list[JsonDict], tools: Tools) -> list[int]:
        """Render a conversation. If the format rejects it, remove errors of the model and try again."""
        try:
            return self._render(messages, tools)
        except ConfigError:
            repaired = _repair(messages)
            if repaired == messages:
                raise
            return self._render(repaired, tools)

    def _to_plain(self, message: Message) -> JsonDict:
        """Return a message as the dict that renderers and templates expect."""
        plain: JsonDict = {**message.model_dump(exclude_none=True), **(message.model_extra or {})}
        plain["content"] = message.content or ""
        if not self._is_chatml and message.role == "tool":
            plain["content"] = self._break_control_tokens(plain["content"])
        encodable: JsonDict = replace_lone_surrogates_in_json(plain)
        return encodable

    def _break_control_tokens(self, content: str | list[JsonDict]) -> str | list[JsonDict]:
        if isinstance(content, list):
            return [
                {**part, "text": self._break_control_tokens(part["text"])} if "text" in part else part
                for part in content
            ]
        return self._vocabulary.control_token_pattern.sub(r"\g<0> ", content)


def _repair(messages: list[JsonDict]) -> list[JsonDict]:
    """Return the conversation without the model's errors that some formats reject.

    Arguments that are not an object become empty. A response to a call that could not be read becomes a user message,
    after the responses to the other calls of the turn.
    """
    repaired: list[JsonDict] = []
    unmatched: list[JsonDict] = []
    call_ids: set[str | None] = set()
    for message in messages:
        if message["role"] != "tool":
            repaired += unmatched
            unmatched = []
        elif message.get("tool_call_id") not in call_ids:
            unmatched.append({"role": "user", "content": message["content"]})
            continue
        repaired.append(convert_arguments(message, lambda arguments: as_object(arguments) or {}))
        call_ids |= {call.get("id") for call in message.get("tool_calls") or ()}
    return repaired + unmatched
