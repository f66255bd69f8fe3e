"""TokenText: the texts of token ids, by a tokenizer that is loaded when it is first asked for."""

from __future__ import annotations

from typing import Any

from toolroll.errors import ConfigError, MissingExtra


class TokenText:
    """From ids to texts. Each id is decoded once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    def load(self) -> None:
        """Load the tokenizer. Takes seconds."""
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtra("transformers", "rollout") from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(f"No tokenizer could be loaded from {self.path!r}: {reason}") from error

    @property
    def is_loaded(self) -> bool:
        """Whether texts can be asked for."""
        return self._tokenizer is not None

    def __call__(self, number: int) -> str:
        """The text of an id. An id that the tokenizer doesn't have is shown as a number."""
        text = self._texts.get(number)
        if text is None:
            try:
                text = str(self._tokenizer.decode([number]))
            except (IndexError, OverflowError, ValueError, TypeError, KeyError):
                text = f"<{number}>"
            self._texts[number] = text
        return text
