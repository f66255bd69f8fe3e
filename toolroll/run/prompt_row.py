"""PromptRow: a row of data as a prompt, by the columns that the config names.

A name with dots leads into a column: `reward_model.ground_truth`. What isn't used for the prompt is carried along, and
reaches rewards as `trajectory.extra`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from toolroll.run.config import DataConfig

OWN = ("prompt", "messages", "tools_kwargs", "group")
"""Keys of a prompt that mean something: a column of such a name isn't carried along unless the config names it."""


class UnusableRow(Exception):
    """A row that gives no prompt. The message says why."""


class PromptRow:
    """Makes prompts of rows.

    >>> made = PromptRow(DataConfig(path="x.jsonl", prompt="question", ground_truth="answer"))
    >>> made.prompt({"question": "What is 6 times 7?", "answer": "42", "level": 1})
    {'answer': '42', 'level': 1, 'prompt': 'What is 6 times 7?', 'ground_truth': '42'}
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config

    def missing(self, row: Mapping[str, Any]) -> str | None:
        """A column that the config names and the row doesn't have."""
        for name in self._named():
            try:
                self._at(row, name)
            except KeyError:
                return name
        return None

    def prompt(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The prompt that a row is. Raises UnusableRow."""
        config = self._config
        given = self._get(row, config.prompt)
        made = {name: value for name, value in row.items() if name not in OWN and name != config.prompt}
        made |= self._opening(given)
        if config.ground_truth is not None:
            made["ground_truth"] = self._get(row, config.ground_truth)
        if isinstance(config.tools_kwargs, dict):
            made["tools_kwargs"] = self._filled(config.tools_kwargs, row)
        elif config.tools_kwargs is not None:
            made.pop(config.tools_kwargs, None)
            made["tools_kwargs"] = _tools_kwargs(self._get(row, config.tools_kwargs))
        elif "tools_kwargs" in row:
            made["tools_kwargs"] = _tools_kwargs(row["tools_kwargs"])
        return made

    def _opening(self, given: Any) -> dict[str, Any]:
        """The conversation as it begins."""
        system = [] if self._config.system is None else [{"role": "system", "content": self._config.system}]
        if isinstance(given, str) and given:
            return {"messages": [*system, {"role": "user", "content": given}]} if system else {"prompt": given}
        if not isinstance(given, list) or not given or not all(isinstance(one, Mapping) for one in given):
            shown = "empty" if given in (None, "", []) else f"neither a text nor messages: {given!r:.60}"
            raise UnusableRow(f"{self._config.prompt} is {shown}.")
        messages = [_without_nulls(message) for message in given]
        return {"messages": messages if messages[0].get("role") == "system" else [*system, *messages]}

    def _named(self) -> Iterator[str]:
        config = self._config
        yield config.prompt
        if config.ground_truth is not None:
            yield config.ground_truth
        if isinstance(config.tools_kwargs, dict):
            yield from _columns(config.tools_kwargs)
        elif config.tools_kwargs is not None:
            yield config.tools_kwargs

    def _filled(self, template: Any, row: Mapping[str, Any]) -> Any:
        """A template with what the row has in place of `{column: NAME}`."""
        if (name := _column(template)) is not None:
            return self._get(row, name)
        if isinstance(template, dict):
            return {key: self._filled(value, row) for key, value in template.items()}
        if isinstance(template, list):
            return [self._filled(value, row) for value in template]
        return template

    def _get(self, row: Mapping[str, Any], name: str) -> Any:
        try:
            return self._at(row, name)
        except KeyError:
            raise UnusableRow(f"It has no {name}.") from None

    def _at(self, row: Mapping[str, Any], name: str) -> Any:
        if name in row:
            return row[name]
        if name == "prompt" and "messages" in row:  # as the default has it, and as the data most often have it
            return row["messages"]
        value: Any = row
        for part in name.split("."):
            if not isinstance(value, Mapping):
                raise KeyError(name)
            value = value[part]
        return value


def _column(value: Any) -> str | None:
    """The name, where a value is `{column: NAME}`."""
    if isinstance(value, dict) and value.keys() == {"column"} and isinstance(value["column"], str):
        return value["column"]
    return None


def _columns(template: Any) -> Iterator[str]:
    if (name := _column(template)) is not None:
        yield name
    elif isinstance(template, dict | list):
        for value in template.values() if isinstance(template, dict) else template:
            yield from _columns(value)


def _tools_kwargs(given: Any) -> dict[str, Any]:
    """By tool. They may be written as JSON. A null is as if it weren't there: Parquet has every key in every row."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise UnusableRow(f"tools_kwargs is no JSON: {error}.") from None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UnusableRow(f"tools_kwargs is no object: {given!r:.60}.")
    return {
        tool: {kind: _without_nulls(kwargs) for kind, kwargs in kinds.items() if isinstance(kwargs, Mapping)}
        for tool, kinds in given.items()
        if isinstance(kinds, Mapping)
    }


def _without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}
