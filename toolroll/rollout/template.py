"""TemplateRenderer: conversations by the tokenizer's own chat template, which is opaque.

What follows the model's turn is found by rendering twice: the conversation up to that turn, and with the new messages.
Promises of `suffix`:

- It is given only where the first rendering is a prefix of the second, and ends as this template ends a turn of the
  model's. Then what comes after is the template's own, and the model's tokens aren't rendered at all.
- A turn ends in a token of its own, and text is encoded from that token on: no merge of the tokenizer's can cross it.
  That was tried out when the renderer was made; where it isn't so, there is no suffix.

Where there is none, the conversation has to be rendered anew. Calls are parsed in the Hermes form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from renderers.base import ParsedResponse, RenderedTokens

from toolroll.rollout.chatml import ChatMessage, parse_turn
from toolroll.rollout.parsed import as_object
from toolroll.rollout.vocabulary import Vocabulary

Tools = Sequence[Mapping[str, Any]]
_ASKED, _SAID = "QXQ", "ZXZ"
"""Words that no template has."""


@dataclass(frozen=True)
class _Close:
    """How the template ends a turn of the model's."""

    before: str
    """Text that the model writes, or would have."""
    token: str
    number: int
    after: str
    """Text up to the next turn, which the model doesn't write."""


class TemplateRenderer:
    """Renders by a Jinja template, parses the Hermes form, and goes on where that can be proven."""

    def __init__(
        self, vocabulary: Vocabulary, chat_template: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self._template = chat_template
        self._settings = dict(settings or {})
        self._close = self._find_close()
        eos = vocabulary.tokenizer.eos_token_id
        stops = [self._close.number] if self._close else []
        self._stops = [*stops, *([eos] if eos is not None and eos not in stops else [])]

    @property
    def is_prefix_stable(self) -> bool:
        """Nobody knows."""
        return False

    def get_stop_token_ids(self) -> list[int]:
        """What ends a turn of the model's by this template, and the tokenizer's end of sequence."""
        return list(self._stops)

    def text(
        self, messages: Sequence[ChatMessage], tools: Tools | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """What the template writes."""
        written = self.vocabulary.tokenizer.apply_chat_template(
            [_with_objects(message) for message in messages],
            tools=list(tools) if tools else None,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._settings,
        )
        return str(written)

    def render_ids(
        self, messages: Sequence[ChatMessage], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """The whole conversation."""
        text = self.text(messages, tools, add_generation_prompt=add_generation_prompt)
        return self.vocabulary.encode_template(text)

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Tools | None = None,  # JSON tells the types itself
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        """What the model wrote, up to the first stop token."""
        return parse_turn(self.vocabulary, token_ids, self._stops, prompt_ids)

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> RenderedTokens | None:
        """None: without the messages before, a template can't tell what follows. See `suffix`."""
        return None

    def suffix(
        self, sampled_ids: Sequence[int], messages: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Tools
    ) -> list[int] | None:
        """What follows the last of the messages, a turn of the model's: its close if it hasn't one, and the new ones.

        None where that can't be proven.
        """
        close = self._close
        if close is None:
            return None
        closed = bool(sampled_ids) and sampled_ids[-1] == close.number
        if close.before and not closed:  # the model might have written a part of it
            return None
        until = self.text(messages, tools)
        whole = self.text([*messages, *new], tools, add_generation_prompt=True)
        if not until.endswith(close.token + close.after) or not whole.startswith(until):
            return None
        ids = self.vocabulary.encode_template(close.token + close.after + whole[len(until) :])
        if ids[0] != close.number:
            return None
        return ids[1:] if closed else ids

    def _find_close(self) -> _Close | None:
        try:
            text = self.text([{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}])
        except Exception:  # a template may refuse anything; then it can't be gone on with
            return None
        ending = text.rpartition(_SAID)[2]
        found = self.vocabulary.spelled.search(ending)
        if found is None:
            return None
        start = found.start()
        token = max((mark for mark in self.vocabulary.marks if ending.startswith(mark, start)), key=len)
        close = _Close(ending[:start], token, self.vocabulary.marks[token], ending[start + len(token) :])
        return close if self._is_seam(close) else None

    def _is_seam(self, close: _Close) -> bool:
        """Whether what is encoded after the token is the same, whatever is before it."""
        encode = self.vocabulary.encode_template
        for after in (close.after + "user", "\n", " x", "x"):
            alone = encode(close.token + after)
            if alone[:1] != [close.number]:
                return False
            for before in ("x", "x ", "x\n", "}", "é", close.token):
                if encode(before + close.token + after)[-len(alone) :] != alone:
                    return False
        return True


def _with_objects(message: ChatMessage) -> dict[str, Any]:
    """Arguments that are JSON text as objects: many templates ask for these."""
    made = dict(message)
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {**function, "arguments": function["arguments"] if found is None else found}}
            for call in calls
            for function in [call["function"]]
            for found in [as_object(function["arguments"])]
        ]
    return made
