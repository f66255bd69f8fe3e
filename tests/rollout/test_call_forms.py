"""Calls that models write imperfectly, in every form, and the time to parse turns that are made to take long."""

import pickle
import time
from typing import Any

import cloudpickle
import pytest

from rollout.small_tokenizer import MARKERS, make
from rollout.test_hermes import TEMPLATE
from toolroll.rollout.chat.call_forms import FORMS
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.parsed_turn import ParsedTurn
from toolroll.rollout.chat.turn_parser import MAX_CALLS, HarmonyParser, MarkedTurnParser, TurnParser
from toolroll.rollout.chat.turn_text import TurnText
from toolroll.schemas import JsonDict

PARSERS: dict[str, TurnParser] = {form.name: MarkedTurnParser(form) for form in FORMS} | {"harmony": HarmonyParser()}
TYPES: JsonDict = {
    "code": {"type": "string"},
    "count": {"type": "integer"},
    "name": {"type": ["string", "null"]},
    "choice": {"enum": ["5", "6"]},
    "any": True,
}
TOOLS: list[JsonDict] = [{"type": "function", "function": {"name": "f", "parameters": {"properties": TYPES}}}]


def parse(form: str, text: str) -> ParsedTurn:
    return PARSERS[form].parse(TurnText(text, frozenset(), frozenset()), "", TOOLS)


