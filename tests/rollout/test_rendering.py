"""Rendering, parsing and bridging of every format that loads offline, and the detection of formats."""

import logging
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.base import MODEL_RENDERER_MAP, RenderedTokens
from strategies import scaled

from rollout.small_tokenizer import CHATML_TEMPLATE, FAMILIES, FAMILY_MARKERS, MARKERS, make
from rollout.test_hermes import CALL, DEEP, TEMPLATE, TEXTS, TOOLS
from toolroll.errors import ConfigError, MissingExtra
from toolroll.rollout.chat.families import FamilyRenderer
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.parsed_turn import ParsedTurn
from toolroll.rollout.chat.rendering import Rendering, to_plain
from toolroll.rollout.chat.template import TemplateRenderer
from toolroll.rollout.chat.vocabulary import Vocabulary
from toolroll.schemas import FunctionCall, Message, ToolCall

ALL = sorted(set(MODEL_RENDERER_MAP.values()))
NEEDS_NETWORK = {"gpt-oss": "openai_harmony downloads its vocabulary"}
RERENDERED = {"deepseek-r1": "its template drops the reasoning of every turn but the last"}
OFFLINE = [name for name in ALL if name not in NEEDS_NETWORK]
TOKENIZER = make(FAMILIES, FAMILY_MARKERS, eos="<|endoftext|>")
VOCABULARY = Vocabulary(TOKENIZER)
QUESTION = "What is it?"
USER = Message(role="user", content=QUESTION)
ADD = ToolCall(id="functions.add:0", function=FunctionCall(name="add", arguments={"a": 1}))
ASSISTANT = Message(role="assistant", content="I see.", tool_calls=[ADD])


def load(name: str) -> Rendering:
    return load_rendering(TOKENIZER, name, needs_tools=False)


def vocabulary_of(rendering: Rendering) -> Vocabulary:
    renderer = rendering.renderer
    return renderer.vocabulary if isinstance(renderer, TemplateRenderer) else VOCABULARY


def response(text: str = "3", name: str | None = "add") -> Message:
    return Message(role="tool", content=text, name=name, tool_call_id="functions.add:0")


def sampled_by(rendering: Rendering, prompt: list[int]) -> list[int]:
    """Return the turn as the format renders it: the ids that a model samples."""
    if isinstance(rendering.renderer, TemplateRenderer):
        return rendering.renderer.vocabulary.encode_template(CALL)
    renderer = rendering.renderer._renderer  # type: ignore[attr-defined]
    rendered = renderer.render([to_plain(USER), to_plain(ASSISTANT)], tools=TOOLS)
    signs = zip(rendered.token_ids, rendered.sampled_mask, rendered.message_indices, strict=True)
    ids = [number for number, by_model, message in signs if by_model and message == 1]
    if rendering.decode(prompt).rstrip().endswith("<think>") and "</think>" not in rendering.decode(ids):
        ids = [*VOCABULARY.encode_template("</think>"), *ids]
    return ids


def messages_of_loop(parsed: ParsedTurn) -> tuple[Message, list[Message]]:
    """Return the assistant message and the tool responses. Calls without a name are in the text."""
    calls = [
        ToolCall(id=f"c{number}", function=FunctionCall(name=call.name, arguments=call.arguments or call.raw))
        for number, call in enumerate(parsed.calls)
        if call.name is not None
    ]
    text = parsed.content + "".join(call.raw for call in parsed.calls if call.name is None)
    assistant = Message(role="assistant", content=text, reasoning_content=parsed.reasoning, tool_calls=calls or None)
    new = [
        Message(role="tool", content="three", name=call.name, tool_call_id=f"c{number}")
        for number, call in enumerate(parsed.calls)
    ]
    return assistant, new or [Message(role="user", content="three")]


def test_all_families_are_covered() -> None:
    assert len(ALL) == 28
    assert len(OFFLINE) == 27


