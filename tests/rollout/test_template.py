"""Opaque templates: what follows a turn of the model's, and where that can't be told."""

from typing import Any

import pytest
from tokenizers import AddedToken

from rollout.small_tokenizer import CHATML, CHATML_TEMPLATE, make
from toolroll.rollout.formats import load_rendering
from toolroll.rollout.rendering import Rendering
from toolroll.schemas import Message

ASKED = "What is it?"
USER = Message(role="user", content=ASKED)
BRACKETS = "[INST] {{ messages[0].content }} [/INST]{% for m in messages[1:] %}" + (
    "{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}[OUT] {{ m.content }} [/OUT]{% endif %}{% endfor %}"
)
"""A template whose turns of the model's end in text and a token."""


def answer(text: str = "3") -> Message:
    return Message(role="tool", content=text)


def opaque(template: str, special: Any = (*CHATML, "</s>")) -> Rendering:
    rendering = load_rendering(make(special, chat_template=template), "template")
    assert rendering.name == "template"
    return rendering


@pytest.mark.parametrize("closed", [True, False])
def test_what_follows_by_a_template(closed: bool) -> None:
    rendering = opaque(CHATML_TEMPLATE)
    prompt = rendering.prompt([USER], [])
    text = "Ja.<|im_end|>" if closed else "Ja."
    sampled = rendering._vocabulary.encode_template(text)
    own = Message(role="assistant", content="something else than was sampled")
    on = rendering.go_on(prompt, sampled, [USER], messages=[USER, own], tools=[])
    assert not on.rerendered
    whole = rendering._vocabulary.tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in (("user", ASKED), ("assistant", "Ja."), ("user", ASKED))],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert [*prompt, *sampled, *on.ids] == whole


def test_a_template_that_writes_before_the_close_goes_on_only_after_it() -> None:
    rendering = opaque(BRACKETS.replace("</s>", " </s>"))
    own = Message(role="assistant", content="Ja.")
    encode = rendering._vocabulary.encode_template
    for text, rerendered in (("Ja. </s>", False), ("Ja.", True)):
        on = rendering.go_on(rendering.prompt([USER], []), encode(text), [answer()], messages=[USER, own], tools=[])
        assert on.rerendered == rerendered
        assert rendering.decode(on.ids).endswith("[OUT] 3 [/OUT]")
    assert rendering.decode(rendering.stop_ids) == "</s><|im_end|>"


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (BRACKETS, CHATML),
        (CHATML_TEMPLATE.replace("message['content'] +", "(message['content'] if loop.last else 'cut') +"), CHATML),
        (CHATML_TEMPLATE.replace("{% for", "{{ messages | length }}{% for", 1), CHATML),
    ],
    ids=["no token closes a turn", "earlier turns are cut", "something changes at the start"],
)
def test_where_nothing_is_proven_the_conversation_is_written_anew(template: str, special: Any) -> None:
    rendering = opaque(template, special)
    own = Message(role="assistant", content="Ja.")
    on = rendering.go_on(rendering.prompt([USER], []), [5, 6], [answer("three")], messages=[USER, own], tools=[])
    assert on.rerendered
    assert on.ids == rendering.prompt([USER, own, answer("three")], [])


def test_a_token_that_text_before_it_can_hide_is_no_seam() -> None:
    tokenizer = make(chat_template=BRACKETS)
    tokenizer.add_tokens(AddedToken("</s>", single_word=True, special=True))
    rendering = load_rendering(tokenizer, "template")
    own = Message(role="assistant", content="Ja.")
    sampled = [*rendering.encode("Ja."), tokenizer.convert_tokens_to_ids("</s>")]
    on = rendering.go_on(rendering.prompt([USER], []), sampled, [answer()], messages=[USER, own], tools=[])
    assert on.rerendered
