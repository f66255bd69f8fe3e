"""Files of a model: its directory, and the JSON files beside its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError
from toolroll.schemas import JsonDict


def read_model_file(tokenizer: Any, name: str) -> JsonDict:
    """Return a JSON file of the tokenizer's model, in its directory or in the cache of Hugging Face.

    Args:
        tokenizer: Tokenizer of transformers.
        name: Name of the file, for example "config.json".

    Returns:
        The object in the file, or an empty one if there is no such file.
    """
    model = str(getattr(tokenizer, "name_or_path", "") or "")
    if not model:
        return {}
    path = Path(model) / name
    try:
        if not path.exists():
            from transformers.utils.hub import cached_file

            path = Path(str(cached_file(model, name, local_files_only=True)))
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def check_model_path(model: object) -> None:
    """Check that the directory of a model exists, if it is not the name of a model like "Qwen/Qwen3-8B".

    Raises:
        ConfigError: If it does not exist.
    """
    path = Path(str(model)).expanduser()
    is_name = not path.is_absolute() and len(path.parts) <= 2 and not str(model).startswith((".", "~"))
    if not is_name and not path.is_dir():
        raise ConfigError(f"The model's directory does not exist: {model}.")
