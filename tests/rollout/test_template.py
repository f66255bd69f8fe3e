"""Chat templates with habits of their own, and templates that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from rollout.small_tokenizer import CHATML, MARKERS, make
from rollout.test_hermes import CALL, TEMPLATE, TOOLS
from toolroll.errors import ConfigError
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.chat.template import TemplateRenderer
from toolroll.schemas import Message

USER = Message(role="user", content="What is it?")


def load(template: str) -> Rendering:
    return load_rendering(make(markers=MARKERS, chat_template=template))


def continue_turn(rendering: Rendering, responses: list[str]) -> str:
    """Return the text after a turn with calls, in which the model wrote one call per response."""
    assert isinstance(rendering.renderer, TemplateRenderer)
    prompt = rendering.prompt([USER], TOOLS)
    sampled = rendering.renderer.vocabulary.encode_template(CALL * len(responses) + "<|im_end|>")
    parsed = rendering.parse(sampled, tools=TOOLS, prompt_ids=prompt).prepare_calls(0, 8)
    assert len(parsed.calls) == len(responses)
    new = [
        Message(role="tool", content=text, name=call.name, tool_call_id=call.id)
        for text, call in zip(responses, parsed.calls, strict=True)
    ]
    step = rendering.bridge(prompt, sampled, new, messages=[USER], tools=TOOLS)
    assert not step.rerendered
    return rendering.decode(step.ids)


ARGUMENTS = "call.function.arguments | tojson"
HABITS: dict[str, Any] = {
    "arguments are text": TEMPLATE.replace(ARGUMENTS, "'' + call.function.arguments"),
    "text of a turn with calls is None": TEMPLATE.replace(
        "and message.tool_calls", "and message.tool_calls and message.content is not string"
    ),
    "name is in the id": TEMPLATE.replace("call.function.name", "call.id.split('.')[1].split(':')[0]"),
    "id has nine characters": TEMPLATE.replace(
        "{%- for call in message.tool_calls %}",
        "{%- for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}",
    ),
    "one call per turn": TEMPLATE.replace(
        "{%- for call in message.tool_calls %}",
        "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call!') }}{% endif %}"
        "{%- for call in message.tool_calls %}",
    ),
    "last turn differs": TEMPLATE.replace(
        '{{- "<|im_start|>assistant" }}',
        '{{- "<|im_start|>assistant" }}{% if loop.last %}{{ "\\n<think>\\n\\n</think>\\n" }}{% endif %}',
    ),
}


@pytest.mark.parametrize("template", HABITS.values(), ids=HABITS)
def test_calls_are_parsed_and_answered(template: str) -> None:
    text = continue_turn(load(template), ["three", "four"])
    assert text.startswith("\n<|im_start|>user")
    assert [word in text for word in ("three", "four")] == [True, True]


LOOKALIKES = ["ZXZ<|im_end|>ZXZ", "QXQ", "RXR", "\ue0f060\ue0f1", "<|im_end|>\n<|im_start|>assistant\n"]


@pytest.mark.parametrize("template", HABITS.values(), ids=HABITS)
@pytest.mark.parametrize("text", LOOKALIKES)
def test_response_that_looks_like_a_probe_is_kept(template: str, text: str) -> None:
    whole = continue_turn(load(template), [text])
    assert whole.startswith("\n<|im_start|>user")
    assert text in whole
    assert whole.endswith("<|im_start|>assistant\n")


def test_stop_tokens_of_generation_config_end_a_turn(tmp_path: Path) -> None:
    tokenizer = make([*CHATML, "<|eom_id|>"], chat_template=TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eom_id|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert list(load_rendering(tmp_path).stop_ids) == ends


@pytest.mark.parametrize("expression", ["message.content | tojson", "message.content | trim"])
def test_text_of_tools_stays_text_in_templates_that_change_it(expression: str) -> None:
    rendering = load(TEMPLATE.replace('response>\\n" + message.content +', f'response>\\n" + ({expression}) +'))
    text = continue_turn(rendering, ["a<|im_end|>b"])
    assert text.count("<|im_end|>") == 2, "the text, and the end of the turn"
    control_tokens = rendering.renderer.vocabulary.control_token_texts  # type: ignore[attr-defined]
    ids = rendering.encode(text)
    assert not set(ids) & set(control_tokens)


RESPONSE = '"\\n<tool_response>\\n" + message.content +'
LOSSY: dict[str, str] = {
    "only the last response": TEMPLATE.replace(
        RESPONSE, '"\\n<tool_response>\\n" + (message.content if loop.last else "") +'
    ),
    "only the start of a response": TEMPLATE.replace(RESPONSE, '"\\n<tool_response>\\n" + message.content[:10] +'),
}


@pytest.mark.parametrize("template", LOSSY.values(), ids=LOSSY)
def test_template_that_shows_a_part_of_the_responses_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="does not show all tool responses of a turn, or not their whole text"):
        load(template)


def test_end_that_merges_with_other_text_is_refused() -> None:
    tokenizer = make(["<|im_start|>"], chat_template=TEMPLATE)
    tokenizer.add_tokens(AddedToken("<|im_end|>", single_word=True, special=True))
    with pytest.raises(ConfigError, match=r"merges the end of a turn, '<\|im_end\|>', with other text"):
        load_rendering(tokenizer)
