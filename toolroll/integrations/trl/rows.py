"""DatasetRows: look up the other columns of a prompt's dataset row.

TRL passes only the prompts to a rollout function. Tools and rewards need other columns, such as the ground truth and
`tools_kwargs`, which are looked up by the prompt. Rows with the same prompt must therefore be identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any

import orjson

from toolroll.errors import ConfigError


class DatasetRows:
    """Lookup of rows by prompt.

    Args:
        dataset: A dataset, or several by name. An IterableDataset has no random access and therefore no rows.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def columns_for(self, prompt: Any) -> dict[str, Any]:
        """Return the other columns of a prompt's row, without null values.

        Raises:
            ConfigError: If two rows have the same prompt and differ in another column.
        """
        found = self._by_prompt.get(_hash_prompt(prompt))
        return {} if found is None else _other_columns(found[0][found[1]])

    @cached_property
    def _by_prompt(self) -> dict[bytes, tuple[Any, int]]:
        by_prompt: dict[bytes, tuple[Any, int]] = {}
        for dataset in _indexable_datasets(self._dataset):
            if set(dataset.column_names) <= {"prompt"}:
                continue
            for number, prompt in enumerate(dataset["prompt"]):
                first_dataset, first = by_prompt.setdefault(_hash_prompt(prompt), (dataset, number))
                is_duplicate = first_dataset is not dataset or first != number
                if is_duplicate and _other_columns(first_dataset[first]) != _other_columns(dataset[number]):
                    raise ConfigError(
                        f"Rows {first} and {number} of the dataset have the same prompt but differ in other columns. "
                        "TRL passes only prompts to a rollout function: make the prompts unique, or remove a row."
                    )
        return by_prompt


def _indexable_datasets(dataset: Any) -> Iterator[Any]:
    for one in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        if hasattr(one, "__getitem__") and hasattr(one, "column_names"):
            yield one


def _hash_prompt(prompt: Any) -> bytes:
    return blake2b(orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS, default=str), digest_size=16).digest()


def _other_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "prompt" and value is not None}


def without_nulls(value: Any) -> Any:
    """Return a JSON value without null entries in its objects, which Arrow tables add to rows that lack a key."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
