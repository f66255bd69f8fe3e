"""Chat formats by name, or detected from a tokenizer.

    rendering = load_rendering("/models/Qwen3-8B")

A detected format is verified: either the exact name of the model is known, or the format renders several conversations
to the same ids as the tokenizer's chat template. Otherwise the template itself is used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, MissingExtra, did_you_mean
from toolroll.rollout.chat.parsed_turn import Tools
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.chat.vocabulary import Vocabulary
from toolroll.schemas import JsonDict

logger = logging.getLogger(__name__)

CHATML_SYSTEMS: dict[str, str | None] = {
    "chatml": None,
    "hermes": None,
    "qwen2.5": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
}
"""Names of ChatML, with the default system message if the chat template does not define one."""
TEMPLATE_NAMES = ("template", "default")
"""Names of the tokenizer's chat template."""

_PROBE_CALLS = [
    {"type": "function", "function": {"name": name, "arguments": {"a": 1, "b": "two"}}} for name in ("f", "g")
]
_PROBE_CHAT: list[JsonDict] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]
PROBES: list[list[JsonDict]] = [
    _PROBE_CHAT,
    [{"role": "system", "content": "Be brief."}, *_PROBE_CHAT],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "I'll see.", "tool_calls": _PROBE_CALLS},
        {"role": "tool", "content": "1", "name": "f"},
        {"role": "tool", "content": "2", "name": "g"},
        {"role": "assistant", "content": "", "tool_calls": _PROBE_CALLS[:1]},
        {"role": "tool", "content": "3", "name": "f"},
        *_PROBE_CHAT[1:],
    ],
]
"""Conversations that a template must render like a format; the last one has tool calls."""
PROBE_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Do.", "parameters": {"type": "object"}}}
    for name in ("f", "g")
]


