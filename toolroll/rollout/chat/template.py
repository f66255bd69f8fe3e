"""Renderer for any chat template of a tokenizer.

A template is opaque, so the ids after an assistant turn are found by rendering twice: the conversation up to that turn,
and the conversation with the new messages. Invariants of `suffix`:

- It returns ids only if the first rendering is a prefix of the second and ends with the text that ends an assistant
  turn in this template. The remaining text is then the template's own, and the sampled ids are not rendered at all.
- A turn ends with a control token, and the text is encoded from that token on, so no merge of the tokenizer can cross
  the boundary. This is verified when the renderer is created; if it does not hold, `suffix` returns None.

If `suffix` returns None, the conversation has to be rendered again. Calls are parsed in the Hermes format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from renderers.base import RenderedTokens

from toolroll.rollout.chat.chatml import ChatMessage
from toolroll.rollout.chat.hermes import HermesRenderer
from toolroll.rollout.chat.parsed_turn import Tools, as_object, convert_arguments
from toolroll.rollout.chat.vocabulary import Vocabulary

_PROBE_QUESTION, _PROBE_ANSWER = "QXQ", "ZXZ"
"""Words that no template contains."""


@dataclass(frozen=True)
class _TurnEnd:
    """The text that a template writes after the content of an assistant turn."""

    before: str
    """Text before the control token, which the model samples."""
    token: str
    """Text of the control token."""
    token_id: int
    after: str
    """Text after the control token, which the model does not sample."""


class TemplateRenderer(HermesRenderer):
    """Renders with a Jinja template and parses the Hermes format.

    Args:
        vocabulary: Vocabulary of the tokenizer.
        chat_template: Template to use in place of the tokenizer's.
        settings: Variables of the template.
    """

    is_prefix_stable = False
    """A template may render earlier turns differently when messages are added."""

    def __init__(
        self, vocabulary: Vocabulary, chat_template: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(vocabulary)
        self._template = chat_template
        self._settings = dict(settings or {})
        self._turn_end = self._find_turn_end()
        stop_ids = (self._turn_end.token_id if self._turn_end else None, vocabulary.tokenizer.eos_token_id)
        self._stop_ids = list(dict.fromkeys(token_id for token_id in stop_ids if token_id is not None))

    def text(
        self, messages: Sequence[ChatMessage], tools: Tools | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the output of the template. Arguments in JSON text are passed as objects, as many templates expect."""
        rendered = self.vocabulary.tokenizer.apply_chat_template(
            [convert_arguments(message, _as_object_if_possible) for message in messages],
            tools=list(tools) if tools else None,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._settings,
        )
        return str(rendered)

    def render_ids(
        self, messages: Sequence[ChatMessage], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render a conversation and return its ids."""
        return self.vocabulary.encode_template(self.text(messages, tools, add_generation_prompt=add_generation_prompt))

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> RenderedTokens | None:
        """Return None: a template needs the earlier messages. Use `suffix`."""
        return None

    def suffix(
        self, sampled_ids: Sequence[int], messages: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Tools
    ) -> list[int] | None:
        """Return the ids after a sampled turn: its end if missing, the new messages, the header of the next turn.

        Args:
            sampled_ids: Ids of the turn.
            messages: Conversation up to and including the turn.
            new: Messages after it.
            tools: Tool schemas.

        Returns:
            The ids, or None if the conversation has to be rendered again.
        """
        turn_end = self._turn_end
        if turn_end is None:
            return None
        is_closed = bool(sampled_ids) and sampled_ids[-1] == turn_end.token_id
        if turn_end.before and not is_closed:  # the model may have sampled a part of it
            return None
        prefix = self.text(messages, tools)
        whole = self.text([*messages, *new], tools, add_generation_prompt=True)
        if not prefix.endswith(turn_end.token + turn_end.after) or not whole.startswith(prefix):
            return None
        ids = self.vocabulary.encode_template(turn_end.token + turn_end.after + whole[len(prefix) :])
        if ids[0] != turn_end.token_id:
            return None
        return ids[1:] if is_closed else ids

    def _find_turn_end(self) -> _TurnEnd | None:
        probe = [{"role": "user", "content": _PROBE_QUESTION}, {"role": "assistant", "content": _PROBE_ANSWER}]
        try:
            text = self.text(probe)
        except Exception:  # a template may reject any conversation
            return None
        ending = text.rpartition(_PROBE_ANSWER)[2]
        found = self.vocabulary.control_token_pattern.search(ending)
        if found is None:
            return None
        start, control_tokens = found.start(), self.vocabulary.control_tokens
        token = max((text for text in control_tokens if ending.startswith(text, start)), key=len)
        turn_end = _TurnEnd(ending[:start], token, control_tokens[token], ending[start + len(token) :])
        return turn_end if self._is_token_boundary(turn_end) else None

    def _is_token_boundary(self, turn_end: _TurnEnd) -> bool:
        """Return True if the ids from the control token on do not depend on the text before it."""
        encode = self.vocabulary.encode_template
        for after in (turn_end.after + "user", "\n", " x", "x"):
            expected = encode(turn_end.token + after)
            if expected[:1] != [turn_end.token_id]:
                return False
            for before in ("x", "x ", "x\n", "}", "é", turn_end.token):
                if encode(before + turn_end.token + after)[-len(expected) :] != expected:
                    return False
        return True


def _as_object_if_possible(arguments: Any) -> Any:
    parsed = as_object(arguments)
    return arguments if parsed is None else parsed
