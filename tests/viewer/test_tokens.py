"""Token view: text with a tokenizer, IDs without one, and long sequences."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rollout.small_tokenizer import make

from toolroll.records.packed_tokens import pack
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


async def test_tokenizer_shows_text(tmp_path: Path, tokenizer: Path) -> None:
    encode = make().encode
    stream = TokenStream(encode("The question\nis this: [bold]"))
    answer = encode("an answer \x1b[2J 漢")
    stream.append_sampled(answer, [-0.01] * len(answer), turn=0, weight_version="v1")
    stream.append_unsampled([999_999], turn=0)
    dump(tmp_path / "1.jsonl", stream)
    async with viewing(tmp_path, tokenizer=str(tokenizer)) as user:
        await user.press("t")
        await user.sees("The question⏎", "is this: [bold]an answer ␛[2J")
        await user.press("t")
        await user.sees("⏎", "mask  author")


async def test_missing_tokenizer_is_reported_and_ids_are_shown(tmp_path: Path) -> None:
    dump(tmp_path / "1.jsonl", TokenStream([11, 22, 33]))
    async with viewing(tmp_path, tokenizer=str(tmp_path / "nowhere")) as user:
        await user.press("t")
        await user.sees("Cannot load the tokenizer", "11 22 33", "no log-probs")


async def test_earlier_sequences_are_shown_first(tmp_path: Path) -> None:
    dump(tmp_path / "1.jsonl", TokenStream([1, 2]), TokenStream([3, 4, 5]))
    async with viewing(tmp_path) as user:
        await user.press("t")
        await user.sees("sequence 1 of 2", "1 2", "sequence 2 of 2", "3 4 5")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (None, "This sample was recorded without tokens"),
        ({"ids": "!", "logprobs": None, "spans": []}, "Invalid tokens"),
    ],
)
async def test_sample_without_tokens_shows_message(tmp_path: Path, tokens: Any, message: str) -> None:
    dump(tmp_path / "1.jsonl", TokenStream([1]))
    fields = json.loads((tmp_path / "1.jsonl").read_text()) | {"tokens": tokens}
    (tmp_path / "1.jsonl").write_text(json.dumps(fields) + "\n")
    async with viewing(tmp_path) as user:
        await user.press("t")
        await user.sees(message)


async def test_100k_tokens_stay_responsive(tmp_path: Path, tokenizer: Path) -> None:
    stream = TokenStream(range(900))
    stream.append_sampled([number * 7 % 900 for number in range(100_000)], [-0.5] * 100_000, turn=0)
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
