"""Conversion between messages and tokens for a model.

All trajectories share one `Rendering`, from any thread. Invariants:

- `bridge` never changes sampled ids. It returns the ids to append or, with `rerendered`, the whole conversation
  rendered again.
- `parse` accepts any ids. A call that cannot be read has a problem, a message to the model.
- The text of a tool never becomes a control token.
- The ids of an image are as many as the model sees. Their ranges are returned beside the ids.

`formats.py` chooses the renderer: a chat template (`template.py`) or a model family (`families.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from toolroll._internal.text import replace_lone_surrogates_in_json
from toolroll.errors import ConfigError
from toolroll.images import Image, ImageSpan, image_content
from toolroll.rollout.chat.image_tokens import ImageTokens
from toolroll.rollout.chat.parsed_turn import (
    MALFORMED_CALL,
    ParsedCall,
    ParsedTurn,
    Tools,
    as_object,
    convert_arguments,
)
from toolroll.rollout.chat.vocabulary import Vocabulary
from toolroll.schemas import JsonDict, Message

logger = logging.getLogger(__name__)

Thinking = Literal["keep", "strip"]
ImageRole = Literal["user", "tool"]
PROBE_IMAGE = Image("", "image/png", 64, 64)
"""Stands for any image: only its size matters."""
Expanded = tuple[list[int], tuple[ImageSpan, ...]]


@dataclass(frozen=True)
class Continuation:
    """The ids that the engine receives for the next turn."""

    ids: list[int]
    rerendered: bool
    """False if `ids` follow the previous ids; True if they are the whole prompt, which may differ from these."""
    images: tuple[ImageSpan, ...] = ()
    """The ranges of images in `ids`."""


class Renderer(Protocol):
    """Renders and parses one chat format."""

    stop_ids: list[int]
    shows_reasoning: bool
    """True if the format shows the reasoning of the turns since the last user message."""

    def render_ids(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render a conversation and return its ids."""
        ...

    def suffix(
        self, prompt: Sequence[int], sampled: Sequence[int], new: Sequence[Mapping[str, Any]], tools: Tools
    ) -> list[int] | None:
        """Return the ids after a sampled turn, or None if the conversation has to be rendered again."""
        ...

    def parse(self, ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int]) -> ParsedTurn:
        """Parse the ids sampled after a prompt."""
        ...


