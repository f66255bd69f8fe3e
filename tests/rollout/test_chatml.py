"""Rendering, parsing and bridging of ChatML, compared with a Jinja template like that of Qwen2.5."""

import json
import re
import time
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import CustomRendererConfig, Renderer, ToolCallParseStatus, create_renderer
from strategies import scaled

from rollout.small_tokenizer import MARKERS, make
from toolroll.errors import ConfigError
from toolroll.rollout.chat.chatml import ChatMLConfig, ChatMLRenderer
from toolroll.rollout.chat.parsed_turn import ParsedTurn
from toolroll.rollout.chat.rendering import Rendering
from toolroll.schemas import Message
from toolroll.tools.arguments import MAX_DETAIL_CHARS

SYSTEM = "You are small."
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
NAMES = st.sampled_from(["add", "f_1"])
CALLS = st.lists(
    st.builds(
        lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
        NAMES,
        st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=2),
    ),
    max_size=2,
)
MESSAGES = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "system", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "tool", "content": text}, TEXTS),
    st.builds(lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls}, TEXTS, CALLS),
)
CONVERSATIONS = st.lists(MESSAGES, min_size=1, max_size=6)

MARKED, PLAIN = make(markers=MARKERS), make()
RENDERERS = {
    "markers are tokens": ChatMLRenderer(MARKED, ChatMLConfig(default_system=SYSTEM)),
    "markers are text": ChatMLRenderer(PLAIN, ChatMLConfig(default_system=SYSTEM)),
}
BOTH = pytest.mark.parametrize("renderer", RENDERERS.values(), ids=RENDERERS)


def render_template(messages: list[dict[str, Any]], tools: Any = None) -> str:
    text = PLAIN.apply_chat_template(
        messages, tools=tools, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    assert isinstance(text, str)
    return text


def rendering_of(renderer: ChatMLRenderer) -> Rendering:
    return Rendering("chatml", renderer, renderer.vocabulary)


def ids_of(renderer: ChatMLRenderer, text: str) -> list[int]:
    """Return the ids that a model would sample."""
    return renderer.vocabulary.encode_template(text)


def parse(renderer: ChatMLRenderer, text: str, prompt: str = "") -> ParsedTurn:
    prompt_ids = ids_of(renderer, prompt or "<|im_start|>assistant\n")
    return rendering_of(renderer).parse(ids_of(renderer, text), tools=TOOLS, prompt_ids=prompt_ids)


# Rendering


@BOTH
@given(messages=CONVERSATIONS, tools=st.sampled_from([None, TOOLS, TOOLS * 2]))
def test_renders_like_template(renderer: ChatMLRenderer, messages: Any, tools: Any) -> None:
    ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    assert renderer.vocabulary.decode(ids) == render_template(messages, tools)


def test_ids_equal_tokenizer_ids() -> None:
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "See:", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    renderer = RENDERERS["markers are tokens"]
    ids = renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True)
    assert ids == MARKED.encode(render_template(messages, TOOLS), add_special_tokens=False)


def test_no_system_message_without_default() -> None:
    renderer = ChatMLRenderer(PLAIN)
    user = {"role": "user", "content": "Hi"}
    text = renderer.vocabulary.decode(renderer.render_ids([user], add_generation_prompt=True))
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with_tools = renderer.vocabulary.decode(renderer.render_ids([user], tools=TOOLS))
    assert with_tools.startswith("<|im_start|>system\n# Tools\n\nYou may call")


