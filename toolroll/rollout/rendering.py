"""Rendering: messages ↔ tokens for a model family.

One `Rendering` belongs to a tokenizer and a format, and all trajectories share it, in any thread. Promises:

- `go_on` never touches what the engine sampled: it gives the ids to put after it, or says that the conversation had to
  be written anew (`rerendered`). That a renderer's answer begins with the old ids is checked, not believed.
- `parse` has an answer to any ids. A call that can't be read is told with one sentence that the model can act on.
- No tool's text becomes a special token or a marker. ChatML encodes it as text. The renderers of other families, and
  templates, would not: they get it with a space in, `< |im_end|>`.

The renderers are those of the package `renderers`; ChatML and opaque templates are ours. Which one it is: formats.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolroll.errors import ConfigError
from toolroll.rollout.parsed import Parsed, ParsedCall, as_object
from toolroll.rollout.vocabulary import Vocabulary
from toolroll.sandbox.protocol import scrub
from toolroll.schemas import JsonDict, Message

__all__ = ["Continuation", "Parsed", "ParsedCall", "Rendering"]

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Continuation:
    """What the engine is given next."""

    ids: list[int]
    rerendered: bool
    """False: `ids` come after the old ones. True: they are the whole prompt, in which old ids may be other ones."""


class Rendering:
    """Messages ↔ tokens. Made by `load_rendering`."""

    def __init__(self, name: str, renderer: Any, vocabulary: Vocabulary) -> None:
        from toolroll.rollout.chatml import ChatMLRenderer
        from toolroll.rollout.template import TemplateRenderer

        self.name = name
        """The format."""
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(renderer.get_stop_token_ids()))
        """What ends a turn of the model's."""
        self.vocab_size = vocabulary.size
        """Ids are below it."""
        self._vocabulary = vocabulary
        self._renderer = renderer
        self._chatml = renderer if isinstance(renderer, ChatMLRenderer) else None
        self._template = renderer if isinstance(renderer, TemplateRenderer) else None

    def encode(self, text: str) -> list[int]:
        """The ids of text, none of which is a special token or a marker."""
        return self._vocabulary.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids, special tokens among it."""
        return self._vocabulary.decode(ids)

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The first prompt, up to where the model begins to write."""
        if not messages:
            raise ConfigError("A conversation needs at least one message, and this one has none.")
        return self._render([self._plain(message) for message in messages], tools, mend=False)

    def parse(self, ids: Sequence[int], *, tools: Tools, prompt_ids: Sequence[int]) -> Parsed:
        """What the model wrote after this prompt."""
        if self._chatml is None and self._template is None:
            ids, prompt_ids = list(ids), list(prompt_ids)  # the families compare with lists
        try:
            response = self._renderer.parse_response(ids, tools=list(tools) or None, prompt_ids=prompt_ids)
        except Exception as error:  # by ids that make no sense, or JSON nested without end: the model's to write
            logger.warning("format %s could not parse %d ids, taken as text: %r", self.name, len(ids), error)
            return Parsed(self.decode(ids))
        return Parsed.of(response)

    def go_on(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        messages: Sequence[Message],
        tools: Tools,
    ) -> Continuation:
        """What comes after the model's turn: the new messages, up to where it begins to write again.

        `messages` are those before the new ones, the model's own turn last. ChatML looks at the sampled ids only, and
        at no messages but the new.
        """
        new = [self._plain(message) for message in new_messages]
        if self._chatml is not None:
            return Continuation(self._chatml.suffix(sampled_ids, new), rerendered=False)
        before = None
        if self._template is not None:
            before = [self._plain(message) for message in messages]
            ids = self._by_template(self._template, sampled_ids, before, new, tools)
        else:
            ids = self._by_bridge(prompt_ids, sampled_ids, new, tools)
        if ids is not None:
            return Continuation(ids, rerendered=False)
        before = before or [self._plain(message) for message in messages]
        return Continuation(self._render([*before, *new], tools, mend=True), rerendered=True)

    def _by_bridge(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], new: list[JsonDict], tools: Tools
    ) -> list[int] | None:
        """By the renderer's own bridge, if its answer begins with the old ids."""
        prompt, sampled = list(prompt_ids), list(sampled_ids)
        old = prompt + sampled
        try:
            bridged = self._renderer.bridge_to_next_turn(prompt, sampled, new, tools=list(tools) or None)
        except Exception as error:  # as in `parse`: what the model wrote may break it, and rendering anew helps
            logger.warning("format %s could not go on after %d ids: %r", self.name, len(sampled), error)
            return None
        if bridged is None or bridged.token_ids[: len(old)] != old or len(bridged.token_ids) == len(old):
            return None
        ids: list[int] = bridged.token_ids[len(old) :]
        return ids

    def _by_template(
        self, template: Any, sampled_ids: Sequence[int], before: list[JsonDict], new: list[JsonDict], tools: Tools
    ) -> list[int] | None:
        try:
            ids: list[int] | None = template.suffix(sampled_ids, before, new, tools)
        except Exception as error:  # arguments that the template can't take: `_render` knows what to do
            logger.debug("the template could not go on: %r", error)
            return None
        return ids

    def _render(self, messages: list[JsonDict], tools: Tools, *, mend: bool) -> list[int]:
        """The whole conversation, up to where the model begins to write.

        Some formats refuse arguments that are no object, or an answer to a call that couldn't be read. The model can
        bring that about, so the conversation is mended then; a person, who can in the first prompt, is told.
        """
        try:
            return list(self._renderer.render_ids(messages, tools=list(tools) or None, add_generation_prompt=True))
        except Exception as error:
            if mend and (mended := _mended(messages)) != messages:
                return self._render(mended, tools, mend=False)
            roles = ", ".join(str(message["role"]) for message in messages[-6:])
            raise ConfigError(
                f"The format {self.name!r} can't write this conversation ({roles}): {str(error).rstrip('.'):.300}. "
                "Change its messages, or name another format."
            ) from error

    def _plain(self, message: Message) -> JsonDict:
        """The message as renderers and templates read it."""
        plain: JsonDict = {"role": message.role, "content": message.content or "", **(message.model_extra or {})}
        for name in ("reasoning_content", "tool_call_id", "name"):
            if (value := getattr(message, name)) is not None:
                plain[name] = value
        if self._chatml is None and message.role == "tool":
            plain["content"] = self._broken(plain["content"])
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    **({"id": call.id} if call.id is not None else {}),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
        made: JsonDict = scrub(plain)
        return made

    def _broken(self, content: str | list[JsonDict]) -> str | list[JsonDict]:
        """A tool's text, in which no mark is spelled."""
        if isinstance(content, list):
            return [{**part, "text": self._broken(part["text"])} if "text" in part else part for part in content]
        parts, start = [], 0
        for found in self._vocabulary.spelled.finditer(content):
            parts += [content[start : found.start() + 1], " "]
            start = found.start() + 1
        return "".join([*parts, content[start:]])


def _mended(messages: list[JsonDict]) -> list[JsonDict]:
    """The conversation without what the model did wrong in it.

    Arguments that are no object are empty: the answer says what was wrong. An answer to a call that isn't there is said
    by the user.
    """
    mended: list[JsonDict] = []
    asked: set[str | None] = set()
    unasked: list[JsonDict] = []
    for message in [*messages, {"role": "end"}]:
        calls = message.get("tool_calls") or []
        if message["role"] == "tool" and message.get("tool_call_id") not in asked:
            unasked.append({"role": "user", "content": message["content"]})
            continue
        if message["role"] != "tool":  # behind the answers that were asked for: nothing may come between those
            mended += unasked
            unasked = []
        if calls:
            functions = [
                {**call["function"], "arguments": as_object(call["function"]["arguments"]) or {}} for call in calls
            ]
            calls = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
            message = {**message, "tool_calls": calls}
        asked |= {call.get("id") for call in calls}
        mended.append(message)
    return mended[:-1]