class Rendering:
    """Messages ↔ tokens. Created by `load_rendering`.

    Args:
        name: Name of the chat format.
        renderer: Renderer of the format.
        vocabulary: Vocabulary of the tokenizer.
        thinking: "keep" the reasoning of earlier turns in the prompt, or "strip" it, which renders the conversation
            again for each turn. By default as the format does it between two tool calls.
        image_tokens: Placeholders of the model's images, or None if it has none.

    Attributes:
        name: Name of the chat format.
        stop_ids: Ids that end an assistant turn.
        vocab_size: Number of ids of the tokenizer.
        keeps_thinking: True if the reasoning of earlier turns stays in the prompt.
        image_token_id: Id that stands for a part of an image, or None. A model must not sample it.
    """

    def __init__(
        self,
        name: str,
        renderer: Renderer,
        vocabulary: Vocabulary,
        thinking: Thinking | None = None,
        image_tokens: ImageTokens | None = None,
    ) -> None:
        self.name = name
        self.renderer = renderer
        self.stop_ids = tuple(renderer.stop_ids)
        self.vocab_size = vocabulary.size
        self.keeps_thinking = renderer.shows_reasoning if thinking is None else thinking == "keep"
        self.image_token_id = image_tokens.token_id if image_tokens else None
        self._image_tokens = image_tokens
        self._image_problems: dict[ImageRole, str | None] = {}
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without control tokens."""
        return self._vocabulary.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of any ids, including control tokens."""
        return self._vocabulary.decode(ids)

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of a conversation, up to the start of the next assistant turn.

        Raises:
            ConfigError: If `messages` is empty or the format rejects them.
        """
        return self.start(messages, tools).ids

    def start(self, messages: Sequence[Message], tools: Tools) -> Continuation:
        """Return the ids of the first turn's prompt, with the ranges of its images.

        Args:
            messages: The conversation. Its images are read (`with_images`).
            tools: Tool schemas.

        Raises:
            ConfigError: If `messages` is empty, or the format rejects them or their images.
        """
        if not messages:
            raise ConfigError("Expected at least one message, got none.")
        ids, images = self._render(list(map(to_plain, messages)), tools)
        return Continuation(ids, rerendered=False, images=images)

    def count_image_tokens(self, image: Image) -> int:
        """Return the number of tokens of an image, for a model that can see images (`check_images`).

        Raises:
            ValueError: If the model's image processor rejects the image.
        """
        assert self._image_tokens is not None
        return self._image_tokens.count(image)

    def find_image_problem(self, role: ImageRole) -> str | None:
        """Return why the model cannot see images in messages of a role and what to set, or None if it can."""
        if role not in self._image_problems:
            self._image_problems[role] = self._probe_images(role)
        return self._image_problems[role]

    def check_images(self, role: ImageRole) -> None:
        """Check that the model can see images in messages of a role.

        Raises:
            ConfigError: If it cannot. The message states why and what to set.
        """
        if problem := self.find_image_problem(role):
            raise ConfigError(problem)

    def parse(self, ids: Sequence[int], *, tools: Tools, prompt_ids: Sequence[int]) -> ParsedTurn:
        """Parse the ids sampled after a prompt."""
        try:
            return self.renderer.parse(ids, tools, prompt_ids)
        except Exception as error:  # a call may be lost, so the model is asked to write it again
            logger.warning("format %s: parsing %d ids failed: %r", self.name, len(ids), error)
            return ParsedTurn(self.decode(ids), calls=(ParsedCall(None, None, "", MALFORMED_CALL),))

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
            messages: Messages up to and including it. They are needed only if the conversation is rendered again.
            tools: Tool schemas.

        Returns:
            The ids to append, or the whole conversation rendered again.

        Raises:
            ConfigError: If the conversation has to be rendered again and the format rejects it.
        """
        new = list(map(to_plain, new_messages))
        suffix = self._find_suffix(prompt_ids, sampled_ids, new, tools) if self.keeps_thinking else None
        if suffix is not None:
            return Continuation(suffix[0], rerendered=False, images=suffix[1])
        earlier = list(map(to_plain, messages))
        if not self.keeps_thinking:
            earlier = [{key: message[key] for key in message if key != "reasoning_content"} for message in earlier]
        ids, images = self._render_repaired([*earlier, *new], tools)
        previous = [*prompt_ids, *sampled_ids]
        if ids[: len(previous)] != previous:
            return Continuation(ids, rerendered=True, images=images)
        images = tuple(span.shifted(-len(previous)) for span in images if span.start >= len(previous))
        return Continuation(ids[len(previous) :], rerendered=False, images=images)

    def _find_suffix(
        self, prompt: Sequence[int], sampled: Sequence[int], new: list[JsonDict], tools: Tools
    ) -> Expanded | None:
        try:
            shown, images = _split_images(new)
            ids = self.renderer.suffix(prompt, sampled, shown, tools)
            return None if ids is None else self._expand(ids, images)
        except Exception as error:  # a template may reject any messages; rendering again may help
            logger.warning("format %s: bridge after %d ids failed: %r", self.name, len(sampled), error)
            return None

    def _expand(self, ids: list[int], images: list[Image]) -> Expanded:
        if self._image_tokens is not None:
            return self._image_tokens.expand(ids, images) if images or self.image_token_id in ids else (ids, ())
        if images:
            raise ValueError("the model has no images")
        return ids, ()

    def _probe_images(self, role: ImageRole) -> str | None:
        remedy = "Use a model with vision, such as Qwen3-VL, or remove the images."
        if self._image_tokens is None:
            return f"The model has no images: its config.json has no image_token_id. {remedy}"
        try:
            one, two = (self._probe_text(role, count) for count in (1, 2))
            if not _repeats_image(one, two, self._image_tokens.token_id):
                return "The chat template numbers the images, which depends on earlier ones. Unset add_vision_id."
        except Exception as error:  # a template may reject any message
            if isinstance(error, ConfigError):
                return str(error)
            hint = " Set tool_prompt: hermes, which shows tool responses as user messages." if role == "tool" else ""
            return f"The chat format {self.name!r} does not show images in {role} messages: {error}.{hint}"
        return None

    def _probe_text(self, role: ImageRole, count: int) -> list[int]:
        """Return the ids of a message with images, with one placeholder for each."""
        images = [PROBE_IMAGE] * count
        message = Message(role=role, content=image_content(images, "x"), name="x", tool_call_id="call00000")
        shown, _ = _split_images([to_plain(message)])
        if role == "user":
            ids = self.renderer.render_ids(shown, add_generation_prompt=True)
        else:
            prompt = self.renderer.render_ids([{"role": "user", "content": "x"}], add_generation_prompt=True)
            ids = self.renderer.suffix(prompt, [], shown, []) or []
        self._expand(ids, images)
        return ids

    def _render(self, messages: list[JsonDict], tools: Tools) -> Expanded:
        try:
            shown, images = _split_images(messages)
            ids = self.renderer.render_ids(shown, tools=tools, add_generation_prompt=True)
            return self._expand(ids, images)
        except ConfigError:
            raise
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages[-6:])
            raise ConfigError(
                f"The format {self.name!r} cannot render this conversation ({roles}): "
                f"{str(error).rstrip('.'):.300}. Change the messages, or choose another format."
            ) from error

    def _render_repaired(self, messages: list[JsonDict], tools: Tools) -> Expanded:
        """Render a conversation. If the format rejects it, remove errors of the model and try again."""
        try:
            return self._render(messages, tools)
        except ConfigError:
            repaired = _repair(messages)
            if repaired == messages:
                raise
            return self._render(repaired, tools)


def to_plain(message: Message) -> JsonDict:
    """Return a message as the dict that templates expect."""
    plain: JsonDict = {**message.model_dump(exclude={"content"}, exclude_none=True), **(message.model_extra or {})}
    plain["content"] = message.content or ""
    encodable: JsonDict = replace_lone_surrogates_in_json(plain)
    return encodable


def _split_images(messages: Sequence[JsonDict]) -> tuple[list[JsonDict], list[Image]]:
    """Return messages as templates expect them, with image parts without images, and the images in order."""
    shown: list[JsonDict] = []
    images: list[Image] = []
    for message in messages:
        if isinstance(message["content"], list):
            found = [part.get("image") for part in message["content"]]
            images += [image for image in found if isinstance(image, Image)]
            parts = zip(message["content"], found, strict=True)
            message = {
                **message,
                "content": [{"type": "image"} if isinstance(image, Image) else part for part, image in parts],
            }
        shown.append(message)
    return shown, images


def _repeats_image(one: list[int], two: list[int], token_id: int) -> bool:
    """Return True if the ids of a message with two images are those with one, and the text of the image again."""
    position, length = one.index(token_id), len(two) - len(one)
    starts = range(max(0, position - length + 1), position + 1)
    return any(
        two == [*one[: start + length], *one[start : start + length], *one[start + length :]] for start in starts
    )


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
