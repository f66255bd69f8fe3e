"""Every format that loads without a network, all the way: render, sample, parse, go on; and how a format is found."""

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

from rollout.small_tokenizer import CHATML_TEMPLATE, FAMILIES, FAMILY_MARKERS, MARKERS, make
from rollout.test_chatml import CALL, DEEP, TEMPLATE, TEXTS, TOOLS
from toolroll.errors import ConfigError, MissingExtra
from toolroll.rollout.chatml import ChatMLRenderer
from toolroll.rollout.formats import load_rendering
from toolroll.rollout.rendering import Parsed, Rendering
from toolroll.schemas import FunctionCall, Message, ToolCall

ALL = sorted(set(MODEL_RENDERER_MAP.values()))
NEED_THE_NETWORK = {"gpt-oss": "openai_harmony downloads its vocabulary"}
WRITTEN_ANEW = {"deepseek-r1": "its template drops the reasoning of every turn but the last"}
OFFLINE = [name for name in ALL if name not in NEED_THE_NETWORK]
TOKENIZER = make(FAMILIES, FAMILY_MARKERS, eos="<|endoftext|>")
ASKED = "What is it?"
USER = Message(role="user", content=ASKED)
ADD = ToolCall(id="functions.add:0", function=FunctionCall(name="add", arguments={"a": 1}))
OWN = Message(role="assistant", content="I see.", tool_calls=[ADD])


def load(name: str) -> Rendering:
    return load_rendering(TOKENIZER, name)


def answer(text: str = "3", name: str | None = "add") -> Message:
    return Message(role="tool", content=text, name=name, tool_call_id="functions.add:0")


def sampled_by(rendering: Rendering, prompt: list[int]) -> list[int]:
    """The turn as the format itself would write it: what its renderer says that a model samples."""
    renderer = rendering._renderer
    rendered = renderer.render([rendering._plain(USER), rendering._plain(OWN)], tools=TOOLS)
    signs = zip(rendered.token_ids, rendered.sampled_mask, rendered.message_indices, strict=True)
    ids = [number for number, by_model, message in signs if by_model and message == 1]
    if rendering.decode(prompt).rstrip().endswith("<think>") and "</think>" not in rendering.decode(ids):
        ids = [*rendering._vocabulary.encode_template("</think>"), *ids]
    return ids


def as_the_loop_does(parsed: Parsed) -> tuple[Message, list[Message]]:
    """The model's message and the answers to its calls; those that have no name are in its text."""
    calls = [
        ToolCall(id=f"c{number}", function=FunctionCall(name=call.name, arguments=call.arguments or call.raw))
        for number, call in enumerate(parsed.calls)
        if call.name is not None
    ]
    text = parsed.content + "".join(call.raw for call in parsed.calls if call.name is None)
    own = Message(role="assistant", content=text, reasoning_content=parsed.reasoning, tool_calls=calls or None)
    new = [
        Message(role="tool", content="three", name=call.name, tool_call_id=f"c{number}")
        for number, call in enumerate(parsed.calls)
    ]
    return own, new or [Message(role="user", content="three")]


def test_all_families_are_here() -> None:
    assert len(ALL) == 28
    assert len(OFFLINE) == 27


@pytest.mark.parametrize("name", ["chatml", *OFFLINE])
def test_render_sample_parse_and_go_on(name: str) -> None:
    rendering = load(name)
    assert rendering.name == name
    assert all(0 <= number < rendering.vocab_size for number in rendering.stop_ids)
    prompt = rendering.prompt([USER], TOOLS)
    assert ASKED in rendering.decode(prompt)
    assert "add" in rendering.decode(prompt) or name in ("deepseek-v3", "deepseek-r1"), "they show no tools"
    sampled = sampled_by(rendering, prompt)
    for end in ([], [number for number in rendering.stop_ids if rendering.decode([number]) == "<|observation|>"][:1]):
        wrote = [*sampled, *end]
        parsed = rendering.parse(wrote, tools=TOOLS, prompt_ids=array("q", prompt))
        assert [(call.name, call.arguments, call.problem) for call in parsed.calls] == [("add", {"a": 1}, None)]
        on = rendering.go_on(
            array("q", prompt), array("q", wrote), [answer("three")], messages=[USER, OWN], tools=TOOLS
        )
        assert on.rerendered == (name in WRITTEN_ANEW)
        assert "three" in rendering.decode(on.ids)
        assert (ASKED in rendering.decode(on.ids)) == on.rerendered


