"""A run's statistics as a picture: step by step, in six panels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolroll.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from toolroll.records.stats import Stats, Tally

Value = Callable[["Tally"], float | None]
LATENCIES = {"queue wait": "queue_wait", "execution": "execution_time"}
COLOURS = ("#3b6ea5", "#c8553d", "#588157", "#8e6c8a", "#b08900", "#5f7470", "#a44a3f", "#4a4e69")


def plot(stats: Stats, path: Path) -> None:
    """Write the picture. What kind it is the name's ending says: .png, .svg, .pdf."""
    try:
        import matplotlib.style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingExtra("matplotlib", "records") from error
    steps = sorted(step for step in stats.steps if step is not None)
    if not steps:
        raise ConfigError("There is nothing to plot: no record says which step it is of.")
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(15, 8), layout="constrained")
        canvas = FigureCanvasAgg(figure)
        panels = Panels(figure.subplots(2, 3), steps, [stats.steps[step] for step in steps])
        panels.draw(lambda: MaxNLocator(integer=True, min_n_ticks=1))
        if path.suffix.removeprefix(".") not in canvas.get_supported_filetypes():
            raise ConfigError(f"{path}: a plot can't be of that kind. Name it like plot.png.")
        try:
            figure.savefig(path, dpi=110)
        except OSError as error:
            raise ConfigError(f"The plot can't be written to {path}: {error.strerror}.") from error


class Panels:
    """The six panels, over the same steps."""

    def __init__(self, axes: Any, steps: list[int], tallies: list[Tally]) -> None:
        self._axes = list(axes.flat)
        self._steps = steps
        self._tallies = tallies
        self._style = {"marker": "o" if len(steps) < 40 else None, "markersize": 4}

    def draw(self, whole_numbers: Callable[[], Any]) -> None:
        """All of them. `whole_numbers` makes what finds the ticks of the steps."""
        score, sample, faults, latency, endings, length = self._axes
        for axis in self._axes:
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            if axis is not endings or len(self._steps) > 1:
                axis.set_xlabel("step")
                axis.set_xlim(self._steps[0] - 0.5, self._steps[-1] + 0.5)
                axis.xaxis.set_major_locator(whole_numbers())
        self._score(score)
        self._lines(sample, "turns and tool calls per sample", {"turns": _turns, "tool calls": _calls})
        self._lines(faults, "share of tool calls that failed", {"the model's fault": _policy, "infrastructure": _infra})
        self._latency(latency)
        self._endings(endings)
        self._lines(length, "tokens per sample", {"mean": _tokens})

    def _score(self, axis: Any) -> None:
        axis.set_title("reward")
        known = [(step, one.score) for step, one in zip(self._steps, self._tallies, strict=True) if one.score.count]
        steps, scores = [step for step, _ in known], [score for _, score in known]
        if known:
            low = [max(score.mean - score.deviation, score.least) for score in scores]
            high = [min(score.mean + score.deviation, score.most) for score in scores]
            axis.fill_between(steps, low, high, color=COLOURS[0], alpha=0.15, linewidth=0, label="± std")
            axis.plot(steps, [score.mean for score in scores], color=COLOURS[0], label="mean", **self._style)
        _legend(axis)

    def _latency(self, axis: Any) -> None:
        for (name, which), colour in zip(LATENCIES.items(), COLOURS, strict=False):
            for share, line in ((0.5, "-"), (0.99, ":")):
                self._line(axis, f"{name}, p{100 * share:g}", _quantile(which, share), color=colour, linestyle=line)
        axis.set_title("seconds of a tool call")
        if any(value > 0 for line in axis.lines for value in line.get_ydata()):
            axis.set_yscale("log", nonpositive="clip")
        _legend(axis)

    def _endings(self, axis: Any) -> None:
        """The most frequent at the bottom."""
        counts: Counter[str] = Counter()
        for tally in self._tallies:
            counts.update(tally.endings)
        reasons = [reason for reason, _ in counts.most_common()]
        shares = [[tally.endings[reason] / tally.samples for tally in self._tallies] for reason in reasons]
        axis.set_title("finish reasons")
        if len(self._steps) == 1:
            axis.barh(reasons, [share[0] for share in shares], color=COLOURS[0])
            axis.set_xlabel("share of samples")
            axis.invert_yaxis()
        else:
            axis.stackplot(self._steps, shares, labels=reasons, colors=COLOURS, alpha=0.85)
            axis.set_ylim(0, 1)
            axis.legend(fontsize="small", loc="lower left", framealpha=0.85, reverse=True)

    def _lines(self, axis: Any, title: str, lines: Mapping[str, Value]) -> None:
        axis.set_title(title)
        for (name, value), colour in zip(lines.items(), COLOURS, strict=False):
            self._line(axis, name, value, color=colour)
        if axis.lines:
            axis.set_ylim(bottom=0)
        _legend(axis)

    def _line(self, axis: Any, name: str, value: Value, **style: Any) -> None:
        pairs = zip(self._steps, map(value, self._tallies), strict=True)
        known = [(step, found) for step, found in pairs if found is not None]
        if known:
            axis.plot(*zip(*known, strict=True), label=name, **self._style, **style)


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small", framealpha=0.85)
    else:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color="#888888")


def _turns(tally: Tally) -> float:
    return tally.turns / tally.samples


def _calls(tally: Tally) -> float:
    return tally.made / tally.samples


def _tokens(tally: Tally) -> float | None:
    return tally.tokens.mean if tally.tokens.count else None


def _policy(tally: Tally) -> float | None:
    return tally.calls.policy_faults / tally.calls.count if tally.calls.count else None


def _infra(tally: Tally) -> float | None:
    return tally.calls.infra_faults / tally.calls.count if tally.calls.count else None


def _quantile(which: str, share: float) -> Value:
    def value(tally: Tally) -> float | None:
        found: float | None = getattr(tally.calls, which).quantile(share)
        return found

    return value
