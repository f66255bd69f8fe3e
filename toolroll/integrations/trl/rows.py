"""Rows: what else a data set has of a prompt.

TRL hands a rollout function the prompts alone. The ground truth, `tools_kwargs` and whatever else a tool or a reward
needs stand in other columns; they are found again by the prompt. Two rows of one prompt must be alike then: which of
them was meant nobody could say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from toolroll.errors import ConfigError


class Rows:
    """Of a data set, or of several by name. One that can only be gone through (an IterableDataset) has none."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._by_prompt: dict[bytes, tuple[Any, int]] | None = None

    def of(self, prompt: Any) -> dict[str, Any]:
        """The other columns of a prompt's row, without those that are empty there."""
        if self._by_prompt is None:
            self._by_prompt = self._read()
        found = self._by_prompt.get(_mark(prompt))
        return {} if found is None else _others(found[0][found[1]])

    def _read(self) -> dict[bytes, tuple[Any, int]]:
        by_prompt: dict[bytes, tuple[Any, int]] = {}
        for dataset in _parts(self._dataset):
            if set(dataset.column_names) <= {"prompt"}:
                continue
            for number, prompt in enumerate(dataset["prompt"]):
                mark = _mark(prompt)
                first, place = by_prompt.setdefault(mark, (dataset, number))
                if (first is not dataset or place != number) and _others(first[place]) != _others(dataset[number]):
                    raise ConfigError(
                        f"Rows {place} and {number} of the data set have the same prompt, and differ elsewhere. A "
                        "rollout function is given prompts only: make them differ, or drop one."
                    )
        return by_prompt


def _parts(dataset: Any) -> Iterator[Any]:
    for one in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        if hasattr(one, "__getitem__") and hasattr(one, "column_names"):
            yield one


def _mark(prompt: Any) -> bytes:
    return blake2b(orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS, default=str), digest_size=16).digest()


def _others(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "prompt" and value is not None}


def plain(value: Any) -> Any:
    """JSON without keys that are null: a table has every key of any row in all of them."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if item is not None}
    return [plain(item) for item in value] if isinstance(value, list) else value