@pytest.mark.parametrize("name", ["chatml", *OFFLINE])
def test_render_parse_and_bridge(name: str) -> None:
    rendering = load(name)
    assert rendering.name == name
    assert all(0 <= number < rendering.vocab_size for number in rendering.stop_ids)
    prompt = rendering.prompt([USER], TOOLS)
    assert QUESTION in rendering.decode(prompt)
    assert "add" in rendering.decode(prompt) or name in ("deepseek-v3", "deepseek-r1"), "these formats show no tools"
    sampled = sampled_by(rendering, prompt)
    for end in ([], [number for number in rendering.stop_ids if rendering.decode([number]) == "<|observation|>"][:1]):
        turn = [*sampled, *end]
        parsed = rendering.parse(turn, tools=TOOLS, prompt_ids=array("q", prompt))
        assert [(call.name, call.arguments, call.problem) for call in parsed.calls] == [("add", {"a": 1}, None)]
        continuation = rendering.bridge(
            array("q", prompt), array("q", turn), [response("three")], messages=[USER, ASSISTANT], tools=TOOLS
        )
        assert continuation.rerendered == (name in RERENDERED)
        assert "three" in rendering.decode(continuation.ids)
        assert (QUESTION in rendering.decode(continuation.ids)) == continuation.rerendered


@pytest.mark.parametrize("name", NEEDS_NETWORK)
def test_unusable_format_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f"The chat format '{name}' cannot be used with this tokenizer"):
        load(name)


@pytest.mark.parametrize("name", ["chatml", "template", *OFFLINE])
@given(text=st.lists(st.sampled_from([*FAMILIES, *FAMILY_MARKERS]) | st.text(max_size=3), max_size=4).map("".join))
@settings(max_examples=scaled(25))
def test_tool_text_adds_no_control_tokens(name: str, text: str) -> None:
    rendering = CACHED[name]
    control_tokens = vocabulary_of(rendering).control_token_texts

    def control_tokens_for(content: str) -> list[int]:
        prompt = rendering.prompt([USER, ASSISTANT, response(content)], TOOLS)
        return [number for number in prompt if number in control_tokens]

    assert control_tokens_for(text) == control_tokens_for("x")


@pytest.mark.parametrize("name", ["chatml", "template", *OFFLINE])
@given(data=st.data())
@settings(max_examples=scaled(25))
def test_any_sampled_ids_can_be_parsed_and_bridged(name: str, data: Any) -> None:
    rendering = CACHED[name]
    prompt = rendering.prompt([USER], TOOLS)
    turn = sampled_by(rendering, prompt)
    kept = data.draw(st.integers(0, len(turn)))
    numbers = st.sampled_from(sorted(VOCABULARY.control_token_texts)) | st.integers(0, rendering.vocab_size - 1)
    spelled = rendering.encode(data.draw(TEXTS | st.sampled_from(['"\\ud800"', "[" * 3000, CALL[11:-12]])))
    sampled = [
        *turn[:kept],
        *data.draw(st.lists(numbers, max_size=4)),
        *spelled,
        *turn[data.draw(st.integers(0, kept)) :],
    ]
    parsed = rendering.parse(sampled, tools=TOOLS, prompt_ids=prompt)
    assert isinstance(parsed, ParsedTurn)
    assistant, new = messages_of_loop(parsed)
    continuation = rendering.bridge(prompt, sampled, new, messages=[USER, assistant], tools=TOOLS)
    assert "three" in rendering.decode(continuation.ids)
    assert (QUESTION in rendering.decode(continuation.ids)) == continuation.rerendered


CACHED = {name: load(name) for name in ["chatml", *OFFLINE]}
CACHED["template"] = load_rendering(TOKENIZER, "template", TEMPLATE)


# Finding a format


def test_template_without_tools_is_refused_with_a_remedy() -> None:
    tokenizer = make(chat_template=CHATML_TEMPLATE)
    with pytest.raises(ConfigError, match=r"does not show the tools\. Set tool_prompt: hermes"):
        load_rendering(tokenizer)
    rendering = load_rendering(tokenizer, tool_prompt="hermes")
    prompt = rendering.decode(rendering.prompt([USER], TOOLS))
    assert prompt.startswith("<|im_start|>system\nYou are small.\n\n# Tools\n"), "the default system message is kept"
    assert '{"name": "add"' in rendering.decode(rendering.prompt([USER, ASSISTANT], TOOLS))
    plain = load_rendering(tokenizer, needs_tools=False)
    assert plain.prompt([USER], []) == tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )


def test_template_without_system_messages_shows_tools_in_the_first_user_message() -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML_TEMPLATE
    rendering = load_rendering(make(chat_template=strict), tool_prompt="hermes")
    prompt = rendering.decode(rendering.prompt([USER], TOOLS))
    assert "<|im_start|>user\n# Tools" in prompt
    assert prompt.endswith(f"\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (TEMPLATE.replace("tool_calls", "no_calls"), "does not show tool calls"),
        (TEMPLATE.replace('response>\\n" + message.content +', 'response>\\n" +'), "does not show tool responses"),
        (TEMPLATE.replace("{{ tool | tojson }}", ""), "does not show the tools"),
        (TEMPLATE.replace('{"name": "', '{"tool": "'), "writes tool calls in an unknown form: '.*<tool_call>"),
        ("{{ raise_exception('Only on Sundays!') }}", "rejects a conversation with a tool call: Only on Sundays!"),
    ],
)
def test_template_that_would_lose_calls_is_refused(template: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"The model's chat template cannot be used: it {problem}"):
        load_rendering(make(chat_template=template))


def test_turn_must_end_with_a_control_token() -> None:
    with pytest.raises(ConfigError, match="does not end an assistant turn with a control token"):
        load_rendering(make(["<s>"], chat_template=TEMPLATE))


def test_family_is_found_by_model_type_if_there_is_no_template(tmp_path: Path) -> None:
    make(FAMILIES, FAMILY_MARKERS).save_pretrained(tmp_path / "checkpoint-200")
    with pytest.raises(ConfigError, match=r"the tokenizer has none\. Pass a chat_template"):
        load_rendering(tmp_path / "checkpoint-200")
    (tmp_path / "checkpoint-200" / "config.json").write_text('{"model_type": "minimax_m2"}')
    assert load_rendering(tmp_path / "checkpoint-200").name == "minimax-m2"


def test_requested_format_that_shows_no_tools_is_refused() -> None:
    with pytest.raises(ConfigError, match="'deepseek-r1' does not fit the model: tools: the prompt does not show the"):
        load_rendering(TOKENIZER, "deepseek-r1")


def test_requested_format_may_differ_from_the_template(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make(FAMILIES, FAMILY_MARKERS, chat_template=TEMPLATE)
    assert load_rendering(tokenizer, "qwen3").name == "qwen3"
    assert "chat format qwen3: prompts differ from the chat template: question" in caplog.text


def test_chatml_needs_no_template() -> None:
    rendering = load_rendering(make(), "chatml")
    prompt = rendering.decode(rendering.prompt([USER], []))
    assert prompt == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert "<|im_start|>system\n# Tools" in rendering.decode(rendering.prompt([USER], TOOLS))


# Thinking


THINKING = TEMPLATE.replace(
    '{{- "<|im_start|>assistant" }}',
    '{{- "<|im_start|>assistant" }}{% if message.reasoning_content %}'
    "{{ '\n<think>\n' + message.reasoning_content + '\n</think>' }}{% endif %}",
)
STRIPPING = TEMPLATE.replace(
    'if message.content %}{{ "\\n" + message.content }}',
    'if message.content %}{{ "\\n" + message.content.split("</think>")[-1] }}',
)


@pytest.mark.parametrize(
    ("template", "thinking", "kept"),
    [
        (TEMPLATE, None, True),
        (THINKING, None, True),
        (STRIPPING, None, False),
        (THINKING, "strip", False),
        (STRIPPING, "keep", True),
    ],
    ids=["no reasoning", "shown", "stripped", "shown, asked to strip", "stripped, asked to keep"],
)
def test_thinking_is_kept_as_the_template_does_or_as_asked(template: str, thinking: Any, kept: bool) -> None:
    rendering = load_rendering(make(markers=MARKERS, chat_template=template), thinking=thinking)
    assert rendering.keeps_thinking == kept
    assert isinstance(rendering.renderer, TemplateRenderer)
    prompt = rendering.prompt([USER], TOOLS)
    sampled = rendering.renderer.vocabulary.encode_template(f"<think>\nHm.\n</think>\n\n{CALL}<|im_end|>")
    parsed = rendering.parse(sampled, tools=TOOLS, prompt_ids=prompt)
    assistant, new = messages_of_loop(parsed)
    step = rendering.bridge(prompt, sampled, new, messages=[USER, assistant], tools=TOOLS)
    assert step.rerendered != kept
    if not kept:
        assert "Hm." not in rendering.decode(step.ids)
        assert "three" in rendering.decode(step.ids)


def test_rendering_again_keeps_ids_that_are_a_prefix_anyway() -> None:
    rendering = load_rendering(make(markers=MARKERS, chat_template=TEMPLATE), thinking="strip")
    assert isinstance(rendering.renderer, TemplateRenderer)
    prompt = rendering.prompt([USER], TOOLS)
    sampled = rendering.renderer.vocabulary.encode_template(f"{CALL}<|im_end|>")
    assistant, new = messages_of_loop(rendering.parse(sampled, tools=TOOLS, prompt_ids=prompt))
    step = rendering.bridge(prompt, sampled, new, messages=[USER, assistant], tools=TOOLS)
    assert not step.rerendered


def test_tokenizer_is_loaded_from_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(chat_template=TEMPLATE).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "toolroll"):
        rendering = load_rendering(tmp_path)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "chat format template (found by its template)"
    ]
    assert rendering.decode(rendering.stop_ids[:1]) == "<|im_end|>"