@pytest.mark.parametrize("name", NEED_THE_NETWORK)
def test_a_format_that_cannot_be_had_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"The format '{name}' can't be had with this tokenizer"):
        load(name)


@pytest.mark.parametrize("name", ["chatml", "template", *OFFLINE])
@given(text=st.lists(st.sampled_from([*FAMILIES, *FAMILY_MARKERS]) | st.text(max_size=3), max_size=4).map("".join))
@settings(max_examples=25)
def test_no_tools_text_becomes_a_mark(name: str, text: str) -> None:
    rendering = CACHED[name]
    marks = set(rendering._vocabulary.marks.values())

    def marked(content: str) -> list[int]:
        prompt = rendering.prompt([USER, OWN, answer(content)], TOOLS)
        return [number for number in prompt if number in marks]

    assert marked(text) == marked("x")


@pytest.mark.parametrize("name", ["chatml", "template", *OFFLINE])
@given(data=st.data())
@settings(max_examples=25)
def test_whatever_was_sampled_it_can_be_read_and_gone_on_from(name: str, data: Any) -> None:
    rendering = CACHED[name]
    prompt = rendering.prompt([USER], TOOLS)
    turn = sampled_by(rendering, prompt) if name != "template" else rendering._vocabulary.encode_template(CALL)
    cut = data.draw(st.integers(0, len(turn)))
    numbers = st.sampled_from(sorted(rendering._vocabulary.marks.values())) | st.integers(0, rendering.vocab_size - 1)
    spelled = rendering.encode(data.draw(TEXTS | st.sampled_from(['"\\ud800"', "[" * 3000, CALL[11:-12]])))
    sampled = [
        *turn[:cut],
        *data.draw(st.lists(numbers, max_size=4)),
        *spelled,
        *turn[data.draw(st.integers(0, cut)) :],
    ]
    parsed = rendering.parse(sampled, tools=TOOLS, prompt_ids=prompt)
    assert isinstance(parsed, Parsed)
    own, new = as_the_loop_does(parsed)
    on = rendering.go_on(prompt, sampled, new, messages=[USER, own], tools=TOOLS)
    assert "three" in rendering.decode(on.ids)
    assert (ASKED in rendering.decode(on.ids)) == on.rerendered


CACHED = {name: load(name) for name in ["chatml", *OFFLINE]}
CACHED["template"] = load_rendering(TOKENIZER, "template", CHATML_TEMPLATE)


# How it is found


def test_chatml_is_found_and_proven() -> None:
    assert load_rendering(make(chat_template=CHATML_TEMPLATE)).name == "chatml", (
        "a template without tools, as SmolLM2's"
    )
    rendering = load_rendering(make(markers=MARKERS, chat_template=TEMPLATE))
    assert rendering.name == "chatml", "a template with tools, as Qwen2.5's"
    assert "<|im_start|>system\nYou are small.<|im_end|>" in rendering.decode(rendering.prompt([USER], []))
    assert load_rendering(make()).name == "chatml", "no template at all, but its tokens"


