"""Conversion between text and ids of one tokenizer, with control over special tokens.

A tool may print `<|im_end|>`, and a model may cause that. Encoded with a tokenizer's default settings, the text would
end the turn. *Control tokens* are the special tokens and the markers of a format, such as `<tool_call>`. Invariants:

- `encode` never returns a control token, even for text that spells one.
- `encode_with_markers` returns markers for text that spells them, as in training, but never special tokens.
- `encode_template` is for the output of a template: text that spells a control token becomes that token.
- `decode` accepts any ids, including ids outside the vocabulary.
- A vocabulary is immutable and thread-safe. It copies the tokenizer's backend, whose truncation and padding settings
  other code may change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from toolroll._internal.text import replace_lone_surrogates
from toolroll.errors import ConfigError

Encode = Callable[[str], list[int]]
HERMES_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tokens that are markers even if the chat template does not contain them."""


class Vocabulary:
    """Text ↔ ids.

    Args:
        tokenizer: A tokenizer of transformers. A slow tokenizer encodes text that spells a special token in two parts.
        chat_template: Template to use in place of the tokenizer's.

    Raises:
        ConfigError: If the object is not a tokenizer of transformers.

    Attributes:
        size: Number of ids.
        control_tokens: Ids of special tokens and markers by their text.
        control_token_pattern: Pattern that matches the first character of a control token's text.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None)
        if added is None or not hasattr(tokenizer, "encode"):
            raise ConfigError(
                f"Expected a tokenizer of transformers, got {tokenizer!r:.80}. Load one with AutoTokenizer."
            )
        self.size = 1 + max([*tokenizer.get_vocab().values(), *added])
        template = chat_template or getattr(tokenizer, "chat_template", None)
        template_text = None if template is None else str(template)
        self.control_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if _is_control_token(token, template_text)
        }
        self.control_token_pattern = _first_character_pattern(self.control_tokens)
        special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = None if backend is None else _copy_backend(backend, set())
        decode_slowly = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._decode: Callable[..., Any] = decode_slowly if self._backend is None else self._backend.decode
        self.encode_template = self._make_encoder(set())
        """Encode the output of a template."""
        self.encode = self._make_encoder(set(self.control_tokens))
        """Encode text without producing control tokens."""
        self.encode_with_markers = self._make_encoder(special & set(self.control_tokens))
        """Encode text, producing markers but no special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including control tokens."""
        try:
            return str(self._decode(list(ids), skip_special_tokens=False))
        except (OverflowError, TypeError, KeyError, IndexError, ValueError):  # an id outside the vocabulary
            known = [token_id for token_id in ids if 0 <= token_id < self.size]
            return str(self._decode(known, skip_special_tokens=False))

    def _make_encoder(self, hidden: set[str]) -> Encode:
        """Return an encoder that treats the hidden tokens as text."""
        if self._backend is not None:
            encode = _copy_backend(self._backend, hidden).encode
            return lambda text: list(encode(replace_lone_surrogates(text), add_special_tokens=False).ids)
        pattern, tokenizer = _first_character_pattern(hidden), self.tokenizer

        def encode_in_parts(text: str) -> list[int]:
            text = replace_lone_surrogates(text)
            bounds = [0, *(found.start() + 1 for found in pattern.finditer(text)), len(text)]
            parts = [text[start:end] for start, end in pairwise(bounds)]
            return [token_id for part in parts for token_id in tokenizer.encode(part, add_special_tokens=False)]

        return encode_in_parts


def _is_control_token(token: Any, template: str | None) -> bool:
    """Return True if an added token has a meaning in the format.

    Some vocabularies have added tokens that are text, such as runs of spaces or `<table>`. No template contains these.
    """
    text = token.content
    has_meaning = token.special or template is None or text in HERMES_MARKERS or text in template
    return has_meaning and len(text.strip()) >= 2


def _first_character_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the first character of each occurrence of a text, including overlapping ones.

    Starting with a literal character, the pattern is searched at the speed of C.
    """
    rests: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or "(?!)")


def _copy_backend(backend: Any, hidden: set[str]) -> Any:
    """Return a copy that treats the hidden tokens as text and neither truncates nor pads."""
    from tokenizers import Tokenizer

    settings = json.loads(backend.to_str())
    settings["truncation"] = settings["padding"] = None
    for token in settings["added_tokens"]:
        token["special"] = token["content"] in hidden
    copy = Tokenizer.from_str(json.dumps(settings))
    copy.encode_special_tokens = True
    return copy