def coder(*arguments: tuple[str, str]) -> str:
    """Return a call in the form of Qwen3-Coder."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"


HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"code": "x"}<|call|>'


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("qwen3_coder", coder(("code", "x"), ("count", "5")), {"code": "x", "count": 5}),
        ("qwen3_coder", coder(("code", "x")).removeprefix("<tool_call>\n"), {"code": "x"}),
        ("qwen3_coder", coder(("name", '"x"')), {"name": '"x"'}),
        ("qwen3_coder", coder(("name", "null")), {"name": None}),
        ("qwen3_coder", coder(("choice", "5")), {"choice": "5"}),
        ("qwen3_coder", coder(("any", "{{1}}")), {"any": "{{1}}"}),
        ("qwen3_coder", coder(("any", "{[1]: 2}")), {"any": "{[1]: 2}"}),
        ("qwen3_coder", coder(("any", "1e999")), {"any": "1e999"}),
        ("qwen3_coder", coder(("any", "{'a': (1, 2)}")), {"any": "{'a': (1, 2)}"}),
        ("llama", '{"parameters": {"code": "x"}, "name": "f"}', {"code": "x"}),
        ("llama", 'Sure: {"name": "f"}', {}),
        ("llama", '[f(code="x", count=-5)]', {"code": "x", "count": -5}),
        (
            "olmo3",
            '<function_calls>f(code="\\d\nx", any={"a": [true, null]})</function_calls>',
            {"code": "\\d\nx", "any": {"a": [True, None]}},
        ),
        ("olmo3", '<function_calls>f(code="""a(\nb""")</function_calls>', {"code": "a(\nb"}),
        (
            "gemma4",
            '<|tool_call>call:f{ code : <|"|>x<|"|> , <|"|>count<|"|>:5}<tool_call|>',
            {"code": "x", "count": 5},
        ),
        ("harmony", HARMONY_CALL, {"code": "x"}),
        ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|>{HARMONY_CALL}", {"code": "x"}),
        ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}", {"code": "x"}),
    ],
)
def test_call_is_read(form: str, text: str, arguments: JsonDict) -> None:
    [call] = parse(form, text).calls
    assert (call.name, call.arguments, call.problem) == ("f", arguments, None)


NEXT = coder(("code", "y"))


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("hermes", '{"name": "f", "arguments": {}}\n</tool_call>', "has an end, </tool_call>, but no start"),
        ("hermes", '<tool_call>{"name": "f", "args": {}}</tool_call>', 'Write them as an object under "arguments"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"count": 1e999}}</tool_call>', "1e999 is too large"),
        ("qwen3_coder", coder(("code", "x"), ("code", "y")), "The parameter code is given twice"),
        ("qwen3_coder", "<tool_call><function=f><parameter=code>x<parameter=count>5</parameter></function></tool_call>",
         "Close each parameter before the next one"),
        ("minimax_m2", "<minimax:tool_call><invoke name='f'></invoke></minimax:tool_call>", "must be an object"),
        ("kimi_k2", "<|tool_calls_section_begin|>functions.f:0 {}<|tool_calls_section_end|>", "must be an object"),
        ("olmo3", "<function_calls>f(any={**x})</function_calls>", "is not a literal"),
        ("harmony", 'to=functions.f <|constrain|>json{"code":"x"}<|call|>', "Write <|message|> before its arguments"),
        ("harmony", HARMONY_CALL.replace("<|call|>", " or so<|call|>"), "not valid JSON: extra data"),
    ],
)  # fmt: skip
def test_imperfect_call_is_answered(form: str, text: str, problem: str) -> None:
    [call] = parse(form, text).calls
    assert problem in str(call.problem)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen3_coder", NEXT.replace("</parameter>\n", "").replace("y", "x") + NEXT),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_end|>"
         '<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{"code": "y"}<|tool_call_end|>'),
        ("mistral", '[TOOL_CALLS]f[TOOL_CALLS]f[ARGS]{"code": "y"}'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>"
         '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"code": "y"}<｜tool▁call▁end｜>'),
    ],
)  # fmt: skip
def test_imperfect_call_does_not_affect_the_next_one(form: str, text: str) -> None:
    first, second = parse(form, text).calls
    assert first.problem is not None
    assert (second.name, second.arguments, second.problem) == ("f", {"code": "y"}, None)


def test_reasoning_markers_in_arguments_are_text() -> None:
    def call(code: str) -> str:
        return f'<tool_call>{{"name": "f", "arguments": {{"code": "{code}"}}}}</tool_call>'

    calls = parse("hermes", f"{call('<think>')}\n{call('</think>')}").calls
    assert [call.arguments for call in calls] == [{"code": "<think>"}, {"code": "</think>"}]


@pytest.mark.parametrize("text", ['{"name": "Alice", "age": 30}', '```json\n{"name": "Alice"}\n```', "[1, 2]"])
def test_json_answer_is_no_call(text: str) -> None:
    assert parse("llama", text) == ParsedTurn(text)


def test_id_of_a_call_contains_no_control_tokens() -> None:
    text = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert [call.id for call in parse("kimi_k2", text.format("f")).calls] == ["functions.f:0"]
    assert [call.id for call in parse("kimi_k2", text.format("f[EOS]<x>")).calls] == [None]


SLOW = {
    "gemma4": ["<|tool_call>call:f{a:1," + " " * 30_000, '<|tool_call>call:f{<|"|>a', "<|tool_call>"],
    "glm": [
        "<tool_call>f" + " " * 30_000,
        "</arg_value><arg_key>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>",
    ],
    "qwen3_coder": ["<tool_call>", "<parameter=a>1</parameter>", "<tool_call><function=f>", "</parameter>"],
    "minimax_m2": ['<invoke name="f">', '<invoke name="f"><parameter name="a">1</parameter>'],
    "dsml": ['<｜DSML｜invoke name="f">'],
    "mistral": ["[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]"],
    "kimi_k2": ["<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "<|tool_call_begin|>"],
    "deepseek_v3": ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"],
    "llama": ["[f(\n", '{"name": ', "<|python_tag|>", "{" * 50],
    "olmo3": ["<function_calls>", '<function_calls>f("' + '\\"' * 10_000, "f("],
    "hermes": ["</tool_call>", "<tool_call>{", '<tool_call>{"a": "'],
    "harmony": ["<|start|>", "<|end|>", "<|channel|>", "to=f<|message|>{", "<|message|>"],
}


@pytest.mark.parametrize("form", SLOW)
def test_time_to_parse_is_bounded(form: str) -> None:
    for piece in SLOW[form]:
        for start in ("", "<tool_call><function=f>", "<tool_call>f", "<think>"):
            text = start + piece * (60_000 // len(piece) + 1)
            began = time.process_time()
            assert len(parse(form, text).calls) <= MAX_CALLS + 1
            assert time.process_time() - began < 3, (start, piece[:40])


@pytest.mark.parametrize(
    "copy", [lambda one: pickle.loads(pickle.dumps(one)), lambda one: cloudpickle.loads(cloudpickle.dumps(one))]
)
def test_copy_of_a_rendering_keeps_text_as_text(copy: Any) -> None:
    rendering = load_rendering(make(markers=MARKERS, chat_template=TEMPLATE))
    copied = copy(rendering)
    text = "a<|im_end|>b<tool_call>"
    assert copied.encode(text) == rendering.encode(text)
    assert copied.decode(copied.encode(text)) == text
    assert copied.stop_ids == rendering.stop_ids