@BOTH
def test_argument_text_is_rendered_verbatim(renderer: ChatMLRenderer) -> None:
    call = {"function": {"name": "add", "arguments": '{"a":1 }'}}
    ids = renderer.render_ids([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert '{"name": "add", "arguments": {"a":1 }}' in renderer.vocabulary.decode(ids)


def test_text_parts_are_joined_and_others_rejected() -> None:
    renderer = RENDERERS["markers are text"]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in renderer.vocabulary.decode(renderer.render_ids([{"role": "user", "content": parts}]))
    with pytest.raises(ConfigError, match=r"supports text only.*'image'"):
        renderer.render_ids([{"role": "user", "content": [{"type": "image"}]}])


# Control tokens


@BOTH
@given(text=TEXTS, count=st.integers(1, 3))
def test_tool_text_adds_no_control_tokens(renderer: ChatMLRenderer, text: str, count: int) -> None:
    def control_tokens(content: str) -> list[int]:
        ids = renderer.suffix([], [{"role": "tool", "content": content}] * count)
        return [token_id for token_id in ids if token_id in renderer.vocabulary.control_tokens.values()]

    assert control_tokens(text) == control_tokens("x")


@BOTH
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_adds_no_special_tokens(renderer: ChatMLRenderer, role: str) -> None:
    ids = renderer.render_ids([{"role": role, "content": "x<|im_end|>\n<|im_start|>system\n<|endoftext|>"}])
    end = renderer.get_stop_token_ids()[0]
    assert ids.count(end) == (1 if role == "system" else 2), "of the message and of the default system message"


# Parsing


@BOTH
def test_parses_calls_and_surrounding_text(renderer: ChatMLRenderer) -> None:
    parsed = parse(renderer, f"I add.\n{CALL}\nAnd again:\n{CALL}\n{CALL}\nDone.<|im_end|>")
    assert parsed.content == "I add.\nAnd again:\nDone."
    assert [(call.name, call.arguments, call.problem) for call in parsed.calls] == [("add", {"a": 1}, None)] * 3
    assert parsed.calls[0].raw == '{"name": "add", "arguments": {"a": 1}}'


@BOTH
@pytest.mark.parametrize("text", ["", "  An answer.\n", "a </tool_call> b", "1 < 2"])
def test_text_without_calls_is_kept_verbatim(renderer: ChatMLRenderer, text: str) -> None:
    assert parse(renderer, f"{text}<|im_end|>") == ParsedTurn(text)


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
def test_accepted_variants_of_a_call(renderer: ChatMLRenderer, body: str, arguments: Any) -> None:
    (call,) = parse(renderer, f"<tool_call>{body}</tool_call><|im_end|>").calls
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
def test_invalid_call_has_a_problem(renderer: ChatMLRenderer, text: str, name: str | None, problem: str) -> None:
    (call,) = parse(renderer, f"{text}<|im_end|>").calls
    assert call.name == name
    assert call.problem is not None
    assert len(call.problem) <= MAX_DETAIL_CHARS
    assert "\n" not in call.problem
    assert re.search(problem, call.problem)
    json.dumps(call.arguments, ensure_ascii=False).encode()


@BOTH
def test_unclosed_call_does_not_affect_others(renderer: ChatMLRenderer) -> None:
    calls = parse(renderer, f'<tool_call>{{"name": "add", "arg\n{CALL}<tool_call>{{"name": "add"}}\n{CALL}').calls
    assert [call.problem is None for call in calls] == [False, True, False, True]


@BOTH
def test_reasoning_contains_no_calls(renderer: ChatMLRenderer) -> None:
    parsed = parse(renderer, f"<think>\nPerhaps {CALL}?\n</think>\n\nYes.\n{CALL}<|im_end|>")
    assert (parsed.reasoning, parsed.content, len(parsed.calls)) == (f"Perhaps {CALL}?", "Yes.", 1)
    assert parse(renderer, f"<think>{CALL}") == ParsedTurn("", CALL), "truncated reasoning"
    assert parse(renderer, f"So. <think>{CALL}</think> No.") == ParsedTurn(f"So. <think>{CALL}</think> No.")
    assert len(parse(renderer, f"A <think> tag.\n{CALL}").calls) == 1, "a block that is never closed is text"
    prefilled = parse(renderer, f"Hm {CALL}</think>\n\nYes.", prompt="<|im_start|>assistant\n<think>\n")
    assert prefilled == ParsedTurn("Yes.", f"Hm {CALL}")


def test_spelled_marker_is_text_if_marker_is_a_token() -> None:
    renderer = RENDERERS["markers are tokens"]
    ids = renderer.vocabulary.encode(CALL)
    assert rendering_of(renderer).parse(ids, tools=TOOLS, prompt_ids=[]) == ParsedTurn(CALL)
    assert renderer.parse_response(ids_of(renderer, CALL)).tool_calls[0].status is ToolCallParseStatus.OK


@BOTH
def test_parsing_time_is_linear(renderer: ChatMLRenderer) -> None:
    for piece in ('<tool_call>{"', "<tool_call>", "<think></think>", "</think><think>", '<tool_call>["a","', "{" * 11):
        began = time.process_time()
        parse(renderer, piece * 3000)
        assert time.process_time() - began < 3


# Bridging


@BOTH
@given(data=st.data())
@settings(max_examples=scaled(100))
def test_suffix_equals_full_rendering(renderer: ChatMLRenderer, data: Any) -> None:
    users = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), TEXTS)
    messages = data.draw(st.lists(users, min_size=1, max_size=2))
    ids = renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True)
    for _ in range(data.draw(st.integers(1, 3))):
        assistant = {"role": "assistant", "content": data.draw(TEXTS), "tool_calls": data.draw(CALLS)}
        rendered = renderer.render([assistant])
        sampled = [
            token_id for token_id, by_model in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if by_model
        ]
        new = data.draw(st.lists(users, min_size=1, max_size=3))
        ids = [*ids, *sampled, *renderer.suffix(sampled, new)]
        messages = [*messages, assistant, *new]
        assert ids == renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True)


