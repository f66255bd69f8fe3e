"""Tool calls in the form of every model family, rendered by the families' own chat templates."""

import keyword
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_zoo import MODELS, ModelZoo
from strategies import scaled

from toolroll.rollout.chat.call_forms import FORMS
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.chat.template import TemplateRenderer, common_length, turn_of
from toolroll.schemas import JsonDict

pytestmark = pytest.mark.process

MODEL_BY_FORM = {
    "hermes": "granite-4.0-h-small",
    "qwen3_coder": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "seed_oss": "Seed-OSS-36B-Instruct",
    "glm": "GLM-4.7-Flash",
    "mistral": "Mistral-Small-3.2-24B-Instruct-2506",
    "dsml": "DeepSeek-V4",
    "kimi_k2": "Kimi-K2-Instruct",
    "minimax_m2": "MiniMax-M2",
    "gemma4": "gemma-4-31B-it",
    "olmo3": "Olmo-3-7B-Instruct",
    "lfm2": "LFM2.5-1.2B-Instruct",
    "llama": "Llama-3.2-3B-Instruct",
    "harmony": "gpt-oss-20b",
}
"""A model for each form of calls; those with a small vocabulary load fast."""
UNTRIED = {"deepseek_v3"}
"""A form whose models' templates show no tools. `test_call_forms.py` tests it."""
FORM = pytest.mark.parametrize("form", MODEL_BY_FORM)

MARKERS = {
    "qwen3_coder": "<tool_call> </tool_call> <function=f> </function> <parameter=code> </parameter>",
    "seed_oss": "<seed:tool_call> </seed:tool_call> <function=f> </function> <parameter=code> </parameter>",
    "glm": "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
    "mistral": "[TOOL_CALLS] [ARGS] [CALL_ID] [TOOL_RESULTS]",
    "dsml": "<｜DSML｜invoke> </｜DSML｜invoke> </｜DSML｜parameter> <｜DSML｜tool_calls>",
    "kimi_k2": "<|tool_call_begin|> <|tool_call_end|> <|tool_calls_section_end|> <|tool_call_argument_begin|>",
    "minimax_m2": "<minimax:tool_call> </minimax:tool_call> <invoke> </invoke> <parameter> </parameter>",
    "gemma4": "<|tool_call> <tool_call|> call:f{ } [ ] , :",
    "olmo3": "<function_calls> </function_calls> f( ) \" ' \\",
    "llama": '<|python_tag|> {"name": "parameters": } ;',
    "harmony": '<|channel|> <|message|> <|start|> <|end|> to=functions.f {" "}',
}
ENDS = {
    "qwen3_coder": r"</parameter>\s*(</function>|<parameter=)|</function>\s*</tool_call>\s*<tool_call>",
    "seed_oss": r"</parameter>\s*(</function>|<parameter=)|</function>\s*</seed:tool_call>\s*<seed:tool_call>",
    "glm": r"</arg_value>\s*(</tool_call>|<arg_key>)|</tool_call>\s*<tool_call>",
    "dsml": r"</｜DSML｜parameter>\s*(</｜DSML｜invoke>|<｜DSML｜parameter)",
    "minimax_m2": r"</parameter>\s*(</invoke>|<parameter)",
    "gemma4": r'<\|"\|>',
}
"""Text that ends an argument or a call. The form has no way to write it inside an argument."""


@cache
def load(form: str) -> Rendering:
    [model] = [model for model in MODELS if model.name == MODEL_BY_FORM[form]]
    return load_rendering(ModelZoo().directory(model))


def renderer_of(rendering: Rendering) -> TemplateRenderer:
    assert isinstance(rendering.renderer, TemplateRenderer)
    return rendering.renderer


def render_call(rendering: Rendering, name: str, arguments: JsonDict, tools: list[JsonDict]) -> str:
    """Return a turn with a call as the model's template writes it, without the tokens that end it."""
    renderer = renderer_of(rendering)
    user = {"role": "user", "content": "Hi"}
    before = renderer.text([user], tools)
    text = renderer.text([user, turn_of([(name, arguments)])], tools)
    text = text[common_length(before, text) :]
    end = max((text.rfind(rendering.decode([token_id])) for token_id in rendering.stop_ids), default=-1)
    return text[:end] if end >= 0 else text


