"""Small tokenizers: byte-level BPE trained on the documentation, with the tokens that a format needs."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent.parent

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

CHATML_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are small.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template without tools, like that of SmolLM2."""


def make(
    special: Iterable[str] = CHATML,
    markers: Iterable[str] = (),
    *,
    chat_template: str | None = None,
    eos: str = "<|im_end|>",
) -> Any:
    """Return a tokenizer of transformers. `markers` are added tokens that are not special, such as `<tool_call>`."""
    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in markers])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos if eos in special else None)
    made.chat_template = chat_template
    return made


@cache
def _trained() -> str:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    lines = [line for page in pages for line in page.read_text().splitlines()][:800]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    )
    return str(tokenizer.to_str())


_FAMILIES = """
    <|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> <image>
    [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>
    <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> <|tool_calls_section_end|>
    <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <|media_begin|> <|media_content|> <|media_pad|>
    <|media_end|>
    <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
    <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>
    <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜latest_reminder｜> <｜action｜> <｜query｜>
    <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜> ｜DSML｜
    <bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|>
    <|tool_response> <tool_response|> <|image> <|image|> <image|>
    <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|end_of_text|>
    〈|EOS|〉 ]~!b[ ]~b] [e~[
    <|message_user|> <|message_model|> <|message_system|> <|message_tool|> <|content_text|> <|content_thinking|>
    <|content_image|> <|content_audio_input|> <|content_xml|> <|content_invoke_tool_json|>
    <|content_invoke_tool_text|> <|content_model_end_sampling|> <|end_message|> <|audio_end|> <|unused_200053|>
    <|unused_200054|>
    <｜hy_begin_of_sentence:opensource｜> <｜hy_eos:opensource｜> <｜hy_User:opensource｜> <｜hy_Assistant:opensource｜>
    <｜reasoning_mode:opensource｜>
"""
FAMILIES = _FAMILIES.split()
"""Special tokens of all families of the package renderers."""
_HY3 = ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
FAMILY_MARKERS = [
    *MARKERS,
    *(f"<{slash}{name}:opensource>" for name in _HY3 for slash in ("", "/")),
    *(f"<{slash}{name}>" for name in ("arg_key", "arg_value", "assistant", "minimax:tool_call") for slash in ("", "/")),
    "<tool_sep:opensource>",
]
"""Other added tokens of these families."""