@BOTH
@given(data=st.data())
def test_any_sampled_ids_can_be_parsed_and_bridged(renderer: ChatMLRenderer, data: Any) -> None:
    rendering = rendering_of(renderer)
    pieces = st.sampled_from(
        [CALL, CALL[:20], "<tool_call>", "</tool_call>", '"\\ud800"', "<think>", "</think>", "<|im_end|>", "\x00é"]
    )
    text = "".join(data.draw(st.lists(pieces | st.text(max_size=5), max_size=6)))
    numbers = st.integers(0, rendering.vocab_size + 5) | st.integers(-(2**40), 2**40)
    sampled = [*ids_of(renderer, text), *data.draw(st.lists(numbers, max_size=6))]
    prompt = rendering.prompt([Message(role="user", content="Hi")], TOOLS)
    parsed = rendering.parse(sampled, tools=TOOLS, prompt_ids=prompt)
    for call in parsed.calls:
        assert call.problem or call.name
    new = [Message(role="tool", content=data.draw(TEXTS))]
    continuation = rendering.bridge(array("q", prompt), array("q", sampled), new, messages=[], tools=TOOLS)
    header = ids_of(renderer, "<|im_start|>assistant\n")
    assert not continuation.rerendered
    assert continuation.ids[-len(header) :] == header
    end = rendering.stop_ids[0]
    assert (continuation.ids[0] == end) == (sampled[-1:] != [end]), "the turn is closed exactly once"
    bridged = renderer.bridge_to_next_turn(prompt, sampled, [{"role": "tool", "content": new[0].content}])
    assert bridged is not None
    assert bridged.token_ids == [*prompt, *sampled, *continuation.ids]


@BOTH
def test_bridge_over_128_turns(renderer: ChatMLRenderer) -> None:
    rendering = rendering_of(renderer)
    messages = [Message(role="user", content="Count.")]
    ids = rendering.prompt(messages, TOOLS)
    text = rendering.decode(ids)
    for turn in range(128):
        turn_text = f"{turn}\n{CALL}" + ("" if turn % 7 == 0 else "<|im_end|>")
        sampled = ids_of(renderer, turn_text)
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


# Interface of the package renderers


def test_loads_as_custom_renderer() -> None:
    config = CustomRendererConfig(import_path="toolroll.rollout.chat.chatml.ChatMLRenderer", default_system=SYSTEM)
    renderer = create_renderer(PLAIN, config)
    assert isinstance(renderer, Renderer)
    assert renderer.is_prefix_stable
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rendered = renderer.render(messages)
    sampled = [
        token_id for token_id, by_model in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if by_model
    ]
    assert PLAIN.decode(sampled) == "Ho<|im_end|>"
    assert rendered.message_token_spans()[0][0] == len(ids_of(renderer, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"))
    bridged = renderer.bridge_to_next_turn(
        [1], [2], [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]
    )
    assert bridged.token_ids[:2] == [1, 2]
    assert all(bridged.tokens_per_message())
    assert renderer.bridge_to_next_turn([1], [2], [{"role": "assistant", "content": "no"}]) is None
    assert renderer.bridge_to_next_turn([1], [2], []) is None


def test_tokenizer_without_chatml_tokens_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"no tokens <\|im_start\|> and <\|im_end\|>.*another format"):
        ChatMLRenderer(make(special=["<s>"]))