@pytest.mark.parametrize(
    ("tokenizer", "name", "message"),
    [
        ("/nowhere/at/all", None, r"The model's directory does not exist: /nowhere/at/all\."),
        ("nobody/nothing", None, r"Cannot load a tokenizer from 'nobody/nothing'.*hf download"),
        (make(), "chatlm", r"Unknown chat format 'chatlm' \(did you mean 'chatml'\?\)"),
        (make(), "zzz", r"Unknown chat format 'zzz'. Available formats: chatml, "),
        (make(), "qwen3", r"'qwen3' cannot be used with this tokenizer.*tool_call"),
        (make(), "no.such.Renderer", r"'no.such.Renderer' cannot be used.*No module named 'no'"),
        (make(), "template", "the tokenizer has none. Pass a chat_template"),
        (make(["<s>"]), None, "the tokenizer has none. Pass a chat_template"),
        (make(["<s>"]), "chatml", r"no tokens <\|im_end\|> and <\|im_start\|>"),
        (object(), None, "Expected a tokenizer of transformers"),
    ],
)
def test_invalid_tokenizer_or_format_is_rejected(tokenizer: Any, name: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rendering(tokenizer, name)


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(MissingExtra, match=r"renderers.*toolroll\[rollout\]"):
        load("chatml")


def test_settings_reach_template_and_renderer() -> None:
    template = TEMPLATE + "{{ 'loud' if shout else 'quiet' }}"
    loud = load_rendering(make(chat_template=template), chat_template_kwargs={"shout": True})
    assert loud.decode(loud.prompt([USER], [])).endswith("loud")
    plain = load("qwen3")
    quick = load_rendering(TOKENIZER, "qwen3", chat_template_kwargs={"enable_thinking": False})
    assert "</think>" in quick.decode(quick.prompt([USER], []))
    assert "</think>" not in plain.decode(plain.prompt([USER], []))
    with pytest.raises(ConfigError, match="ChatML has no settings, got chat_template_kwargs: shout"):
        load_rendering(make(), "chatml", chat_template_kwargs={"shout": True})
    with pytest.raises(ConfigError, match=r"'qwen3' cannot be used(.|\n)*enable_thinkin"):
        load_rendering(TOKENIZER, "qwen3", chat_template_kwargs={"enable_thinkin": True})


def test_rejected_conversation_is_reported() -> None:
    picky = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No tools!') }}{% endif %}{% endfor %}"
    )
    rendering = load_rendering(make(chat_template=picky + CHATML_TEMPLATE), needs_tools=False)
    with pytest.raises(ConfigError, match=r"'template' cannot render this conversation \(user, system\): No tools!"):
        rendering.prompt([USER, Message(role="system", content="")], [])
    with pytest.raises(ConfigError, match="at least one message"):
        rendering.prompt([], [])


# Rejected input


