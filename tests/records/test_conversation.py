"""Conversations are parsed from the text of a dump."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_samples import VERL_ANSWER, VERL_PROMPT

from toolroll.records.conversation import count_turns_and_calls, format_messages, parse_messages

CALL = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}}
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 6 times 7?"},
    {"role": "assistant", "content": "I compute.", "reasoning_content": "Use the tool.", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "6 times 7 is #### 42"},
]


def test_text_without_special_tokens() -> None:
    assert parse_messages(VERL_PROMPT, VERL_ANSWER) == CONVERSATION


def test_text_with_special_tokens() -> None:
    prompt, answer = VERL_PROMPT, VERL_ANSWER
    for role in ("system", "user", "assistant"):
        prompt = prompt.replace(f"{role}\n", f"<|im_end|>\n<|im_start|>{role}\n")
        answer = answer.replace(f"\n{role}\n", f"<|im_end|>\n<|im_start|>{role}\n")
    prompt = prompt.removeprefix("<|im_end|>\n").replace("\n<|im_end|>", "<|im_end|>")
    assert parse_messages(prompt, answer + "<|im_end|>") == CONVERSATION
    assert count_turns_and_calls(prompt, answer) == count_turns_and_calls(VERL_PROMPT, VERL_ANSWER) == (2, 1)


def test_template_that_starts_the_thinking() -> None:
    messages = parse_messages("user\nHi\nassistant\n<think>\n", "Well.\n</think>\n\nHello.")
    assert messages[1] == {"role": "assistant", "content": "Hello.", "reasoning_content": "Well."}


def test_several_tool_responses_in_one_turn() -> None:
    two = "a\nuser\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n\n</tool_response>"
    assert parse_messages("user\nHi\nassistant\n", two)[2:] == [
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2\n"},
    ]


def test_role_word_out_of_turn_is_text() -> None:
    assert parse_messages("user\nHi\nassistant\n", "The kinds are\nsystem\nassistant\nuser\nand that is all") == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "The kinds are\nsystem\nassistant\nuser\nand that is all"},
    ]


def test_invalid_call_stays_in_text() -> None:
    broken = '<tool_call>\n{"name": \n</tool_call>'
    assert parse_messages("user\nHi\nassistant\n", broken)[1] == {"role": "assistant", "content": broken}


def test_other_templates_give_two_messages() -> None:
    assert parse_messages("[INST] Hi [/INST]", "user\nassistant\n") == [
        {"role": "user", "content": "[INST] Hi [/INST]"},
        {"role": "assistant", "content": "user\nassistant\n"},
    ]
    assert count_turns_and_calls("[INST] Hi [/INST]", "x") == (1, 0)


@pytest.mark.parametrize(
    "piece", ["<tool_call>", "<tool_response>", "<tool_response>x</tool_response>", "<think>", "\nuser\n"]
)
def test_repeated_marker_takes_linear_time(piece: str) -> None:
    start = time.process_time()
    parse_messages("user\nHi\nassistant\n", 20_000 * piece + "x")
    parse_messages("user\nHi\nassistant\n", "x\nuser\n" + 20_000 * piece + "x\nassistant\n")
    assert time.process_time() - start < 5


MARKERS = "user assistant tool system <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response>"
OTHER_PIECES = ["\n", " ", "text", "</tool_response>", '{"name": "f", "arguments": {}}']
PIECES = st.lists(st.sampled_from([*MARKERS.split(), *OTHER_PIECES]), max_size=20).map("".join)


@given(PIECES, PIECES)
def test_any_text_can_be_parsed(prompt: str, answer: str) -> None:
    messages = parse_messages(prompt, answer)
    assert messages
    assert all(message["role"] in ("system", "developer", "user", "assistant", "tool") for message in messages)
    turns, calls = count_turns_and_calls(prompt, answer)
    assert turns >= 1
    assert calls >= 0


WORDS = st.text("ab \n<>", max_size=10).map(str.strip)


@given(st.lists(WORDS, min_size=1, max_size=3), WORDS.filter(bool))
def test_formatted_messages_are_parsed_again(questions: list[str], answer: str) -> None:
    messages = [{"role": "user", "content": questions[0]}, {"role": "assistant", "content": answer}]
    for question in questions[1:]:
        messages += [{"role": "tool", "content": question}, {"role": "assistant", "content": answer}]
    prompt, response = format_messages(messages, len(questions))
    assert parse_messages(prompt, response) == messages
    assert count_turns_and_calls(prompt, response)[0] == len(questions)
