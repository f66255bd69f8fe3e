"""The token view: texts where there is a tokenizer, ids where there is none, and any number of tokens."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rollout.small_tokenizer import make

from toolroll.records.packed import pack
from toolroll.rollout.tokens import TokenStream
from viewer.driving import viewing


def dump(path: Path, *streams: TokenStream, **more: Any) -> None:
    *earlier, last = [pack(stream) for stream in streams]
    fields = {"format": "toolroll/1", "input": "q", "output": "a", "tokens": last, "earlier": earlier, **more}
    path.write_text(json.dumps(fields, default=_span) + "\n")


def _span(span: Any) -> dict[str, Any]:
    return {name: getattr(span, name) for name in span.__slots__}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make().save_pretrained(folder)
    return folder


async def test_texts_of_tokens(tmp_path: Path, tokenizer: Path) -> None:
    encode = make().encode
    stream = TokenStream(encode("The question\nis this: [bold]"))
    said = encode("an answer \x1b[2J 漢")
    stream.sampled(said, [-0.01] * len(said), turn=0, weight_version="v1")
    stream.given([999_999], turn=0)
    dump(tmp_path / "1.jsonl", stream)
    async with viewing(tmp_path, tokenizer=str(tokenizer)) as user:
        await user.press("t")
        await user.sees("The question⏎", "is this: [bold]an answer ␛[2J")
        await user.press("t")
        await user.sees("⏎", "mask  who")


async def test_a_tokenizer_that_is_not_there_is_said_and_ids_are_shown(tmp_path: Path) -> None:
    dump(tmp_path / "1.jsonl", TokenStream([11, 22, 33]))
    async with viewing(tmp_path, tokenizer=str(tmp_path / "nowhere")) as user:
        await user.press("t")
        await user.sees("No tokenizer could be loaded", "11 22 33", "no log-probs")


async def test_sequences_before_a_rendering_anew(tmp_path: Path) -> None:
    dump(tmp_path / "1.jsonl", TokenStream([1, 2]), TokenStream([3, 4, 5]))
    async with viewing(tmp_path) as user:
        await user.press("t")
        await user.sees("sequence 1 of 2", "1 2", "sequence 2 of 2", "3 4 5")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (None, "This sample was written without its tokens"),
        ({"ids": "!", "logprobs": None, "spans": []}, "Its tokens can't be read"),
    ],
)
async def test_samples_without_tokens_say_so(tmp_path: Path, tokens: Any, said: str) -> None:
    dump(tmp_path / "1.jsonl", TokenStream([1]))
    fields = json.loads((tmp_path / "1.jsonl").read_text()) | {"tokens": tokens}
    (tmp_path / "1.jsonl").write_text(json.dumps(fields) + "\n")
    async with viewing(tmp_path) as user:
        await user.press("t")
        await user.sees(said)


async def test_a_hundred_thousand_tokens_do_not_hold_it_up(tmp_path: Path, tokenizer: Path) -> None:
    stream = TokenStream(range(900))
    stream.sampled([number * 7 % 900 for number in range(100_000)], [-0.5] * 100_000, turn=0)
    dump(tmp_path / "1.jsonl", stream)
    async with viewing(tmp_path, tokenizer=str(tokenizer)) as user:
        began = time.process_time()
        await user.press("t")
        await user.sees("100,900 tokens")
        for key in ("G", "k", "j", "g", "t", "G", "k"):
            pressed = time.process_time()
            await user.press(key)
            assert time.process_time() - pressed < 1.5
        await user.sees("100")
        assert time.process_time() - began < 20