@pytest.mark.parametrize(
    "other",
    [
        CHATML_TEMPLATE.replace("+ '\n' +", "+ ' ' +"),
        CHATML_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>{% endif"),
        TEMPLATE.replace("# Tools", "# The tools"),
        TEMPLATE.replace("tool_response", "output"),
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_is_not_quite_chatml_is_kept(other: str) -> None:
    assert load_rendering(make(chat_template=other)).name == "template"


def test_the_models_name_decides_where_it_is_known() -> None:
    tokenizer = make(FAMILIES, FAMILY_MARKERS)
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    assert load_rendering(tokenizer).name == "qwen3"
    assert load_rendering(tokenizer, chat_template=CHATML_TEMPLATE).name == "chatml", (
        "the user's own template goes first"
    )


@pytest.mark.parametrize(
    ("name", "system"), [("chatml", ""), ("hermes", ""), ("qwen2.5", "You are Qwen"), ("smollm2", "named SmolLM")]
)
def test_names_of_chatml(name: str, system: str) -> None:
    rendering = load_rendering(make(), name)
    assert rendering.name == "chatml"
    prompt = rendering.decode(rendering.prompt([USER], []))
    assert system in prompt
    assert ("<|im_start|>system" in prompt) == bool(system)
    told = load_rendering(make(chat_template=CHATML_TEMPLATE), name)
    assert "You are small." in told.decode(told.prompt([USER], [])), "what the template says goes first"


def test_a_renderer_of_ones_own() -> None:
    rendering = load_rendering(make(), "toolroll.rollout.chatml.ChatMLRenderer")
    assert rendering.name == "toolroll.rollout.chatml.ChatMLRenderer"
    on = rendering.go_on([1], [2], [answer("<|im_end|>")], messages=[], tools=[])
    assert "< |" not in rendering.decode(on.ids), "it is ChatML: the text stays as it was"


def test_a_tokenizer_from_its_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(chat_template=CHATML_TEMPLATE).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "toolroll"):
        rendering = load_rendering(tmp_path)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "conversations are written in the format chatml (found from the tokenizer)"
    ]
    assert rendering.decode(rendering.stop_ids[:1]) == "<|im_end|>"


@pytest.mark.parametrize(
    ("tokenizer", "name", "said"),
    [
        ("/nowhere/at/all", None, r"no tokenizer at '/nowhere/at/all'.*hf download"),
        (make(), "chatlm", r"no format 'chatlm' \(did you mean 'chatml'\?\)"),
        (make(), "zzz", r"no format 'zzz': chatml, "),
        (make(), "qwen3", r"'qwen3' can't be had with this tokenizer.*tool_call"),
        (make(), "no.such.Renderer", r"'no.such.Renderer' can't be had.*No module named 'no'"),
        (make(), "template", "no chat template: give one"),
        (make(["<s>"]), None, "no chat template and isn't one that is known by name"),
        (make(["<s>"]), "chatml", r"no tokens <\|im_start\|>"),
        (object(), None, "no tokenizer of transformers'"),
    ],
)
def test_what_cannot_be_had_is_said(tokenizer: Any, name: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_rendering(tokenizer, name)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(MissingExtra, match=r"renderers.*toolroll\[rollout\]"):
        load("chatml")


def test_settings_reach_the_template_and_the_family() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'loud' if shout else 'quiet' }}"
    loud = load_rendering(make(chat_template=template), chat_template_kwargs={"shout": True})
    assert loud.decode(loud.prompt([USER], [])).endswith("loud")
    plain = load("qwen3")
    quick = load_rendering(TOKENIZER, "qwen3", chat_template_kwargs={"enable_thinking": False})
    assert "</think>" in quick.decode(quick.prompt([USER], []))
    assert "</think>" not in plain.decode(plain.prompt([USER], []))
    with pytest.raises(ConfigError, match="ChatML has no settings, and chat_template_kwargs has shout"):
        load_rendering(make(), "chatml", chat_template_kwargs={"shout": True})
    with pytest.raises(ConfigError, match=r"'qwen3' can't be had(.|\n)*enable_thinkin"):
        load_rendering(TOKENIZER, "qwen3", chat_template_kwargs={"enable_thinkin": True})


def test_a_conversation_that_the_format_refuses() -> None:
    picky = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No tools!') }}{% endif %}{% endfor %}"
    rendering = load_rendering(make(chat_template=picky))
    with pytest.raises(ConfigError, match=r"'template' can't write this conversation \(user, tool\): No tools!"):
        rendering.prompt([USER, answer()], [])
    with pytest.raises(ConfigError, match="at least one message"):
        rendering.prompt([], [])


# What a bridge or a renderer can't take


