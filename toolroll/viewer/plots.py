"""PlotScreen: the run by step. All plots where there is room, else one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Grid
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from toolroll.errors import MissingExtra
from toolroll.records.index import StepFile
from toolroll.viewer import figures
from toolroll.viewer.help import HelpScreen
from toolroll.viewer.key_bar import KeyBar
from toolroll.viewer.keys import Key, bindings
from toolroll.viewer.trends import StepFigures

try:
    from textual_plotext import PlotextPlot
except ImportError as error:
    raise MissingExtra("textual-plotext", "viewer") from error

KEYS = (
    Key("n p", "plot", "", (("n", "plot(1)"), ("p", "plot(-1)"))),
    Key("enter", "one or all", "", (("enter", "one_or_all"),)),
    Key("?", "help", "", (("question_mark", "help"),)),
    Key("esc l", "back", "", (("escape,l", "back"),)),
    Key("q", "quit", "", (("q", "app.quit"),)),
)
COLORS = ((224, 164, 88), (111, 179, 184), (143, 193, 122), (224, 108, 117), (180, 142, 173), (200, 200, 200))
TICKS = 8

Line = Callable[[StepFigures], float | None]


class Plot(NamedTuple):
    """One plot: a title and its lines."""

    title: str
    lines: Sequence[tuple[str, Line]]


PLOTS = (
    Plot(
        "score",
        (
            ("mean", lambda step: step.score),
            ("lowest", lambda step: step.lowest),
            ("highest", lambda step: step.highest),
        ),
    ),
    Plot("turns per sample", (("turns", lambda step: step.turns),)),
    Plot("tool calls per sample", (("calls", lambda step: step.calls),)),
    Plot(
        "faults per sample",
        (("the model's", lambda step: step.policy_faults), ("the infrastructure's", lambda step: step.infra_faults)),
    ),
    Plot("tokens per sample", (("tokens", lambda step: step.tokens),)),
    Plot("how they ended: share of samples", ()),
)


class PlotScreen(Screen[None]):
    """The plots."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(KEYS)]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012 (as textual declares it)
    DEFAULT_CSS = """
    PlotScreen { layout: vertical; }
    PlotScreen #head { height: 1; background: $panel; padding: 0 1; }
    PlotScreen Grid { height: 1fr; grid-size: 1; }
    PlotScreen PlotextPlot { display: none; }
    PlotScreen PlotextPlot.-chosen { display: block; }
    PlotScreen.-wide.-all Grid { grid-size: 3 2; }
    PlotScreen.-wide.-all PlotextPlot { display: block; }
    """

    def __init__(
        self, steps: Callable[[], Sequence[StepFile]], figures_of: Callable[[StepFile], StepFigures | None]
    ) -> None:
        super().__init__()
        self._steps = steps
        self._figures_of = figures_of
        self._chosen = 0
        self._drawn: list[tuple[int, StepFigures]] | None = None
        self._plots = [PlotextPlot() for _ in PLOTS]

    def compose(self) -> ComposeResult:
        """The plots."""
        yield Static("", id="head", markup=False)
        with Grid():
            yield from self._plots
        yield KeyBar(KEYS)

    def on_mount(self) -> None:
        """Draw, and go on as steps are counted."""
        self.add_class("-all")
        self._draw()
        self.set_interval(0.5, self._draw)

    def _draw(self) -> None:
        steps = [step for step in self._steps() if step.step is not None]
        known = [(step.step or 0, found) for step in steps if (found := self._figures_of(step)) is not None]
        counted = [(number, found) for number, found in known if found.samples]
        left = len(steps) - len(known)
        title = PLOTS[self._chosen].title
        said = f"{figures.plural(len(counted), 'step')} with samples" + (f", {left} still being read" if left else "")
        self.query_one("#head", Static).update(Content(f"by step · {title} · {said}"))
        for number, widget in enumerate(self._plots):
            widget.set_class(number == self._chosen, "-chosen")
        if counted == self._drawn:
            return
        self._drawn = counted
        for plot, widget in zip(PLOTS, self._plots, strict=True):
            _draw(plot, widget.plt, counted)
            widget.refresh()

    def action_plot(self, by: int) -> None:
        """Another plot, by itself."""
        self.remove_class("-all")
        self._chosen = (self._chosen + by) % len(PLOTS)
        self._draw()

    def action_one_or_all(self) -> None:
        """One plot, or all where there is room."""
        self.toggle_class("-all")

    def action_help(self) -> None:
        """The help."""
        self.app.push_screen(HelpScreen())

    def action_back(self) -> None:
        """To the lists."""
        self.dismiss(None)


def _draw(plot: Plot, canvas: Any, counted: Sequence[tuple[int, StepFigures]]) -> None:
    canvas.clear_figure()
    lines = plot.lines or _ends(counted)
    drawn = False
    for number, (label, value) in enumerate(lines):
        points = [(step, found) for step, figure in counted if (found := value(figure)) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            name = label if len(lines) > 1 else None
            canvas.plot(steps, values, label=name, color=COLORS[number % len(COLORS)], marker="braille")
            drawn = True
    canvas.xticks(_ticks([step for step, _ in counted]))
    canvas.title(plot.title if drawn else f"{plot.title}: nothing is known")


def _ticks(steps: Sequence[int]) -> list[int]:
    """Some of the steps, evenly: whole numbers, as steps are."""
    every = max(1, -(-len(steps) // TICKS))
    return list(steps[::every])


def _ends(counted: Sequence[tuple[int, StepFigures]]) -> list[tuple[str, Line]]:
    """A line for each finish reason that there is, the commonest first."""
    totals: dict[str, int] = {}
    for _, step in counted:
        for reason, count in step.finishes.items():
            totals[reason] = totals.get(reason, 0) + count

    def share(reason: str) -> Line:
        return lambda step: step.finishes.get(reason, 0) / step.samples

    return [(reason, share(reason)) for reason in sorted(totals, key=totals.__getitem__, reverse=True)[: len(COLORS)]]
