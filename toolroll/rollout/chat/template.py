"""Render with a chat template, and parse what its model writes.

A template is opaque. What a renderer must know about it is found by rendering probe conversations when it is created:
in which form it writes calls, which token ends a turn, and how it expects arguments. Invariants:

- A prompt has the ids that the template gives.
- The ids after a turn (`suffix`) depend only on the new messages. They are the template's text after a synthetic turn
  that made the same calls, so their cost does not depend on the length of the conversation, and sampled ids are never
  rendered again.
- A turn ends with a control token, and the text is encoded from that token on, so no merge of the tokenizer can cross
  the boundary. This is verified when the renderer is created.
- The text of a tool never becomes a control token.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal

from toolroll.rollout.chat.call_forms import FORMS
from toolroll.rollout.chat.model_files import read_model_file
from toolroll.rollout.chat.parsed_turn import ParsedTurn, Tools, as_object, convert_arguments
from toolroll.rollout.chat.tool_prompt import with_tool_prompt
from toolroll.rollout.chat.turn_parser import HarmonyParser, MarkedTurnParser, TurnParser
from toolroll.rollout.chat.turn_text import TurnText
from toolroll.rollout.chat.vocabulary import Vocabulary
from toolroll.schemas import JsonDict

ChatMessage = Mapping[str, Any]

CHATML_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""ChatML, for tokenizers without a template. It needs a tool prompt."""

QUESTION, ANSWER, RESULT, DESCRIPTION, REASONING = "QXQ", "ZXZ", "RXR", "DXD", "TXT"
"""Words that no template contains."""
PROBE_TOOLS: list[JsonDict] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": DESCRIPTION,
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "Program to run."},
                    "count": {"type": "integer", "description": "Number of runs."},
                    "options": {"type": "object", "description": "Other settings."},
                    "flags": {"type": "array", "description": "More settings.", "items": {"type": "string"}},
                },
                "required": [],
            },
        },
    }
    for name in ("run_code", "look_up")
]
PROBE_CALLS: dict[str, list[tuple[str, JsonDict]]] = {
    "single": [("run_code", {"code": "print(1)"})],
    "parallel": [("run_code", {"code": "print(1)"}), ("look_up", {"code": "x", "count": 2})],
    "nested": [("run_code", {"options": {"a": [1, {"b": None}], "c": "d"}, "flags": ["e", "f"], "count": -3})],
    "unicode": [("look_up", {"code": 'é "你好" \\ 🎉\n\tif a < b && c > d:\n\n    pass'})],
    "empty": [("run_code", {})],
}
"""Calls that must be read back as they are rendered."""
MAX_FRAMES = 4096
"""Maximum number of frames that are kept. Ids of calls repeat between trajectories."""
PROMPT_TAIL_TOKENS = 16
"""Number of tokens at the end of the prompt that are searched for an open reasoning block."""
_USER: JsonDict = {"role": "user", "content": QUESTION}


class TemplateError(Exception):
    """A template cannot be used for tool calling. The message describes what is wrong with it."""


@dataclass(frozen=True)
class _TurnEnd:
    """The control token that ends an assistant turn."""

    token: str
    token_id: int


