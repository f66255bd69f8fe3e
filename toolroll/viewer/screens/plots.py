"""Screen with plots of the run by step: all plots on a wide screen, else one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Grid
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from toolroll.errors import MissingExtra
from toolroll.viewer import formatting
from toolroll.viewer.keys import HELP_KEY, QUIT_KEY, KeyAction, KeyBar, bindings
from toolroll.viewer.screens.navigator import SampleNavigator
from toolroll.viewer.widgets.background import StepTrend

try:
    from textual_plotext import PlotextPlot
except ImportError as error:
    raise MissingExtra("textual-plotext", "viewer") from error

PLOT_KEYS = (
    KeyAction("n p", "plot", {"n": "move_plot(1)", "p": "move_plot(-1)"}),
    KeyAction("enter", "one/all", {"enter": "toggle_all"}),
    HELP_KEY,
    KeyAction("esc l", "back", {"escape,l": "dismiss(None)"}),
    QUIT_KEY,
)
LINE_COLORS = ((224, 164, 88), (111, 179, 184), (143, 193, 122), (224, 108, 117), (180, 142, 173), (200, 200, 200))
MAX_TICKS = 8
REDRAW_INTERVAL_S = 0.5

PlotValue = Callable[[StepTrend], float | None]


class PlotSpec(NamedTuple):
    """Title and lines of a plot. Without lines, the finish reasons are plotted."""

    title: str
    lines: Mapping[str, PlotValue] = {}


PLOTS = (
    PlotSpec("score", {"mean": attrgetter("score"), "lowest": attrgetter("lowest"), "highest": attrgetter("highest")}),
    PlotSpec("turns per sample", {"turns": attrgetter("turns")}),
    PlotSpec("tool calls per sample", {"calls": attrgetter("calls")}),
    PlotSpec("faults per sample", {"policy": attrgetter("policy_faults"), "infra": attrgetter("infra_faults")}),
    PlotSpec("tokens per sample", {"tokens": attrgetter("tokens")}),
    PlotSpec("finish reasons (share of samples)"),
)


class PlotScreen(Screen[None]):
    """Plots that are updated while steps are being counted.

    Args:
        navigator: Knows the current steps and their aggregates.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(PLOT_KEYS)]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012 (declared so by Textual)
    DEFAULT_CSS = """
    PlotScreen #head { height: 1; background: $panel; padding: 0 1; }
    PlotScreen Grid { height: 1fr; grid-size: 1; }
    PlotScreen PlotextPlot { display: none; }
    PlotScreen PlotextPlot.-chosen { display: block; }
    PlotScreen.-wide.-all Grid { grid-size: 3 2; }
    PlotScreen.-wide.-all PlotextPlot { display: block; }
    """

    def __init__(self, navigator: SampleNavigator) -> None:
        super().__init__(classes="-all")
        self._navigator = navigator
        self._chosen = 0
        self._drawn: list[tuple[int, StepTrend]] | None = None
        self._plots = [PlotextPlot() for _ in PLOTS]

    def compose(self) -> ComposeResult:
        """Compose the title, the plots and the footer."""
        yield Static("", id="head", markup=False)
        with Grid():
            yield from self._plots
        yield KeyBar(PLOT_KEYS)

    def on_mount(self) -> None:
        """Draw the plots and keep them up to date."""
        self._draw()
        self.set_interval(REDRAW_INTERVAL_S, self._draw)

    def _draw(self) -> None:
        trend_of = self._navigator.background.trend_of
        steps = [step for step in self._navigator.steps if step.step is not None]
        known = [(step.step or 0, trend) for step in steps if (trend := trend_of(step)) is not None]
        counted = [(number, trend) for number, trend in known if trend.samples]
        title = f"{PLOTS[self._chosen].title} by step · {formatting.plural(len(counted), 'step')} with samples"
        if len(known) < len(steps):
            title += f", {len(steps) - len(known)} still loading"
        self.query_one("#head", Static).update(Content(title))
        for number, widget in enumerate(self._plots):
            widget.set_class(number == self._chosen, "-chosen")
        if counted == self._drawn:
            return
        self._drawn = counted
        for plot, widget in zip(PLOTS, self._plots, strict=True):
            _draw_plot(plot, widget.plt, counted)
            widget.refresh()

    def action_move_plot(self, by: int) -> None:
        """Show the next or the previous plot alone."""
        self.remove_class("-all")
        self._chosen = (self._chosen + by) % len(PLOTS)
        self._draw()

    def action_toggle_all(self) -> None:
        """Switch between one plot and all plots, if the screen is wide enough."""
        self.toggle_class("-all")


def _draw_plot(plot: PlotSpec, canvas: Any, counted: Sequence[tuple[int, StepTrend]]) -> None:
    canvas.clear_figure()
    lines = plot.lines or _finish_reason_lines(counted)
    is_empty = True
    for (label, value), color in zip(lines.items(), LINE_COLORS, strict=False):
        points = [(step, found) for step, trend in counted if (found := value(trend)) is not None]
        if points:
            name = label if len(lines) > 1 else None
            canvas.plot(*zip(*points, strict=True), label=name, color=color, marker="braille")
            is_empty = False
    steps = [step for step, _ in counted]
    canvas.xticks(steps[:: max(1, -(-len(steps) // MAX_TICKS))])
    canvas.title(f"{plot.title}: no data" if is_empty else plot.title)


def _finish_reason_lines(counted: Sequence[tuple[int, StepTrend]]) -> dict[str, PlotValue]:
    """Return a line for each of the most frequent finish reasons."""
    totals = sum((trend.finish_reasons for _, trend in counted), Counter[str]())

    def share_of(reason: str) -> PlotValue:
        return lambda trend: trend.finish_reasons[reason] / trend.samples

    return {reason: share_of(reason) for reason, _ in totals.most_common(len(LINE_COLORS))}
