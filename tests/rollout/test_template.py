"""Suffixes of chat templates, and templates whose suffix cannot be verified."""

from typing import Any

import pytest
from tokenizers import AddedToken

from rollout.small_tokenizer import CHATML, CHATML_TEMPLATE, make
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.rendering import Rendering
from toolroll.schemas import Message

QUESTION = "What is it?"
USER = Message(role="user", content=QUESTION)
BRACKETS = "[INST] {{ messages[0].content }} [/INST]{% for m in messages[1:] %}" + (
    "{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}[OUT] {{ m.content }} [/OUT]{% endif %}{% endfor %}"
)
"""A template in which an assistant turn ends with text and a token."""


def response(text: str = "3") -> Message:
    return Message(role="tool", content=text)


def template_rendering(template: str, special: Any = (*CHATML, "</s>")) -> Rendering:
    rendering = load_rendering(make(special, chat_template=template), "template")
    assert rendering.name == "template"
    return rendering


@pytest.mark.parametrize("closed", [True, False])
def test_suffix_equals_full_rendering(closed: bool) -> None:
    rendering = template_rendering(CHATML_TEMPLATE)
    prompt = rendering.prompt([USER], [])
    text = "Ja.<|im_end|>" if closed else "Ja."
    sampled = rendering._vocabulary.encode_template(text)
    assistant = Message(role="assistant", content="not the sampled text")
    continuation = rendering.bridge(prompt, sampled, [USER], messages=[USER, assistant], tools=[])
    assert not continuation.rerendered
    whole = rendering._vocabulary.tokenizer.apply_chat_template(
        [
            {"role": role, "content": text}
            for role, text in (("user", QUESTION), ("assistant", "Ja."), ("user", QUESTION))
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert [*prompt, *sampled, *continuation.ids] == whole


def test_text_before_turn_end_requires_closed_turn() -> None:
    rendering = template_rendering(BRACKETS.replace("</s>", " </s>"))
    assistant = Message(role="assistant", content="Ja.")
    encode = rendering._vocabulary.encode_template
    for text, rerendered in (("Ja. </s>", False), ("Ja.", True)):
        continuation = rendering.bridge(
            rendering.prompt([USER], []), encode(text), [response()], messages=[USER, assistant], tools=[]
        )
        assert continuation.rerendered == rerendered
        assert rendering.decode(continuation.ids).endswith("[OUT] 3 [/OUT]")
    assert rendering.decode(rendering.stop_ids) == "</s><|im_end|>"


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (BRACKETS, CHATML),
        (CHATML_TEMPLATE.replace("message['content'] +", "(message['content'] if loop.last else 'dropped') +"), CHATML),
        (CHATML_TEMPLATE.replace("{% for", "{{ messages | length }}{% for", 1), CHATML),
    ],
    ids=["turn ends without a token", "earlier turns change", "start changes"],
)
def test_unverifiable_template_renders_again(template: str, special: Any) -> None:
    rendering = template_rendering(template, special)
    assistant = Message(role="assistant", content="Ja.")
    continuation = rendering.bridge(
        rendering.prompt([USER], []), [5, 6], [response("three")], messages=[USER, assistant], tools=[]
    )
    assert continuation.rerendered
    assert continuation.ids == rendering.prompt([USER, assistant, response("three")], [])


def test_context_dependent_end_token_renders_again() -> None:
    tokenizer = make(chat_template=BRACKETS)
    tokenizer.add_tokens(AddedToken("</s>", single_word=True, special=True))
    rendering = load_rendering(tokenizer, "template")
    assistant = Message(role="assistant", content="Ja.")
    sampled = [*rendering.encode("Ja."), tokenizer.convert_tokens_to_ids("</s>")]
    continuation = rendering.bridge(
        rendering.prompt([USER], []), sampled, [response()], messages=[USER, assistant], tools=[]
    )
    assert continuation.rerendered