def parse(rendering: Rendering, text: str, tools: list[JsonDict]) -> list[tuple[str | None, Any, str | None]]:
    ids = renderer_of(rendering).vocabulary.encode_template(text)
    parsed = rendering.parse(ids, tools=tools, prompt_ids=())
    return [(call.name, call.arguments, call.problem) for call in parsed.calls]


def tool_with(arguments: JsonDict) -> JsonDict:
    """Return a tool whose parameters have the types of the arguments."""
    properties = {key: {"type": _type_of(value)} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": "run_code", "description": "Run.", "parameters": parameters}}


def _type_of(value: Any) -> str:
    names: list[tuple[Any, str]] = [(bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")]
    names += [(dict, "object"), (list, "array"), (type(None), "null")]
    return next(name for kind, name in names if isinstance(value, kind))


def arguments_for(form: str) -> st.SearchStrategy[JsonDict]:
    """Return any JSON object whose strings may spell the form's markers."""
    markers = MARKERS.get(form, "<tool_call> </tool_call> <tool_response>").split()
    pieces = st.sampled_from([*markers, "\n", " ", '"', "'", "\\", "{", "}", "é", "🎉", "5", "true", "None", "x = [1]"])
    texts = st.lists(pieces | st.text(max_size=4), max_size=5).map("".join)
    names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
    keys = names if form == "gemma4" else texts
    numbers = st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
    scalars = st.none() | st.booleans() | numbers | texts
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
    )
    return st.dictionaries(names, values, max_size=4)


def test_every_form_is_tried() -> None:
    assert MODEL_BY_FORM.keys() | UNTRIED == {form.name for form in FORMS} | {"harmony"}


@FORM
def test_form_of_model_is_found(form: str) -> None:
    assert renderer_of(load(form)).parser.name == form


@pytest.mark.parametrize(
    "form", sorted(MODEL_BY_FORM.keys() - {"lfm2"})
)  # its template does not escape quotes in strings
@given(data=st.data())
@settings(max_examples=scaled(60), deadline=None)
def test_call_is_read_back_as_rendered(form: str, data: Any) -> None:
    rendering = load(form)
    arguments = data.draw(arguments_for(form))
    assume(not re.search(ENDS.get(form, "(?!)"), str(arguments)))
    # The test encodes the rendered text, in which a stop token ends the turn. A model would spell it with other tokens.
    assume(not any(rendering.decode([token_id]) in str(arguments) for token_id in rendering.stop_ids))
    tools = [tool_with(arguments)]
    text = render_call(rendering, "run_code", arguments, tools)
    assert parse(rendering, text, tools) == [("run_code", arguments, None)], text


CORRUPTIONS: dict[str, Callable[[str, int], str]] = {
    "cut off": lambda text, position: text[:position],
    "character missing": lambda text, position: text[:position] + text[position + 1 :],
    "quote inserted": lambda text, position: text[:position] + '"' + text[position:],
    "brace inserted": lambda text, position: text[:position] + "}" + text[position:],
}


@FORM
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_malformed_call_is_never_taken_for_text(form: str, corruption: str) -> None:
    rendering = load(form)
    tools = [tool_with({"code": "print(1)", "count": 2})]
    text = render_call(rendering, "run_code", {"code": "print(1)", "count": 2}, tools)
    [opening] = [found.opening for found in FORMS if found.name == form] or [re.compile(r"to=functions\.\w+")]
    found = opening.search(text)
    assert found is not None
    start = found.end() + (len('{"name":') if form == "llama" else 0)
    for position in range(start, len(text)):
        calls = parse(rendering, CORRUPTIONS[corruption](text, position), tools)
        assert calls, f"{CORRUPTIONS[corruption](text, position)!r} is taken for text"
        for name, _, problem in calls:
            assert name or problem
            assert problem is None or (problem.endswith(".") and "\n" not in problem)
