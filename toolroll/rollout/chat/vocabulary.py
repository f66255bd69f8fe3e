"""Conversion between text and ids of one tokenizer, with control over special tokens.

A tool may print `<|im_end|>`, and a model may cause that. Encoded with a tokenizer's default settings, the text would
end the turn. *Control tokens* are the special tokens and the markers of a format, such as `<tool_call>`. Invariants:

- `encode` never returns a control token, even for text that spells one.
- `encode_template` is for the output of a template: text that spells a control token becomes that token, except the
  text that a caller passes as `literals`.
- `decode` accepts any ids, including ids outside the vocabulary.
- A vocabulary is immutable and thread-safe. Its encoders share the model of the tokenizer's backend, but not the
  backend's truncation and padding, which other code may change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        control_token_texts: Texts of control tokens by their id.
        control_token: Pattern that matches a control token's text.
        control_token_pattern: Pattern that matches the first character of a control token's text.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        added = getattr(tokenizer, "added_tokens_decoder", None)
        if added is None or not hasattr(tokenizer, "encode"):
            raise ConfigError(
                f"Expected a tokenizer of transformers, got {tokenizer!r:.80}. Load one with AutoTokenizer."
            )
        self.size = max(tokenizer.vocab_size, 1 + max(added, default=-1))
        template = chat_template or getattr(tokenizer, "chat_template", None)
        template_text = None if template is None else str(template)
        self.control_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if _is_control_token(token, template_text)
        }
        self.control_token_texts = {token_id: text for text, token_id in self.control_tokens.items()}
        self.control_token_pattern = _first_character_pattern(self.control_tokens)
        self.control_token = re.compile("|".join(map(re.escape, _longest_first(self.control_tokens))) or "(?!)")
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._encode_template = self._make_encoder(set())
        self.encode = self._make_encoder(set(self.control_tokens))
        """Encode text without producing control tokens."""
        decode_slowly = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._decode: Callable[..., Any] = decode_slowly if self._backend is None else self._backend.decode

    def __reduce__(self) -> tuple[Any, ...]:
        # The encoders of a copy must be made again: the setting that hides control tokens is not part of their state.
        return Vocabulary, (self.tokenizer, self._chat_template)

    def encode_template(self, text: str, literals: Mapping[str, str] | None = None) -> list[int]:
        """Encode the output of a template.

        Args:
            text: The output.
            literals: Text for placeholders in the output. It is encoded as text even if it spells a control token.

        Returns:
            The ids.
        """
        if not literals:
            return self._encode_template(text)
        ids: list[int] = []
        start = 0
        for found in [*self.control_token.finditer(text), None]:
            part = text[start : found.start() if found else None]
            for placeholder, literal in literals.items():
                part = part.replace(placeholder, literal)
            ids += self.encode(part) if part else []
            if found:
                ids.append(self.control_tokens[found[0]])
                start = found.end()
        return ids

    def break_control_tokens(self, text: str) -> str:
        """Insert a space into text that spells a control token: `< |im_end|>`."""
        return self.control_token_pattern.sub(r"\g<0> ", text)

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
            encode = _share_backend(self._backend, hidden).encode
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


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)


def _first_character_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the first character of each occurrence of a text, including overlapping ones.

    Starting with a literal character, the pattern is searched at the speed of C.
    """
    rests: dict[str, list[str]] = {}
    for text in _longest_first(texts):
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or "(?!)")


def _share_backend(backend: Any, hidden: set[str]) -> Any:
    """Return a tokenizer with the same model that treats the hidden tokens as text and neither truncates nor pads."""
    from tokenizers import AddedToken, Tokenizer

    shared = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(shared, part, value)
    added = dict(sorted(backend.get_added_tokens_decoder().items()))
    shared.add_tokens(
        [
            AddedToken(
                token.content,
                special=token.content in hidden,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            for token in added.values()
        ]
    )
    if list(shared.get_added_tokens_decoder()) != list(added):  # ids with gaps can only be read from JSON
        settings = json.loads(backend.to_str())
        settings["truncation"] = settings["padding"] = None
        for token in settings["added_tokens"]:
            token["special"] = token["content"] in hidden
        shared = Tokenizer.from_str(json.dumps(settings))
    shared.encode_special_tokens = True
    return shared
