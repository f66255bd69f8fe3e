"""Names and messages of alarms, for displays. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALARM_LABELS = {
    "malformed": "samples with malformed tool calls",
    "infra": "samples with infra faults",
    "truncated": "truncated samples",
    "rerendered": "re-rendered samples",
}
"""Shares that are watched, with their names for people."""


def alarm_messages(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a message for each active alarm in the result of `RunAlarms.figures`, by the name of the share."""
    return {
        name: f"{100 * figure['share']:.1f} % {ALARM_LABELS[name]}, {100 * figure['baseline']:.1f} % before"
        for name, figure in figures.items()
        if figure["alarm"]
    }
