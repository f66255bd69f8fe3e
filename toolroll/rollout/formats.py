"""Formats: how a model's conversations are written, by name or as found from its tokenizer.

    rendering = load_rendering("/models/Qwen3-8B")

What is found is proven: a model's exact name is known, or the format writes some conversations with the very tokens of
the tokenizer's own template. Where nothing is proven, the template itself is used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, MissingExtra, did_you_mean
from toolroll.rollout.rendering import Rendering, Tools
from toolroll.rollout.vocabulary import Vocabulary
from toolroll.schemas import JsonDict

logger = logging.getLogger(__name__)

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SMOLLM_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHATML: dict[str, str | None] = {"chatml": None, "hermes": None, "qwen2.5": QWEN_SYSTEM, "smollm2": SMOLLM_SYSTEM}
"""The names of ChatML, with the system message of a conversation without one, where no template tells it."""
TEMPLATE = ("template", "default")
"""The names of the tokenizer's own template."""

_CALLS = [{"type": "function", "function": {"name": name, "arguments": {"a": 1, "b": "two"}}} for name in ("f", "g")]
PROBES: list[list[JsonDict]] = [
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "I'll see.", "tool_calls": _CALLS},
        {"role": "tool", "content": "1", "name": "f"},
        {"role": "tool", "content": "2", "name": "g"},
        {"role": "assistant", "content": "", "tool_calls": _CALLS[:1]},
        {"role": "tool", "content": "3", "name": "f"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ],
]
"""Conversations by which a template is proven to be ChatML; the last has calls."""
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
    """Find how a model's conversations are written.

    Args:
        tokenizer: One of transformers', or the directory where it is (nothing is downloaded). Its settings must not be
            changed afterwards.
        format: "chatml" (also "hermes", "qwen2.5", "smollm2"); one of the package renderers' names, e.g. "qwen3";
            "template" for the tokenizer's own; or the dotted path of a renderer class. By default it is found from the
            tokenizer: by the model's exact name; else ChatML, where the template proves to be that; else the template.
        chat_template: A Jinja template in place of the tokenizer's.
        chat_template_kwargs: Settings of the template's, or of the family's renderer: `enable_thinking`, say.
    """
    try:
        import renderers  # noqa: F401
    except ImportError as error:
        raise MissingExtra("renderers", "rollout") from error
    loaded = _load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    vocabulary = Vocabulary(loaded, chat_template)
    given = _Given(vocabulary, chat_template, dict(chat_template_kwargs or {}))
    name, renderer = _found(given) if format is None else _named(format, given)
    rendering = Rendering(name, renderer, vocabulary)
    asked = "asked for" if format else "found from the tokenizer"
    logger.info("conversations are written in the format %s (%s); stop ids %s", name, asked, rendering.stop_ids)
    return rendering


def _load_tokenizer(path: str | Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("transformers", "rollout") from error
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises of all kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"There is no tokenizer at {str(path)!r}: {reason:.200} Give the model's directory, or download it first "
            f"(hf download {path}); one that needs code of its own, load yourself and give the object."
        ) from error


@dataclass(frozen=True)
class _Given:
    """What there is to find a renderer from."""

    vocabulary: Vocabulary
    chat_template: str | None
    settings: dict[str, Any]

    @property
    def template(self) -> Any:
        """The template's renderer; None where there is no template."""
        from toolroll.rollout.template import TemplateRenderer

        if self.chat_template is None and getattr(self.vocabulary.tokenizer, "chat_template", None) is None:
            return None
        return TemplateRenderer(self.vocabulary, self.chat_template, self.settings)


def _found(given: _Given) -> tuple[str, Any]:
    from renderers.base import MODEL_RENDERER_MAP

    from toolroll.rollout.chatml import END, START

    vocabulary, template = given.vocabulary, given.template
    model = str(getattr(vocabulary.tokenizer, "name_or_path", ""))
    known = MODEL_RENDERER_MAP.get(model)
    if known is not None and given.chat_template is None:
        return _named(known, given)
    if (family := _by_directory(model, given, template)) is not None:
        return family
    if START in vocabulary.marks and END in vocabulary.marks:
        chatml = _chatml(vocabulary, template, None)
        if template is None or _are_alike(chatml, template):
            return "chatml", chatml
    if template is None:
        raise ConfigError(
            "This tokenizer has no chat template and isn't one that is known by name: name its format, or give a "
            "chat_template."
        )
    return "template", template


def _by_directory(model: str, given: _Given, template: Any) -> tuple[str, Any] | None:
    """The family of a model in a directory of its name, e.g. /models/Qwen3-8B, if it writes as the template does."""
    from renderers.base import MODEL_RENDERER_MAP

    name = Path(model).name.lower()
    families = {known.rpartition("/")[2].lower(): family for known, family in MODEL_RENDERER_MAP.items()}
    if template is None or name not in families:
        return None
    try:
        found = _named(families[name], given)
    except ConfigError:
        return None
    return found if _are_alike(found[1], template) else None


def _named(name: str, given: _Given) -> tuple[str, Any]:
    from renderers.base import MODEL_RENDERER_MAP, create_renderer
    from renderers.configs import CustomRendererConfig, config_from_name

    if name in CHATML:
        if given.settings:
            raise ConfigError(f"ChatML has no settings, and chat_template_kwargs has {', '.join(given.settings)}.")
        return "chatml", _chatml(given.vocabulary, given.template, CHATML[name])
    if name in TEMPLATE:
        if given.template is None:
            raise ConfigError("This tokenizer has no chat template: give one as chat_template, or name a format.")
        return "template", given.template
    families = set(MODEL_RENDERER_MAP.values())
    if name not in families and "." not in name and ":" not in name:
        known = sorted({*CHATML, *TEMPLATE, *families})
        raise ConfigError(f"There is no format {name!r}{did_you_mean(name, known) or ': ' + ', '.join(known)}.")
    try:
        config = config_from_name(name) if name in families else CustomRendererConfig(import_path=name)
        config = type(config).model_validate({**config.model_dump(), **given.settings})
        return name, create_renderer(given.vocabulary.tokenizer, config)
    except Exception as error:  # a token that isn't there, a class that isn't, or whatever its own code raises
        raise ConfigError(
            f"The format {name!r} can't be had with this tokenizer: {type(error).__name__}: {error!s:.300}. "
            "Name another, or none to have it found."
        ) from error


def _chatml(vocabulary: Vocabulary, template: Any, default_system: str | None) -> Any:
    """ChatML with the system message that the template gives to a conversation without one."""
    from toolroll.rollout.chatml import END, START, ChatMLConfig, ChatMLRenderer

    if template is not None:
        begin, end = f"{START}system\n", f"{END}\n{START}user\n"
        try:
            written = template.text(PROBES[0][:1])
        except Exception:  # it takes no lone user's message, or nothing at all
            written = ""
        if written.startswith(begin) and end in written:
            default_system = written[len(begin) :].partition(end)[0]
        elif written:
            default_system = None
    return ChatMLRenderer(vocabulary, ChatMLConfig(default_system=default_system))


def _are_alike(renderer: Any, template: Any) -> bool:
    """Whether the template writes as the renderer does: the same tokens for every probe.

    A template that shows no tools says nothing about how they are called: then the Hermes form is as good as any.
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
    except Exception:  # a template may refuse anything
        return False
