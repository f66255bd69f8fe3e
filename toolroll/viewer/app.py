"""RolloutViewer: what `toolroll view` runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.constants import DEFAULT_THEME
from textual.screen import Screen

from toolroll.errors import ConfigError
from toolroll.records.index import Shelf
from toolroll.viewer.browse import BrowseScreen
from toolroll.viewer.harmless import DEFAULT_MASK
from toolroll.viewer.palette import THEME
from toolroll.viewer.token_text import TokenText


class RolloutViewer(App[None]):
    """Shows a directory of dumps.

    Args:
        directory: Where the dumps are: a `rollout_data_dir`, or one file of it.
        tokenizer: Where the model's tokenizer is, for the texts of tokens.
        mask_str: A regular expression; what it matches is shown as `*`.
        follow: Begin with the newest sample, and go along with the run.
        every: Seconds between two looks at the directory.
    """

    TITLE = "toolroll"
    ENABLE_COMMAND_PALETTE: ClassVar[bool] = False

    def __init__(
        self,
        directory: str | Path,
        *,
        tokenizer: str | None = None,
        mask_str: str = DEFAULT_MASK,
        follow: bool = False,
        every: float = 1.0,
    ) -> None:
        super().__init__()
        try:
            mask = re.compile(mask_str) if mask_str else None
        except re.error as error:
            raise ConfigError(f"The mask {mask_str!r} is no regular expression: {error}.") from error
        self._browse = BrowseScreen(
            Shelf(directory),
            tokenizer=TokenText(tokenizer) if tokenizer else None,
            mask=mask,
            follow=follow,
            every=every,
        )
        self.register_theme(THEME)
        if DEFAULT_THEME == "textual-dark":  # TEXTUAL_THEME names another one
            self.theme = THEME.name

    def get_default_screen(self) -> Screen[None]:
        """The lists."""
        return self._browse
