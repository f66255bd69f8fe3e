"""Chat formats of the package `renderers`, one class per model family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.errors import ConfigError, did_you_mean
from toolroll.rollout.chat.parsed_turn import ParsedTurn, Tools
from toolroll.rollout.chat.template import ChatMessage, map_tool_text
from toolroll.rollout.chat.vocabulary import Vocabulary


class FamilyRenderer:
    """A renderer of the package `renderers`, or a class with its interface.

    Args:
        vocabulary: Vocabulary of the tokenizer.
        name: Name of the family, or the dotted path of a class.
        settings: Settings of the family.

    Raises:
        ConfigError: If the family is unknown or does not fit the tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary, name: str, settings: Mapping[str, Any]) -> None:
        from renderers.base import create_renderer
        from renderers.configs import CustomRendererConfig, config_from_name

        families = family_names()
        if name not in families and "." not in name and ":" not in name:
            known = sorted({"chatml", "template", *families})
            hint = did_you_mean(name, known) or f". Available formats: {', '.join(known)}"
            raise ConfigError(f"Unknown chat format {name!r}{hint}.")
        try:
            config = config_from_name(name) if name in families else CustomRendererConfig(import_path=name)
            config = type(config).model_validate({**config.model_dump(), **settings})
            self._renderer = create_renderer(vocabulary.tokenizer, config)
        except Exception as error:  # e.g. a missing token or class, or an error of a custom class
            raise ConfigError(
                f"The chat format {name!r} cannot be used with this tokenizer: {type(error).__name__}: "
                f"{error!s:.300}. Choose another format, or omit it to detect one."
            ) from error
        self.stop_ids = list(dict.fromkeys(self._renderer.get_stop_token_ids()))
        self.shows_reasoning = True
        self._vocabulary = vocabulary

    def render_ids(
        self, messages: Sequence[ChatMessage], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render a conversation. A space is inserted into text of tools that spells a control token."""
        plain = [map_tool_text(message, self._vocabulary.break_control_tokens) for message in messages]
        return list(
            self._renderer.render_ids(
                plain, tools=list(tools or ()) or None, add_generation_prompt=add_generation_prompt
            )
        )

    def suffix(
        self, prompt: Sequence[int], sampled: Sequence[int], new: Sequence[ChatMessage], tools: Tools
    ) -> list[int] | None:
        """Return the ids after a sampled turn, or None if the family cannot continue it."""
        plain = [map_tool_text(message, self._vocabulary.break_control_tokens) for message in new]
        previous = [*prompt, *sampled]
        bridged = self._renderer.bridge_to_next_turn(list(prompt), list(sampled), plain, tools=list(tools) or None)
        if bridged is None or bridged.token_ids[: len(previous)] != previous:
            return None
        return list(bridged.token_ids[len(previous) :]) or None

    def parse(self, ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int]) -> ParsedTurn:
        """Parse the ids sampled after a prompt."""
        response = self._renderer.parse_response(list(ids), tools=list(tools) or None, prompt_ids=list(prompt_ids))
        return ParsedTurn.from_renderer(response)


def family_names() -> set[str]:
    """Return the names of all families."""
    from renderers.base import MODEL_RENDERER_MAP

    return set(MODEL_RENDERER_MAP.values())


def families_of(names: Sequence[str]) -> list[str]:
    """Return the families whose name is part of a model's names, the longest first."""
    known = [name.lower().replace("_", "-") for name in names]
    found = [family for family in family_names() if any(family in name for name in known)]
    return sorted(found, key=lambda family: (-len(family), family))