class TemplateRenderer:
    """Renders with a Jinja template.

    Args:
        vocabulary: Vocabulary of the tokenizer.
        chat_template: Template to use in place of the tokenizer's.
        settings: Variables of the template.
        tool_prompt: "hermes" if the system message shows the tools, because the template does not.

    Raises:
        TemplateError: If the template does not show calls or responses, writes calls in an unknown form, or does not
            end a turn with a control token.

    Attributes:
        stop_ids: Ids that end an assistant turn.
        shows_reasoning: True if the template shows the reasoning of the turns since the last user message.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        chat_template: str | None = None,
        settings: Mapping[str, Any] | None = None,
        tool_prompt: Literal["hermes"] | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self._template = chat_template
        self._settings = dict(settings or {})
        self._secret = secrets.token_hex(8)
        """Text that no tool can print."""
        self._sentinel = f"{ANSWER}{secrets.token_hex(8)}"
        """Text of the synthetic turn, likewise."""
        self._has_tool_prompt = tool_prompt is not None
        self._arguments_as_text = False
        self._empty_content: str | None = ""
        self._named_ids = False
        if not self._has_tool_prompt:
            self._find_call_style()
        self.parser = self._find_parser()
        self._turn_end = self._find_turn_end()
        self._call_end = self._turn_end if self._has_tool_prompt else self._find_call_end()
        tokenizer = vocabulary.tokenizer
        ends = (self._call_end.token_id, self._turn_end.token_id, tokenizer.eos_token_id, *_configured_ends(tokenizer))
        self.stop_ids = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
        self.shows_reasoning = self._has_tool_prompt or self._shows_reasoning()
        self._encodes_in_parts = self._does_encode_in_parts()
        self._suffix_needs_tools = self._does_suffix_need_tools()
        self._frames: dict[Any, list[str] | None] = {}
        """Text around responses, by their names and ids."""

    def text(
        self, messages: Sequence[ChatMessage], tools: Tools | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the output of the template."""
        if self._has_tool_prompt:
            messages = with_tool_prompt(
                messages, tools or (), self._default_system, has_system_role=self._has_system_role
            )
            tools = None
        return self._apply(list(map(self._in_call_style, messages)), tools, add_generation_prompt=add_generation_prompt)

    def render_ids(
        self, messages: Sequence[ChatMessage], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Render a conversation and return its ids."""
        return self._encode(
            messages, lambda shown: self.text(shown, tools, add_generation_prompt=add_generation_prompt)
        )

    def suffix(
        self, prompt: Sequence[int], sampled: Sequence[int], new: Sequence[ChatMessage], tools: Tools
    ) -> list[int]:
        """Return the ids after a sampled turn: its end if missing, the new messages, the header of the next turn.

        Args:
            prompt: Prompt of the turn, which the ids do not depend on.
            sampled: Ids of the turn.
            new: Messages after it.
            tools: Tool schemas.

        Returns:
            The ids.

        Raises:
            Exception: If the template rejects the messages.
        """
        end = self._call_end if self._has_responses(new) else self._turn_end
        names = [str(tool.get("function", tool).get("name")) for tool in tools] or ["unknown"]
        new = [_with_known_name(message, names) for message in new]
        ids = self._encode(new, lambda shown: self._suffix_text(shown, tools))
        return ids[1:] if len(sampled) and sampled[-1] == end.token_id else ids

    def parse(self, ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int]) -> ParsedTurn:
        """Parse the ids sampled after a prompt, up to the first stop token."""
        end = next((index for index, token_id in enumerate(ids) if token_id in self.stop_ids), len(ids))
        prompt_tail = self.vocabulary.decode(prompt_ids[-PROMPT_TAIL_TOKENS:]) if len(prompt_ids) else ""
        return self.parser.parse(TurnText.decode(self.vocabulary, ids[:end]), prompt_tail, tools)

    def _has_responses(self, messages: Sequence[ChatMessage]) -> bool:
        return not self._has_tool_prompt and any(message.get("role") == "tool" for message in messages)

    def _suffix_text(self, new: Sequence[ChatMessage], tools: Tools) -> str:
        """Return the text from the end of a synthetic turn on. The text around responses is rendered once."""
        contents = [message.get("content") for message in new]
        are_responses = all(message.get("role") == "tool" for message in new)
        if self._suffix_needs_tools or not are_responses or not all(isinstance(text, str) for text in contents):
            return self._render_suffix(new, tools)
        key = tuple((message.get("name"), message.get("tool_call_id")) for message in new)
        if key not in self._frames:
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            self._frames[key] = self._find_frame(new)
        frame = self._frames[key]
        if frame is None:
            return self._render_suffix(new, None)
        return "".join(part for pair in zip(frame, [*map(str, contents), ""], strict=True) for part in pair)

    def _find_frame(self, new: Sequence[ChatMessage]) -> list[str] | None:
        """Return the text before, between and after responses, or None if the template changes their text."""

        def render(contents: Sequence[str]) -> str:
            messages = [{**message, "content": text} for message, text in zip(new, contents, strict=True)]
            return self._render_suffix(messages, None)

        marks = [f"{self._secret}{index}x" for index in range(len(new))]
        frame = re.split("|".join(marks), render(marks))
        if len(frame) != len(new) + 1:
            return None
        for probe in ("", ' "a"\n<b>&\\ é\n', '{"a": [1]}'):
            contents = [probe] * len(new)
            if render(contents) != "".join(part for pair in zip(frame, [*contents, ""], strict=True) for part in pair):
                return None
        return frame

    def _render_suffix(self, new: Sequence[ChatMessage], tools: Tools | None) -> str:
        """Render a conversation with a synthetic turn, and return the text from the end of that turn on."""
        end = self._turn_end
        turns: list[JsonDict] = [{"role": "assistant", "content": self._sentinel}]
        if self._has_responses(new):
            end = self._call_end
            responses = [message for message in new if message.get("role") == "tool"]
            # Some templates reject several calls, but no template rejects several responses.
            turns = [self._synthetic_turn(calls) for calls in (responses, responses[-1:])]
        text = None
        for turn in turns[:-1]:
            with contextlib.suppress(Exception):
                text = self.text([_USER, turn, *new], tools, add_generation_prompt=True)
        if text is None:
            text = self.text([_USER, turns[-1], *new], tools, add_generation_prompt=True)
        return text[text.index(end.token, text.rindex(self._sentinel)) :]

    def _encode(self, messages: Sequence[ChatMessage], render: Callable[[list[ChatMessage]], str]) -> list[int]:
        """Render messages and return the ids of the result, in which the text of tools is text."""
        literals: dict[str, str] = {}
        text = render([self._protect(message, literals) for message in messages])
        is_changed = any(placeholder not in text for placeholder in literals)  # the template changes the text of tools
        if literals and (is_changed or not self._encodes_in_parts):
            literals = {}
            text = render([map_tool_text(message, self.vocabulary.break_control_tokens) for message in messages])
        return self.vocabulary.encode_template(text, literals)

    def _protect(self, message: ChatMessage, literals: dict[str, str]) -> ChatMessage:
        """Replace text of a tool that spells a control token by placeholders."""

        def protect(text: str) -> str:
            return self.vocabulary.control_token_pattern.sub(lambda found: placeholder(found[0]), text)

        def placeholder(character: str) -> str:
            key = f"\ue0f0{self._secret}{ord(character)}\ue0f1"
            literals[key] = character
            return key

        return map_tool_text(message, protect)

    def _apply(self, messages: Sequence[ChatMessage], tools: Tools | None, *, add_generation_prompt: bool) -> str:
        rendered = self.vocabulary.tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._settings,
        )
        return str(rendered)

    def _synthetic_turn(self, responses: Sequence[ChatMessage]) -> JsonDict:
        """Return a turn that made the calls which the responses answer."""
        calls = [(response["name"], {"code": self._sentinel}) for response in responses]
        turn = turn_of(calls, named_ids=self._named_ids)
        if not self._named_ids:
            for call, response in zip(turn["tool_calls"], responses, strict=True):
                call["id"] = response.get("tool_call_id") or call["id"]
        return turn

    def _in_call_style(self, message: ChatMessage) -> JsonDict:
        """Return a message with arguments and empty text as the template expects them."""

        def convert(arguments: Any) -> Any:
            parsed = as_object(arguments)
            if self._arguments_as_text:
                return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return arguments if parsed is None else parsed

        converted = convert_arguments(message, convert)
        if converted.get("tool_calls") and not converted.get("content"):
            converted["content"] = self._empty_content
        return converted

    # What is found by probes

    def _find_call_style(self) -> None:
        """Find how the template expects ids, arguments (objects or text) and the text of a turn without text."""
        error: object = None
        visible: set[str] = set()
        for style in product((False, True), (False, True), ("", None)):
            self._named_ids, self._arguments_as_text, self._empty_content = style
            turn = turn_of(PROBE_CALLS["single"], named_ids=self._named_ids)
            result = {"role": "tool", "content": RESULT, **link_to_call(turn)}
            try:
                text = self.text([_USER, turn, result], PROBE_TOOLS, add_generation_prompt=True)
            except Exception as raised:  # a template may reject any conversation
                error = error or raised
                continue
            visible |= {part for part in (RESULT, DESCRIPTION) if part in text}
            call = text[text.rfind(QUESTION) : text.rfind(RESULT)]
            if {RESULT, DESCRIPTION} <= visible and "run_code" in call and "print(1)" in call:
                return
        if not visible and error:
            raise TemplateError(f"it rejects a conversation with a tool call: {str(error).rstrip('.'):.200}")
        if DESCRIPTION not in visible:
            raise TemplateError("it does not show the tools")
        raise TemplateError(f"it does not show tool {'calls' if RESULT in visible else 'responses'}")

    def _try(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = False) -> str | None:
        """Return the text of a probe, or None if the template rejects it."""
        try:
            return self.text(messages, PROBE_TOOLS, add_generation_prompt=add_generation_prompt)
        except Exception:  # a template may raise anything
            return None

    def _find_parser(self) -> TurnParser:
        parsers: list[TurnParser] = [MarkedTurnParser(form) for form in FORMS]
        if self._has_tool_prompt:
            return parsers[0]
        parsers.insert(0, HarmonyParser())
        rendered = {name: text for name, calls in PROBE_CALLS.items() if (text := self._render_turn(calls)) is not None}
        turns = {
            name: TurnText.decode(self.vocabulary, self.vocabulary.encode_template(t)) for name, t in rendered.items()
        }
        best = max(
            parsers, key=lambda parser: sum(self._reads_back(parser, name, turn) for name, turn in turns.items())
        )
        if not turns or not all(self._reads_back(best, name, turn) for name, turn in turns.items()):
            example = next(iter(rendered.values()), "").strip()
            raise TemplateError(f"it writes tool calls in an unknown form: {example[:200]!r}")
        return best

    def _reads_back(self, parser: TurnParser, name: str, turn: TurnText) -> bool:
        """Return True if a parser reads the probe calls of a rendered turn."""
        parsed = parser.parse(turn, "", PROBE_TOOLS)
        return [(call.name, call.arguments, call.problem) for call in parsed.calls] == [
            (tool, arguments, None) for tool, arguments in PROBE_CALLS[name]
        ]

    def _render_turn(self, calls: list[tuple[str, JsonDict]]) -> str | None:
        """Return the text of a turn with calls, including its header, or None if the template rejects the calls."""
        before, text = self._try([_USER]), self._try([_USER, turn_of(calls, named_ids=self._named_ids)])
        if before is None or text is None:
            return None
        text = text[common_length(before, text) :]
        return text if all(name in text for name, _ in calls) else None

    def _find_turn_end(self) -> _TurnEnd:
        """Return the control token after a turn with text. Some templates write it only if another message follows."""
        turn = {"role": "assistant", "content": ANSWER}
        for following in ([], [_USER]):
            text = self._try([_USER, turn, *following])
            end = self._control_token_after(text, text.rindex(ANSWER)) if text and ANSWER in text else None
            if end is not None:
                return end
        raise TemplateError("it does not end an assistant turn with a control token")

    def _find_call_end(self) -> _TurnEnd:
        """Return the control token after a turn with a call that has been answered."""
        turn = turn_of(PROBE_CALLS["single"], named_ids=self._named_ids)
        result = {"role": "tool", "content": RESULT, **link_to_call(turn)}
        text = self._try([_USER, turn, result], add_generation_prompt=True) or ""
        rendered = TurnText.decode(self.vocabulary, self.vocabulary.encode_template(text))
        end = self._control_token_after(text, self.parser.find_calls_end(rendered, text.rindex(QUESTION), PROBE_TOOLS))
        if end is None:
            raise TemplateError("it does not end a turn with tool calls with a control token")
        return end

    def _control_token_after(self, text: str, position: int) -> _TurnEnd | None:
        found = self.vocabulary.control_token.search(text, position)
        if found is None:
            return None
        end = _TurnEnd(found[0], self.vocabulary.control_tokens[found[0]])
        self._check_token_boundary(end, text[found.end() :])
        return end

    def _check_token_boundary(self, end: _TurnEnd, after: str) -> None:
        """Verify that the ids from the control token on do not depend on the text before it."""
        encode = self.vocabulary.encode_template
        for following in (after[:20] + "user", "\n", " x", "x"):
            expected = encode(end.token + following)
            for before in ("x", "x ", "x\n", "}", "é", end.token):
                if encode(before + end.token + following)[-len(expected) :] != expected or expected[0] != end.token_id:
                    raise TemplateError(f"the tokenizer merges the end of a turn, {end.token!r}, with other text")

    def _shows_reasoning(self) -> bool:
        """Return False if the template removes the reasoning from a turn whose calls have just been answered."""
        turn = turn_of(PROBE_CALLS["single"], named_ids=self._named_ids)
        new = {"role": "tool", "content": RESULT, **link_to_call(turn)}
        removed = False
        for reasoning in (
            {"reasoning_content": REASONING, "thinking": REASONING},
            {"content": f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"},
        ):
            text = self._try([_USER, {**turn, **reasoning}, new], add_generation_prompt=True) or ""
            if REASONING in text:
                return True
            removed = ANSWER in text  # some templates show no text at all in a turn with calls
        return not removed

    def _does_encode_in_parts(self) -> bool:
        """Return False if the tokenizer encodes text after a control token differently than text alone."""
        text = self._try([_USER], add_generation_prompt=True) or ""
        return self.vocabulary.encode_template(text, {self._sentinel: ""}) == self.vocabulary.encode_template(text)

    def _does_suffix_need_tools(self) -> bool:
        """Return False if the text after a turn does not depend on the tools, as in most templates."""
        turns = [turn_of(PROBE_CALLS[name], named_ids=self._named_ids) for name in ("single", "unicode")]
        responses = [{"role": "tool", "content": RESULT, **link_to_call(turn)} for turn in turns]
        try:
            return any(
                self._render_suffix(new, None) != self._render_suffix(new, PROBE_TOOLS)
                for new in (responses[:1], responses)
            )
        except Exception:  # a template may reject any conversation
            return True

    @cached_property
    def _has_system_role(self) -> bool:
        try:
            system = {"role": "system", "content": ANSWER}
            return ANSWER in self._apply([system, _USER], None, add_generation_prompt=True)
        except Exception:  # a template may reject any conversation
            return False

    @cached_property
    def _default_system(self) -> str | None:
        """System message that the template adds to a conversation without one."""
        if not self._has_system_role:
            return None
        given = self._apply([{"role": "system", "content": ANSWER}, _USER], None, add_generation_prompt=True)
        default = self._apply([_USER], None, add_generation_prompt=True)
        before, _, after = given.partition(ANSWER)
        is_added = default.startswith(before) and default.endswith(after) and len(default) > len(before) + len(after)
        return default[len(before) : len(default) - len(after)].strip() if is_added else None


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common start of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


def _configured_ends(tokenizer: Any) -> list[int]:
    """Return the stop tokens in the model's generation_config.json, with which engines end a turn as well."""
    ends = read_model_file(tokenizer, "generation_config.json").get("eos_token_id")
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def turn_of(calls: Sequence[tuple[str, JsonDict]], *, named_ids: bool = False) -> JsonDict:
    """Return an assistant message with calls. Kimi's ids contain the name; Mistral's have nine letters and digits."""
    tool_calls = [
        {
            "id": f"functions.{name}:{index}" if named_ids else f"call{index:05d}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def link_to_call(turn: JsonDict) -> JsonDict:
    """Return the fields of a response that link it to the last call of a turn."""
    call = turn["tool_calls"][-1]
    return {"name": call["function"]["name"], "tool_call_id": call["id"]}


def _with_known_name(message: ChatMessage, names: Sequence[str]) -> ChatMessage:
    """Return a message in which a response has the name of a tool. A name that the model made up is not shown."""
    if message.get("role") != "tool" or message.get("name") in names:
        return message
    return {**message, "name": names[0]}


def map_tool_text(message: ChatMessage, convert: Callable[[str], str]) -> ChatMessage:
    """Return a message in which `convert` is applied to the text, if it is a tool response."""
    if message.get("role") != "tool":
        return message
    content = message.get("content")
    if isinstance(content, list):
        parts = [{**part, "text": convert(part["text"])} if "text" in part else part for part in content]
        return {**message, "content": parts}
    return {**message, "content": convert(content or "")}
