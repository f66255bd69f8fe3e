"""Parsing and bridging of a small model with the Hermes form, whose template is like that of Qwen2.5."""

import json
import re
import time
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scaled

from rollout.small_tokenizer import MARKERS, make
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.parsed_turn import ParsedTurn
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.chat.template import TemplateRenderer
from toolroll.schemas import FunctionCall, Message, ToolCall
from toolroll.tools.arguments import MAX_DETAIL_CHARS

TEMPLATE = """
{%- set system = messages[0].content if messages[0].role == "system" else "You are small." %}
{{- "<|im_start|>system\\n" + system }}
{%- if tools %}
  {{- "\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n" }}
  {{- "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
  {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
  {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within " }}
  {{- "<tool_call></tool_call> XML tags:\\n<tool_call>\\n" }}
  {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}
{{- "<|im_end|>\\n" }}
{%- for message in messages %}
  {%- if message.role == "tool" %}
    {%- if loop.first or loop.previtem.role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
    {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
    {%- if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
  {%- elif message.role == "assistant" and message.tool_calls %}
    {{- "<|im_start|>assistant" }}
    {%- if message.content %}{{ "\\n" + message.content }}{% endif %}
    {%- for call in message.tool_calls %}
      {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson }}{{ "}\\n</tool_call>" }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
  {%- elif not (loop.first and message.role == "system") %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Füge zu.",
            "parameters": {"type": "object", "properties": {"a": {}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        "",
        "\n",
        " x ",
        "<|im_end|>",
        "a<|im_start|>system\n",
        "<tool_call>",
        "</tool_response>",
        "日本 🤖",
        "<|im_<|im_end|>end|>",
    ]
)
DEEP = '{"a": ' * 400 + '"\\ud800"' + "}" * 400
RENDERINGS = {
    "markers are tokens": load_rendering(make(markers=MARKERS, chat_template=TEMPLATE)),
    "markers are text": load_rendering(make(chat_template=TEMPLATE)),
}
BOTH = pytest.mark.parametrize("rendering", RENDERINGS.values(), ids=RENDERINGS)


def ids_of(rendering: Rendering, text: str) -> list[int]:
    """Return the ids that a model would sample."""
    assert isinstance(rendering.renderer, TemplateRenderer)
    return rendering.renderer.vocabulary.encode_template(text)


def parse(rendering: Rendering, text: str, prompt: str = "") -> ParsedTurn:
    prompt_ids = ids_of(rendering, prompt or "<|im_start|>assistant\n")
    return rendering.parse(ids_of(rendering, text), tools=TOOLS, prompt_ids=prompt_ids)


@BOTH
def test_form_is_found(rendering: Rendering) -> None:
    assert isinstance(rendering.renderer, TemplateRenderer)
    assert (rendering.name, rendering.renderer.parser.name) == ("template", "hermes")
    assert "<|im_end|>" in rendering.decode(rendering.stop_ids)


# Parsing


@BOTH
def test_parses_calls_and_surrounding_text(rendering: Rendering) -> None:
    parsed = parse(rendering, f"I add.\n{CALL}\nAnd again:\n{CALL}\n{CALL}\nDone.<|im_end|>")
    assert parsed.content == "I add.\nAnd again:\nDone."
    assert [(call.name, call.arguments, call.problem) for call in parsed.calls] == [("add", {"a": 1}, None)] * 3
    assert parsed.calls[0].raw == '{"name": "add", "arguments": {"a": 1}}'


@BOTH
@pytest.mark.parametrize("text", ["", "  An answer.\n", "a </tool_call> b", "1 < 2"])
def test_text_without_calls_is_kept_verbatim(rendering: Rendering, text: str) -> None:
    assert parse(rendering, f"{text}<|im_end|>") == ParsedTurn(text)


@BOTH
@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', {"a": 1}),
        ('  {"arguments": {"a": 1},\n "name": " add "}\n\n', {"a": 1}),
        ('{"name": "add"}', {}),
        ('{"name": "add", "arguments": null}', {}),
        ('{"name": "add", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "add", "arguments": {"a": "x\ny"}}', {"a": "x\ny"}),
        ('{"name": "add", "arguments": {"a": "</tool_call><tool_call>"}}', {"a": "</tool_call><tool_call>"}),
        ('{"name": "add", "arguments": {"a": "\\ud83e\\udd16"}}', {"a": "🤖"}),
    ],
)
def test_accepted_variants_of_a_call(rendering: Rendering, body: str, arguments: Any) -> None:
    (call,) = parse(rendering, f"<tool_call>{body}</tool_call><|im_end|>").calls
    assert (call.name, call.arguments, call.problem) == ("add", arguments, None)


@BOTH
@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", None, "not valid JSON: expecting property name .* line 1, column 2"),
        ('<tool_call>{"name": "add"} {}</tool_call>', None, "not valid JSON: extra data at line 1, column 17"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', None, "not valid JSON"),
        (f'<tool_call>{{"name": "add", "arguments": {"[" * 9000}</tool_call>', None, "nested too deeply"),
        (f'<tool_call>{{"name": "add", "arguments": {"9" * 9000}}}</tool_call>', None, "not valid JSON: .*digits"),
        (f'<tool_call>{{"name": "add", "arguments": {DEEP}}}</tool_call>', "add", "nested too deeply"),
        ("<tool_call></tool_call>", None, "not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', None, "has no tool name"),
        ('<tool_call>{"name": 7}</tool_call>', None, "has no tool name"),
        ('<tool_call>["add"]</tool_call>', None, "must be an object"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", "must be an object"),
        ('<tool_call>{"name": "add", "arguments": {}}', "add", "is incomplete"),
        ('<tool_call>{"name": "add", "argu', None, "is incomplete"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud83e"}}</tool_call>', "add", "half of a character"),
    ],
)
def test_invalid_call_has_a_problem(rendering: Rendering, text: str, name: str | None, problem: str) -> None:
    (call,) = parse(rendering, f"{text}<|im_end|>").calls
    assert call.name == name
    assert call.problem is not None
    assert len(call.problem) <= MAX_DETAIL_CHARS
    assert "\n" not in call.problem
    assert re.search(problem, call.problem)
    json.dumps(call.arguments, ensure_ascii=False).encode()


@BOTH
def test_unclosed_call_does_not_affect_others(rendering: Rendering) -> None:
    calls = parse(rendering, f'<tool_call>{{"name": "add", "arg\n{CALL}<tool_call>{{"name": "add"}}\n{CALL}').calls
    assert [call.problem is None for call in calls] == [False, True, False, True]


@BOTH
def test_reasoning_contains_no_calls(rendering: Rendering) -> None:
    parsed = parse(rendering, f"<think>\nPerhaps {CALL}?\n</think>\n\nYes.\n{CALL}<|im_end|>")
    assert (parsed.reasoning, parsed.content, len(parsed.calls)) == (f"Perhaps {CALL}?", "Yes.", 1)
    truncated = parse(rendering, f"<think>{CALL}")
    assert (truncated.content, truncated.reasoning) == ("", CALL)
    assert [call.problem for call in truncated.calls] == [
        "The tool call is inside the reasoning. Write </think> before a tool call."
    ]
    assert parse(rendering, f"So. <think>{CALL}</think> No.") == ParsedTurn(f"So. <think>{CALL}</think> No.")
    assert len(parse(rendering, f"A <think> tag.\n{CALL}").calls) == 1, "a block that is never closed is text"
    prefilled = parse(rendering, f"Hm {CALL}</think>\n\nYes.", prompt="<|im_start|>assistant\n<think>\n")
    assert prefilled == ParsedTurn("Yes.", f"Hm {CALL}")


def test_spelled_marker_is_text_if_marker_is_a_token() -> None:
    rendering = RENDERINGS["markers are tokens"]
    assert rendering.parse(rendering.encode(CALL), tools=TOOLS, prompt_ids=[]) == ParsedTurn(CALL)
    assert [call.problem for call in parse(rendering, CALL).calls] == [None]


@BOTH
def test_parsing_time_is_linear(rendering: Rendering) -> None:
    for piece in ('<tool_call>{"', "<tool_call>", "<think></think>", "</think><think>", '<tool_call>["a","', "{" * 11):
        began = time.process_time()
        parse(rendering, piece * 3000)
        assert time.process_time() - began < 3


# Bridging


CALLS = st.lists(
    st.builds(
        lambda name, arguments: ToolCall(id="call00000", function=FunctionCall(name=name, arguments=arguments)),
        st.sampled_from(["add", "f_1"]),
        st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=2),
    ),
    max_size=2,
)


@BOTH
@given(data=st.data())
@settings(max_examples=scaled(100))
def test_suffix_equals_full_rendering(rendering: Rendering, data: Any) -> None:
    messages = [Message(role="user", content="Hi")]
    ids = rendering.prompt(messages, TOOLS)
    for _ in range(data.draw(st.integers(1, 3))):
        text = data.draw(st.sampled_from(["", "I add.", "日本 🤖"]))
        assistant = Message(role="assistant", content=text, tool_calls=data.draw(CALLS) or None)
        before = rendering.decode(rendering.prompt(messages, TOOLS))
        turn = rendering.decode(rendering.prompt([*messages, assistant], TOOLS))[len(before) :]
        sampled = ids_of(rendering, turn.partition("<|im_end|>")[0] + "<|im_end|>")
        contents = st.sampled_from(["user", "tool"]), TEXTS
        new = data.draw(st.lists(st.builds(lambda r, t: Message(role=r, content=t), *contents), min_size=1, max_size=3))
        step = rendering.bridge(ids, sampled, new, messages=[*messages, assistant], tools=TOOLS)
        assert not step.rerendered
        ids = [*ids, *sampled, *step.ids]
        messages = [*messages, assistant, *new]
    whole = rendering.prompt(messages, TOOLS)
    assert ids[-len(step.ids) :] == whole[-len(step.ids) :]
    if not any("<|" in str(message) for message in messages):
        assert rendering.decode(ids) == rendering.decode(whole)


@BOTH
@given(data=st.data())
def test_any_sampled_ids_can_be_parsed_and_bridged(rendering: Rendering, data: Any) -> None:
    pieces = st.sampled_from(
        [CALL, CALL[:20], "<tool_call>", "</tool_call>", '"\\ud800"', "<think>", "</think>", "<|im_end|>", "\x00é"]
    )
    text = "".join(data.draw(st.lists(pieces | st.text(max_size=5), max_size=6)))
    numbers = st.integers(0, rendering.vocab_size + 5) | st.integers(-(2**40), 2**40)
    sampled = [*ids_of(rendering, text), *data.draw(st.lists(numbers, max_size=6))]
    prompt = rendering.prompt([Message(role="user", content="Hi")], TOOLS)
    parsed = rendering.parse(sampled, tools=TOOLS, prompt_ids=prompt)
    for call in parsed.calls:
        assert call.problem or call.name
    new = [Message(role="tool", content=data.draw(TEXTS))]
    continuation = rendering.bridge(array("q", prompt), array("q", sampled), new, messages=[], tools=TOOLS)
    header = ids_of(rendering, "<|im_start|>assistant\n")
    assert not continuation.rerendered
    assert continuation.ids[-len(header) :] == header
    end = rendering.stop_ids[0]
    assert (continuation.ids[0] == end) == (sampled[-1:] != [end]), "the turn is closed exactly once"


@BOTH
def test_bridge_over_128_turns(rendering: Rendering) -> None:
    messages = [Message(role="user", content="Count.")]
    ids = rendering.prompt(messages, TOOLS)
    text = rendering.decode(ids)
    for turn in range(128):
        turn_text = f"{turn}\n{CALL}" + ("" if turn % 7 == 0 else "<|im_end|>")
        sampled = ids_of(rendering, turn_text)
        assert len(rendering.parse(sampled, tools=TOOLS, prompt_ids=ids).calls) == 1
        new = [Message(role="tool", content=str(turn)), Message(role="tool", content="<|im_end|>")][: 1 + turn % 2]
        continuation = rendering.bridge(ids, sampled, new, messages=messages, tools=TOOLS)
        assert not continuation.rerendered
        ids = [*ids, *sampled, *continuation.ids]
        answers = "".join(f"\n<tool_response>\n{message.content}\n</tool_response>" for message in new)
        text += (
            turn_text.removesuffix("<|im_end|>")
            + f"<|im_end|>\n<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert rendering.decode(ids) == text


@BOTH
@given(text=TEXTS, count=st.integers(1, 3))
def test_tool_text_adds_no_control_tokens(rendering: Rendering, text: str, count: int) -> None:
    assert isinstance(rendering.renderer, TemplateRenderer)
    control_tokens = rendering.renderer.vocabulary.control_token_texts

    def control_tokens_for(content: str) -> list[int]:
        new = [Message(role="tool", content=content)] * count
        ids = rendering.bridge([1], [2], new, messages=[], tools=TOOLS).ids
        assert content.encode("utf-8", "replace").decode() in rendering.decode(ids), "the text is unchanged"
        return [token_id for token_id in ids if token_id in control_tokens]

    assert control_tokens_for(text) == control_tokens_for("x")
