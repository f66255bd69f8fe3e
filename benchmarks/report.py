"""The end of a benchmark: it prints its figures, and fails if one is out of its bounds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def report(figures: Mapping[str, Any], bounds: Mapping[str, Callable[[float], bool]], *, as_json: bool) -> None:
    """Print the figures. Exit with status 1 and name those that are out of bounds, if there are any.

    Args:
        figures: Names and values.
        bounds: For some of the figures, a function that returns True if the value is within the bounds.
        as_json: Print one JSON object instead of lines.
    """
    width = max(map(len, figures))
    print(json.dumps(figures) if as_json else "\n".join(f"{name:{width}} {value}" for name, value in figures.items()))
    if broken := [f"{name} = {figures[name]}" for name, is_within in bounds.items() if not is_within(figures[name])]:
        sys.exit(f"out of bounds: {', '.join(broken)}")
