"""Plot the statistics of a run by step, in six panels."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, MissingExtra
from toolroll.records.stats.statistics import RunStats, StepStats, merge_stats

logger = logging.getLogger(__name__)

LATENCIES = {"queue wait": "queue_wait", "execution": "execution_time"}
MAX_PLOTTED_STEP = 10**15
"""Maximum absolute value of a plotted step. Matplotlib converts steps to floats."""
COLOURS = ("#3b6ea5", "#c8553d", "#588157", "#8e6c8a", "#b08900", "#5f7470", "#a44a3f", "#4a4e69")


def plot(stats: RunStats, path: Path) -> None:
    """Write a plot to a file.

    Args:
        stats: Statistics to plot.
        path: Path of the file, whose suffix determines the format: .png, .svg or .pdf.

    Raises:
        ConfigError: If there are no steps, or if the file cannot be written.
        MissingExtra: If matplotlib is not installed.
    """
    try:
        import matplotlib.style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "records") from error
    known = [step for step in stats.steps if step is not None]
    steps = sorted(step for step in known if abs(step) <= MAX_PLOTTED_STEP)
    if len(steps) < len(known):
        logger.warning("Not plotted: %d steps beyond ±%d.", len(known) - len(steps), MAX_PLOTTED_STEP)
    if not steps:
        raise ConfigError("Nothing to plot: no record has a step.")
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(15, 8), layout="constrained")
        canvas = FigureCanvasAgg(figure)
        StatsFigure(figure.subplots(2, 3), steps, [stats.steps[step] for step in steps]).draw()
        if path.suffix.removeprefix(".") not in canvas.get_supported_filetypes():
            raise ConfigError(f"Unsupported image format: {path}. Use a name like plot.png.")
        try:
            figure.savefig(path, dpi=110)
        except OSError as error:
            raise ConfigError(f"Cannot write the plot to {path}: {error.strerror}.") from error


class StatsFigure:
    """Draws the six panels."""

    def __init__(self, axes: Any, steps: list[int], stats: list[StepStats]) -> None:
        self._axes = list(axes.flat)
        self._steps = steps
        self._stats = stats
        self._style = {"marker": "o" if len(steps) < 40 else None, "markersize": 4}

    def draw(self) -> None:
        """Draw all panels."""
        score, sample, faults, latency, finish, length = self._axes
        for axis in self._axes:
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            if axis is not finish or len(self._steps) > 1:
                axis.set_xlabel("step")
                axis.set_xlim(self._steps[0] - 0.5, self._steps[-1] + 0.5)
                axis.locator_params("x", integer=True, min_n_ticks=1)
        stats = self._stats
        self._score(score)
        per_sample = {
            "turns": [step.turns / step.samples for step in stats],
            "tool calls": [step.call_count / step.samples for step in stats],
        }
        self._lines(sample, "turns and tool calls per sample", per_sample)
        fault_rates = {
            "policy": [step.calls.policy_faults / step.calls.count if step.calls.count else None for step in stats],
            "infra": [step.calls.infra_faults / step.calls.count if step.calls.count else None for step in stats],
        }
        self._lines(faults, "fraction of tool calls that failed", fault_rates)
        self._latency(latency)
        self._finish_reasons(finish)
        means = [step.tokens.mean if step.tokens.count else None for step in stats]
        self._lines(length, "tokens per sample", {"mean": means})

    def _score(self, axis: Any) -> None:
        axis.set_title("reward")
        known = [(step, stats.score) for step, stats in zip(self._steps, self._stats, strict=True) if stats.score.count]
        steps, scores = [step for step, _ in known], [score for _, score in known]
        if known:
            low = [max(score.mean - score.std, score.min) for score in scores]
            high = [min(score.mean + score.std, score.max) for score in scores]
            axis.fill_between(steps, low, high, color=COLOURS[0], alpha=0.15, linewidth=0, label="± std")
            axis.plot(steps, [score.mean for score in scores], color=COLOURS[0], label="mean", **self._style)
        _legend(axis)

    def _latency(self, axis: Any) -> None:
        for (name, attribute), colour in zip(LATENCIES.items(), COLOURS, strict=False):
            for fraction, line in ((0.5, "-"), (0.99, ":")):
                values = [getattr(step.calls, attribute).quantile(fraction) for step in self._stats]
                self._line(axis, f"{name}, p{100 * fraction:g}", values, color=colour, linestyle=line)
        axis.set_title("latency of tool calls (s)")
        if any(value > 0 for line in axis.lines for value in line.get_ydata()):
            axis.set_yscale("log", nonpositive="clip")
        _legend(axis)

    def _finish_reasons(self, axis: Any) -> None:
        """Draw the finish reasons, the most frequent one at the bottom."""
        reasons = [reason for reason, _ in merge_stats(self._stats).finish_counts.most_common()]
        fractions = [[step.finish_counts[reason] / step.samples for step in self._stats] for reason in reasons]
        axis.set_title("finish reasons")
        if len(self._steps) == 1:
            axis.barh(reasons, [fraction[0] for fraction in fractions], color=COLOURS[0])
            axis.set_xlabel("fraction of samples")
            axis.invert_yaxis()
        else:
            axis.stackplot(self._steps, fractions, labels=reasons, colors=COLOURS, alpha=0.85)
            axis.set_ylim(0, 1)
            axis.legend(fontsize="small", loc="lower left", framealpha=0.85, reverse=True)

    def _lines(self, axis: Any, title: str, lines: Mapping[str, Sequence[float | None]]) -> None:
        axis.set_title(title)
        for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
            self._line(axis, name, values, color=colour)
        if axis.lines:
            axis.set_ylim(bottom=0)
        _legend(axis)

    def _line(self, axis: Any, name: str, values: Sequence[float | None], **style: Any) -> None:
        known = [(step, value) for step, value in zip(self._steps, values, strict=True) if value is not None]
        if known:
            axis.plot(*zip(*known, strict=True), label=name, **self._style, **style)


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small", framealpha=0.85)
    else:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color="#888888")