def load_rendering(
    tokenizer: Any,
    format: str | None = None,  # noqa: A002
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Rendering:
    """Load the rendering of a model.

    Args:
        tokenizer: A tokenizer of transformers, or the directory that contains it (nothing is downloaded). Its settings
            must not be changed afterwards.
        format: "chatml" (also "hermes", "qwen2.5", "smollm2"); a name of the package renderers, e.g. "qwen3";
            "template" for the tokenizer's chat template; or the dotted path of a renderer class. By default it is
            detected: by the model's exact name; else ChatML, if the template is equivalent; else the template.
        chat_template: Jinja template to use in place of the tokenizer's.
        chat_template_kwargs: Settings of the template or of the family's renderer, for example `enable_thinking`.

    Returns:
        The rendering.

    Raises:
        MissingExtra: If the extra `rollout` is not installed.
        ConfigError: If the tokenizer cannot be loaded, or the format is unknown, does not fit the tokenizer or cannot
            be detected.
    """
    try:
        import renderers  # noqa: F401
    except ImportError as error:
        raise MissingExtra("renderers", "rollout") from error
    loaded = _load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    vocabulary = Vocabulary(loaded, chat_template)
    source = _RendererSource(vocabulary, chat_template, dict(chat_template_kwargs or {}))
    name, renderer = source.detect() if format is None else source.create(format)
    rendering = Rendering(name, renderer, vocabulary)
    origin = "requested" if format else "detected from the tokenizer"
    logger.info("chat format %s (%s); stop ids %s", name, origin, rendering.stop_ids)
    return rendering


def _load_tokenizer(path: str | Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("transformers", "rollout") from error
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"Cannot load a tokenizer from {str(path)!r}: {reason:.200} Pass the model's directory, or download the "
            f"model first (hf download {path}). A tokenizer that needs custom code must be loaded by the caller and "
            "passed as an object."
        ) from error


@dataclass(frozen=True)
class _RendererSource:
    """Creates renderers for a tokenizer."""

    vocabulary: Vocabulary
    chat_template: str | None
    settings: dict[str, Any]

    def detect(self) -> tuple[str, Any]:
        """Return the name and the renderer of the format that fits the tokenizer."""
        from renderers.base import MODEL_RENDERER_MAP

        from toolroll.rollout.chat.chatml import TURN_END, TURN_START

        template = self._template()
        model = str(getattr(self.vocabulary.tokenizer, "name_or_path", ""))
        if model in MODEL_RENDERER_MAP and self.chat_template is None:
            return self.create(MODEL_RENDERER_MAP[model])
        # A directory may have the name of its model (/models/Qwen3-8B). The template must agree.
        families = {known.rpartition("/")[2].lower(): family for known, family in MODEL_RENDERER_MAP.items()}
        family = families.get(Path(model).name.lower())
        if family is not None and template is not None:
            with contextlib.suppress(ConfigError):
                found = self.create(family)
                if _is_equivalent(found[1], template):
                    return found
        if {TURN_START, TURN_END} <= self.vocabulary.control_tokens.keys():
            chatml = self._chatml(template, None)
            if template is None or _is_equivalent(chatml, template):
                return "chatml", chatml
        if template is None:
            raise ConfigError(
                "Cannot detect the chat format: the tokenizer has no chat template, and its model is unknown. Pass a "
                "format or a chat_template."
            )
        return "template", template

    def create(self, name: str) -> tuple[str, Any]:
        """Return the canonical name and the renderer of a format."""
        from renderers.base import MODEL_RENDERER_MAP, create_renderer
        from renderers.configs import CustomRendererConfig, config_from_name

        if name in CHATML_SYSTEMS:
            if self.settings:
                raise ConfigError(f"ChatML has no settings, got chat_template_kwargs: {', '.join(self.settings)}.")
            return "chatml", self._chatml(self._template(), CHATML_SYSTEMS[name])
        if name in TEMPLATE_NAMES:
            if (template := self._template()) is None:
                raise ConfigError("The tokenizer has no chat template. Pass a chat_template or another format.")
            return "template", template
        families = set(MODEL_RENDERER_MAP.values())
        if name not in families and "." not in name and ":" not in name:
            known = sorted({*CHATML_SYSTEMS, *TEMPLATE_NAMES, *families})
            hint = did_you_mean(name, known) or f". Available formats: {', '.join(known)}"
            raise ConfigError(f"Unknown chat format {name!r}{hint}.")
        try:
            config = config_from_name(name) if name in families else CustomRendererConfig(import_path=name)
            config = type(config).model_validate({**config.model_dump(), **self.settings})
            return name, create_renderer(self.vocabulary.tokenizer, config)
        except Exception as error:  # e.g. a missing token or class, or an error of a custom class
            raise ConfigError(
                f"The chat format {name!r} cannot be used with this tokenizer: {type(error).__name__}: "
                f"{error!s:.300}. Choose another format, or omit it to detect one."
            ) from error

    def _template(self) -> Any:
        from toolroll.rollout.chat.template import TemplateRenderer

        if self.chat_template is None and getattr(self.vocabulary.tokenizer, "chat_template", None) is None:
            return None
        return TemplateRenderer(self.vocabulary, self.chat_template, self.settings)

    def _chatml(self, template: Any, default_system: str | None) -> Any:
        """Return a ChatML renderer with the default system message of the template, if there is one."""
        from toolroll.rollout.chat.chatml import TURN_END, TURN_START, ChatMLConfig, ChatMLRenderer

        if template is not None:
            system_start, system_end = f"{TURN_START}system\n", f"{TURN_END}\n{TURN_START}user\n"
            try:
                text = template.text(PROBES[0][:1])
            except Exception:  # a template may reject any conversation
                text = ""
            if text.startswith(system_start) and system_end in text:
                default_system = text[len(system_start) :].partition(system_end)[0]
            elif text:
                default_system = None
        return ChatMLRenderer(self.vocabulary, ChatMLConfig(default_system=default_system))


def _is_equivalent(renderer: Any, template: Any) -> bool:
    """Return True if a template renders every probe to the same ids as a renderer.

    A template that ignores tools is compared without them; the Hermes format is then as good as any other.
    """
    try:
        shows_tools = template.text(PROBES[0], PROBE_TOOLS) != template.text(PROBES[0])
        probes: list[tuple[list[JsonDict], Tools | None]] = [(probe, None) for probe in PROBES[:2]]
        probes += [(probe, PROBE_TOOLS) for probe in PROBES] if shows_tools else []
        return all(
            list(renderer.render_ids(probe, tools=tools, add_generation_prompt=True))
            == template.render_ids(probe, tools=tools, add_generation_prompt=True)
            for probe, tools in probes
        )
    except Exception:  # a template may reject any conversation
        return False
