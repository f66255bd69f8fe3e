"""Rendering: messages ↔ tokens for a model family.

One `Rendering` belongs to a tokenizer and a format, and all trajectories share it, in any thread. Promises:

- `go_on` never touches what the engine sampled: it gives the ids to put after it, or says that the conversation had to
  be written anew (`rerendered`). That a renderer's answer begins with the old ids is checked, not believed.
- `parse` has an answer to any ids. A call that can't be read is told with one sentence that the model can act on.
- No tool's text becomes a special token or a marker. ChatML encodes it as text. The renderers of other families, and
  templates, would not: they get it with a space in, `< |im_end|>`.

The renderers are those of the package `renderers`; ChatML and opaque templates are ours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, MissingExtra, did_you_mean
from toolroll.rollout.parsed import Parsed, ParsedCall, as_object
from toolroll.rollout.vocabulary import Vocabulary
from toolroll.sandbox.protocol import scrub
from toolroll.schemas import JsonDict, Message

__all__ = ["Continuation", "Parsed", "ParsedCall", "Rendering", "load_rendering"]

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
