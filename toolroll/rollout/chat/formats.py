"""Find the chat format of a model.

    rendering = load_rendering("/models/Qwen3-8B")

A format is found by proof, whatever the directory is called: the model's own chat template, if tools work with it, else
a family of the package `renderers` that the model's type or directory names. Both must pass the checks in `checks.py`;
otherwise the model is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolroll.errors import ConfigError, MissingExtra
from toolroll.rollout.chat.checks import OPTIONAL, Check, check_rendering
from toolroll.rollout.chat.image_tokens import ImageTokens
from toolroll.rollout.chat.model_files import check_model_path, read_model_file
from toolroll.rollout.chat.parsed_turn import Tools
from toolroll.rollout.chat.rendering import ImageRole, Renderer, Rendering, Thinking
from toolroll.rollout.chat.template import CHATML_TEMPLATE, TemplateError, TemplateRenderer
from toolroll.rollout.chat.vocabulary import Vocabulary
from toolroll.schemas import JsonDict

logger = logging.getLogger(__name__)

ToolPrompt = Literal["hermes"]
IMAGE_ROLES: tuple[ImageRole, ...] = ("user", "tool")
CHATML_TOKENS = {"<|im_start|>", "<|im_end|>"}


@dataclass(frozen=True)
class FormatReport:
    """How the chat format of a model was chosen."""

    rendering: Rendering | None
    """The rendering, or None if the model is refused."""
    checks: list[Check]
    """Checks of the rendering, or of the first format that failed."""
    problem: str | None = None
    """Why the model is refused, and what to set."""

    @property
    def format(self) -> str | None:
        """Name of the chat format, or None if the model is refused."""
        return self.rendering.name if self.rendering else None

    @property
    def call_form(self) -> str | None:
        """Form in which the model writes tool calls, or None if the model is refused or a family defines it."""
        renderer = self.rendering.renderer if self.rendering else None
        return renderer.parser.name if isinstance(renderer, TemplateRenderer) else None

    @property
    def image_problems(self) -> dict[str, str | None]:
        """Why the model cannot see images in messages of a role, or None if it can. Empty for models without vision."""
        if self.rendering is None or self.rendering.image_token_id is None:
            return {}
        return {role: self.rendering.find_image_problem(role) for role in IMAGE_ROLES}


def load_rendering(
    tokenizer: Any,
    format: str | None = None,  # noqa: A002
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    tool_prompt: ToolPrompt | None = None,
    thinking: Thinking | None = None,
    needs_tools: bool = True,
) -> Rendering:
    """Load the rendering of a model.

    Args:
        tokenizer: A tokenizer of transformers, or the directory that contains it (nothing is downloaded). Its settings
            must not be changed afterwards.
        format: "template" for the tokenizer's chat template; "chatml" for ChatML with a tool prompt; a name of the
            package renderers, e.g. "qwen3"; or the dotted path of a renderer class. By default it is found by proof.
        chat_template: Jinja template to use in place of the tokenizer's.
        chat_template_kwargs: Settings of the template or of the family's renderer, for example `enable_thinking`.
        tool_prompt: "hermes" for a model whose chat template does not show tools: the system message lists them, and
            their responses are user messages.
        thinking: "keep" or "strip" the reasoning of earlier turns. By default as the template does it between two
            tool calls. "strip" renders the conversation again after each turn.
        needs_tools: False for rollouts without tools, in which every template can be used.

    Returns:
        The rendering.

    Raises:
        MissingExtra: If the extra `rollout` is not installed.
        ConfigError: If the tokenizer cannot be loaded, or the format is unknown or does not fit the model. The message
            states what failed and what to set.
    """
    report = inspect_format(
        tokenizer,
        format,
        chat_template,
        chat_template_kwargs,
        tool_prompt=tool_prompt,
        thinking=thinking,
        needs_tools=needs_tools,
    )
    if report.rendering is None:
        raise ConfigError(report.problem or "The chat format cannot be used.")
    rendering = report.rendering
    origin = "requested" if format else "found by its template"
    stops = ", ".join(rendering.decode([token_id]) for token_id in rendering.stop_ids)
    logger.info("chat format %s (%s); a turn ends with %s", rendering.name, origin, stops)
    return rendering


def inspect_format(
    tokenizer: Any,
    format: str | None = None,  # noqa: A002
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    tool_prompt: ToolPrompt | None = None,
    thinking: Thinking | None = None,
    needs_tools: bool = True,
) -> FormatReport:
    """Choose the format of a model and report the checks. Takes the arguments of `load_rendering`."""
    try:
        import renderers  # noqa: F401
    except ImportError as error:
        raise MissingExtra("renderers", "rollout") from error
    loaded = _load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    is_chatml = format == "chatml"
    if is_chatml:
        chat_template, tool_prompt = CHATML_TEMPLATE, "hermes"
        if chat_template_kwargs:
            raise ConfigError(f"ChatML has no settings, got chat_template_kwargs: {', '.join(chat_template_kwargs)}.")
    vocabulary = Vocabulary(loaded, chat_template)
    if is_chatml and not vocabulary.control_tokens.keys() >= CHATML_TOKENS:
        raise ConfigError(
            f"The tokenizer has no tokens {' and '.join(sorted(CHATML_TOKENS))}, which ChatML requires. Omit the "
            "format to find one."
        )
    settings = dict(chat_template_kwargs or {})
    finder = _Finder(vocabulary, chat_template, settings, tool_prompt, thinking, needs_tools)
    if format in (None, "template", "chatml"):
        name = "chatml" if is_chatml else "template"
        return finder.find(name, try_families=format is None and tool_prompt is None)
    return finder.check_family(format, is_requested=True)


@dataclass(frozen=True)
class _Finder:
    """Creates and checks the formats of a tokenizer."""

    vocabulary: Vocabulary
    chat_template: str | None
    settings: dict[str, Any]
    tool_prompt: ToolPrompt | None
    thinking: Thinking | None
    needs_tools: bool

    def find(self, name: str, *, try_families: bool) -> FormatReport:
        """Return the template's format if tools work with it, else a family's."""
        template, problem = self._template(self.tool_prompt)
        if template is None and not self.needs_tools:
            template, problem = self._template("hermes")  # shows no tools if there are none
        if template is not None:
            return self._report(name, template)
        for family in self._families() if try_families and self.chat_template is None else ():
            try:
                report = self.check_family(family)
            except ConfigError:
                continue
            if report.rendering is not None:
                return report
        remedy = "" if self.tool_prompt else _remedy(self._template("hermes")[0] is not None)
        failed = Check("template", False, problem)
        return FormatReport(None, [failed], f"The model's chat template cannot be used: {problem}.{remedy}")

    def check_family(self, name: str, *, is_requested: bool = False) -> FormatReport:
        """Create a family's format and check it."""
        from toolroll.rollout.chat.families import FamilyRenderer

        renderer = FamilyRenderer(self.vocabulary, name, self.settings)
        return self._report(name, renderer, is_requested=is_requested)

    def _template(self, tool_prompt: ToolPrompt | None) -> tuple[TemplateRenderer | None, str]:
        """Return the template's renderer, or None and why tools cannot be used with it."""
        if self.chat_template is None and getattr(self.vocabulary.tokenizer, "chat_template", None) is None:
            return None, "the tokenizer has none"
        try:
            return TemplateRenderer(self.vocabulary, self.chat_template, self.settings, tool_prompt), ""
        except TemplateError as error:
            return None, str(error)

    def _report(self, name: str, renderer: Renderer, *, is_requested: bool = False) -> FormatReport:
        images = ImageTokens.find(self.vocabulary.tokenizer)
        rendering = Rendering(name, renderer, self.vocabulary, self.thinking, images)
        checks = check_rendering(rendering, self._apply_template)
        failed = [check for check in checks if not check.passed]
        for check in failed if is_requested else ():
            if check.name in OPTIONAL:
                logger.warning("chat format %s: %s %s", name, check.name, check.detail)
        if is_requested:
            failed = [check for check in failed if check.name not in OPTIONAL]
        if not failed or not self.needs_tools:
            return FormatReport(rendering, checks)
        problem = f"The chat format {name!r} does not fit the model: {failed[0].name}: {failed[0].detail}."
        return FormatReport(None, checks, f"{problem} Choose another model_format, or omit it to find one.")

    def _apply_template(self, messages: Sequence[JsonDict], tools: Tools) -> Sequence[int]:
        """Render a conversation in the tokenizer's own way."""
        if tools and self.tool_prompt:
            raise ValueError("With a tool prompt, tools are not shown in the template's way.")
        ids: list[int] = self.vocabulary.tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            chat_template=self.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.settings,
        )
        return ids

    def _families(self) -> list[str]:
        from toolroll.rollout.chat.families import families_of

        path = Path(str(getattr(self.vocabulary.tokenizer, "name_or_path", "")))
        model_type = read_model_file(self.vocabulary.tokenizer, "config.json").get("model_type")
        return families_of([*([str(model_type)] if model_type else []), path.name])


def _remedy(has_tool_prompt: bool) -> str:
    if has_tool_prompt:
        return (
            " Set tool_prompt: hermes, which lists the tools in the system message and shows their responses as user "
            "messages, or pass a chat_template that shows tools."
        )
    return " Pass a chat_template that shows tools, or a model_format, e.g. chatml if the model was trained with it."


def _load_tokenizer(path: str | Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("transformers", "rollout") from error
    check_model_path(path)
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"Cannot load a tokenizer from {str(path)!r}: {reason:.200} Pass the model's directory, or download the "
            f"model first (hf download {path}). A tokenizer that needs custom code must be loaded by the caller and "
            "passed as an object."
        ) from error
