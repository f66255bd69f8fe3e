"""Vocabulary: text ↔ ids of one tokenizer, so that text stays text.

A tool may print `<|im_end|>`, and a model may make it do so. Encoded as tokenizers do it by default, that would end the
turn. Promises:

- `encode` never gives the id of a special token or of a format's marker (`<tool_call>`), whatever the text spells.
- `encode_template` is for what a template wrote: all that spells a mark becomes one.
- `encode_with_markers` gives ids of markers for text that spells them, as in the model's training; never of special
  tokens.
- `decode` takes any ids, such that aren't in the vocabulary too.
- Nothing is changed after it is made, so any thread may use it. The tokenizer's own backend is copied: others may set
  its truncation or its padding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from toolroll.errors import ConfigError
from toolroll.sandbox.protocol import scrub_text

Encode = Callable[[str], list[int]]
HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Markers wherever they are tokens, whether a template writes them or not."""


class Vocabulary:
    """What the tokenizer knows.

    Args:
        tokenizer: One of transformers'. A fast one is best; of a slow one, text that spells a special token is encoded
            in two parts.
        chat_template: In place of the tokenizer's.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None)
        if added is None or not hasattr(tokenizer, "encode"):
            raise ConfigError(f"{tokenizer!r:.80} is no tokenizer of transformers'. Load one with AutoTokenizer.")
        self.size = 1 + max([*tokenizer.get_vocab().values(), *added])
        template = chat_template or getattr(tokenizer, "chat_template", None)
        written = None if template is None else str(template)
        marks = {token.content: number for number, token in added.items() if _is_mark(token, written)}
        special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        self.marks: dict[str, int] = marks
        """The tokens that aren't made of text: special ones and markers."""
        self.spelled = _any_of(marks)
        """Finds where the text of a mark begins."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = None if backend is None else _backend(backend, set())
        self.encode_template = self._encoder(set())
        """A template's text to ids: whatever spells a mark is one."""
        self.encode = self._encoder(set(marks))
        """Text to ids, and to no marks."""
        self.encode_with_markers = self._encoder(special & set(marks))
        """Text to ids, markers among them, but no special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with the marks' own."""
        decode = self._decode if self._backend is None else self._backend.decode
        try:
            return str(decode(list(ids), skip_special_tokens=False))
        except (OverflowError, TypeError, KeyError, IndexError, ValueError):  # by an id that there isn't
            known = [number for number in ids if 0 <= number < self.size]
            return str(decode(known, skip_special_tokens=False))

    def _decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def _encoder(self, hidden: set[str]) -> Encode:
        if self._backend is not None:
            encode = _backend(self._backend, hidden).encode
            return lambda text: list(encode(scrub_text(text), add_special_tokens=False).ids)
        spelled, tokenizer = _any_of(hidden), self.tokenizer

        def in_parts(text: str) -> list[int]:
            text = scrub_text(text)
            cuts = [0, *(found.start() + 1 for found in spelled.finditer(text)), len(text)]
            parts = [text[start:end] for start, end in pairwise(cuts)]
            return [number for part in parts for number in tokenizer.encode(part, add_special_tokens=False)]

        return in_parts


def _is_mark(token: Any, template: str | None) -> bool:
    """Whether an added token means something to the format. Runs of spaces, or `<table>`, are added tokens in some
    vocabularies, but text: a template doesn't write them.
    """
    text = token.content
    if len(text.strip()) < 2:
        return False
    return token.special or template is None or text in HERMES or text in template


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the first character of any of the texts, overlapping ones too.

    With that character in front, the search for it runs at the speed of C.
    """
    rests: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or "(?!)")


def _backend(backend: Any, hidden: set[str]) -> Any:
    """A copy that takes the hidden tokens for text and has no settings of anybody's."""
    from tokenizers import Tokenizer

    settings = json.loads(backend.to_str())
    settings["truncation"] = settings["padding"] = None
    for token in settings["added_tokens"]:
        token["special"] = token["content"] in hidden
    copy = Tokenizer.from_str(json.dumps(settings))
    copy.encode_special_tokens = True
    return copy