def test_arguments_that_are_no_object_do_not_break_a_template() -> None:
    strict = CHATML_TEMPLATE.replace(
        "{{ '<|im_start|>'",
        "{% for c in message.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{% endfor %}{% endfor %}"
        "{{ '<|im_start|>'",
    )
    for rendering in (load_rendering(make(chat_template=strict)), CACHED["gemma4"], CACHED["inkling"]):
        for arguments in ('{"a": 1}', '{"a": ', "[1]", "[" * 3000, DEEP):
            call = ToolCall(id="c", function=FunctionCall(name="add", arguments=arguments))
            own = Message(role="assistant", content="", tool_calls=[call])
            new = [Message(role="tool", content="three", name="add", tool_call_id="c")]
            on = rendering.go_on(rendering.prompt([USER], []), [5], new, messages=[USER, own], tools=[])
            assert "three" in rendering.decode(on.ids)


def test_an_answer_to_a_call_that_could_not_be_read_has_its_place() -> None:
    own = Message(role="assistant", content="call:?")
    for name in OFFLINE:
        on = CACHED[name].go_on([], [], [answer("three", name=None)], messages=[USER, own], tools=TOOLS)
        assert on.rerendered
        assert "three" in CACHED[name].decode(on.ids)


class Liar:
    """A renderer whose bridge can't be believed."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def get_stop_token_ids(self) -> list[int]:
        return [7]

    def render_ids(self, *_: Any, **__: Any) -> list[int]:
        return [9, 9]

    def bridge_to_next_turn(self, *_: Any, **__: Any) -> Any:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said and RenderedTokens(token_ids=self.said)


@pytest.mark.parametrize(
    ("said", "ids"),
    [
        ([1, 2, 7, 5, 6], [5, 6]),
        ([1, 2, 5, 6], None),
        ([1, 3, 7, 5, 6], None),
        ([1, 2, 7], None),
        (None, None),
        (ValueError("by what the model wrote"), None),
    ],
)
def test_a_bridge_is_checked_not_believed(said: Any, ids: list[int] | None) -> None:
    rendering = Rendering("liar", Liar(said), CACHED["chatml"]._vocabulary)
    on = rendering.go_on(array("q", [1]), array("q", [2, 7]), [answer()], messages=[USER], tools=[])
    assert (on.ids, on.rerendered) == ((ids, False) if ids else ([9, 9], True))


# All at once


def test_threads_share_one() -> None:
    rendering = CACHED["chatml"]
    texts = [f"{number} <|im_end|> <tool_call> {'x ' * number}" for number in range(200)]

    def once(text: str) -> tuple[list[int], str, list[int]]:
        ids = rendering.encode(text)
        return ids, rendering.decode(ids), rendering.prompt([Message(role="user", content=text)], TOOLS)

    alone = [once(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(once, texts * 3)) == alone * 3
    assert [text for _, text, _ in alone] == texts


def test_settings_of_others_do_not_reach_it() -> None:
    tokenizer = make()
    expected = load_rendering(tokenizer, "chatml").prompt([USER], TOOLS)
    tokenizer("some text", truncation=True, max_length=2)
    rendering = load_rendering(tokenizer, "chatml")
    tokenizer("some text", truncation=True, max_length=3)
    assert rendering.prompt([USER], TOOLS) == expected


def test_a_slow_tokenizer_keeps_text_as_text() -> None:
    class Slow:
        """A tokenizer without the fast backend."""

        def __init__(self) -> None:
            self._inner = make(markers=MARKERS)

        def __getattr__(self, name: str) -> Any:
            if name == "backend_tokenizer":
                raise AttributeError(name)
            return getattr(self._inner, name)

    renderer = ChatMLRenderer(Slow())
    text = "a<|im_end|>b<tool_call><|im_<|im_end|>end|>\ud800"
    ids = renderer.vocabulary.encode(text)
    assert not set(ids) & set(renderer.vocabulary.marks.values())
    assert renderer.vocabulary.decode(ids) == text.replace("\ud800", "\ufffd")
    assert renderer.vocabulary.marks["<tool_call>"] in renderer.vocabulary.encode_with_markers(text)
    assert renderer.vocabulary.decode([*ids, -1, 10**12]) == renderer.vocabulary.decode(ids)