def test_invalid_arguments_do_not_break_rendering() -> None:
    strict = CHATML_TEMPLATE.replace(
        "{{ '<|im_start|>'",
        "{% for c in message.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{% endfor %}{% endfor %}"
        "{{ '<|im_start|>'",
    )
    template = load_rendering(make(chat_template=strict), needs_tools=False)
    for rendering in (template, CACHED["gemma4"], CACHED["inkling"]):
        for arguments in ('{"a": 1}', '{"a": ', "[1]", "[" * 3000, DEEP):
            call = ToolCall(id="c", function=FunctionCall(name="add", arguments=arguments))
            assistant = Message(role="assistant", content="", tool_calls=[call])
            new = [Message(role="tool", content="three", name="add", tool_call_id="c")]
            continuation = rendering.bridge(
                rendering.prompt([USER], []), [5], new, messages=[USER, assistant], tools=[]
            )
            assert "three" in rendering.decode(continuation.ids)


def test_response_to_unreadable_call_is_rendered() -> None:
    assistant = Message(role="assistant", content="call:?")
    for name in OFFLINE:
        continuation = CACHED[name].bridge(
            [5], [6], [response("three", name=None)], messages=[USER, assistant], tools=TOOLS
        )
        assert "three" in CACHED[name].decode(continuation.ids)


class FakeRenderer:
    """A renderer with a given result of its bridge."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def get_stop_token_ids(self) -> list[int]:
        return [7]

    def render_ids(self, *_: Any, **__: Any) -> list[int]:
        return [9, 9]

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result and RenderedTokens(token_ids=self.result)


@pytest.mark.parametrize(
    ("result", "ids"),
    [
        ([1, 2, 7, 5, 6], [5, 6]),
        ([1, 2, 5, 6], None),
        ([1, 3, 7, 5, 6], None),
        ([1, 2, 7], None),
        (None, None),
        (ValueError("caused by the model"), None),
    ],
)
def test_result_of_bridge_is_verified(result: Any, ids: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renderers.base.create_renderer", lambda *_: FakeRenderer(result))
    rendering = Rendering("fake", FamilyRenderer(VOCABULARY, "qwen3", {}), VOCABULARY)
    continuation = rendering.bridge(array("q", [1]), array("q", [2, 7]), [response()], messages=[USER], tools=[])
    assert (continuation.ids, continuation.rerendered) == ((ids, False) if ids else ([9, 9], True))


# Concurrency and isolation


def test_threads_can_share_a_rendering() -> None:
    rendering = CACHED["chatml"]
    texts = [f"{number} <|im_end|> <tool_call> {'x ' * number}" for number in range(200)]

    def convert(text: str) -> tuple[list[int], str, list[int]]:
        ids = rendering.encode(text)
        return ids, rendering.decode(ids), rendering.prompt([Message(role="user", content=text)], TOOLS)

    expected = [convert(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(convert, texts * 3)) == expected * 3
    assert [text for _, text, _ in expected] == texts


def test_tokenizer_settings_of_others_have_no_effect() -> None:
    tokenizer = make()
    expected = load_rendering(tokenizer, "chatml").prompt([USER], TOOLS)
    tokenizer("some text", truncation=True, max_length=2)
    rendering = load_rendering(tokenizer, "chatml")
    tokenizer("some text", truncation=True, max_length=3)
    assert rendering.prompt([USER], TOOLS) == expected


def test_slow_tokenizer_keeps_text_as_text() -> None:
    class Slow:
        """A tokenizer without the fast backend."""

        def __init__(self) -> None:
            self._inner = make(markers=MARKERS)

        def __getattr__(self, name: str) -> Any:
            if name == "backend_tokenizer":
                raise AttributeError(name)
            return getattr(self._inner, name)

    vocabulary = Vocabulary(Slow())
    text = "a<|im_end|>b<tool_call><|im_<|im_end|>end|>\ud800"
    ids = vocabulary.encode(text)
    assert not set(ids) & set(vocabulary.control_token_texts)
    assert vocabulary.decode(ids) == text.replace("\ud800", "\ufffd")
    assert vocabulary.control_tokens["<tool_call>"] in vocabulary.encode_template(text)
    assert vocabulary.decode([*ids, -1, 10**12]) == vocabulary.decode(ids)
