"""The keys: what each does, said once. The footer, the help and the bindings are all made from here.

Those of verl's rollout viewer (f, n, p, N, P, j, k, g, G, s, tab, ←, →, enter, esc) do what they did there.
"""

from __future__ import annotations

from typing import NamedTuple

from textual.binding import Binding


class Key(NamedTuple):
    """One key, or a pair of them that do the opposite."""

    shown: str
    label: str
    """A word for the footer."""
    help: str
    """A sentence for the help."""
    actions: tuple[tuple[str, str], ...]
    """From textual's name of a key to the action. The first is what a click on the footer does."""


MOVING = (
    Key("n p", "sample", "The next and the previous sample.", (("n", "next_sample"), ("p", "previous_sample"))),
    Key("N P", "step", "The next and the previous step.", (("N", "next_step"), ("P", "previous_step"))),
    Key("j k", "page", "A page down and up in the sample.", (("j", "page_down"), ("k", "page_up"))),
    Key("g G", "ends", "The beginning and the end of the sample.", (("g", "page_home"), ("G", "page_end"))),
    Key(
        "tab ← →",
        "pane",
        "From pane to pane: steps, samples, the sample. In each, ↑ ↓ PgUp PgDn Home End move.",
        (("tab", "next_pane"), ("right", "next_pane"), ("shift+tab", "previous_pane"), ("left", "previous_pane")),
    ),
    Key("enter", "open", "Open the sample; in a sample, go to the next match.", (("enter", "open"),)),
    Key("esc", "back", "Close what is open: a prompt, a search, a view, the sample.", (("escape", "back"),)),
)
FINDING = (
    Key("f", "find", "Find a text in every sample of every step.", (("f", "find"),)),
    Key(
        ". ,",
        "match",
        "The next and the previous match, in whichever sample it is.",
        (("full_stop", "next_match"), ("comma", "previous_match")),
    ),
    Key("/", "filter", "List only samples for which an expression holds, e.g. score < 1.", (("slash", "filter"),)),
    Key(
        "o O",
        "sort",
        "Sort by the next column; the other way around. Numbers as numbers, what is unknown last.",
        (("o", "sort"), ("O", "turn_order")),
    ),
    Key("a", "all", "List the samples of all steps, or of one.", (("a", "all_steps"),)),
    Key("i", "id", "Go to the sample of a request id.", (("i", "request_id"),)),
)
LOOKING = (
    Key("s", "view", "Show the sample as a conversation, as plain text, as a table.", (("s", "switch_display"),)),
    Key("d", "fields", "Choose the fields that plain text and table show.", (("d", "fields"),)),
    Key("z", "fold", "Unfold thinking and long texts, or fold them again. A click does it for one.", (("z", "fold"),)),
    Key(
        "t",
        "tokens",
        "Show the tokens by mask and log-probability: as text, then one per line.",
        (("t", "tokens"),),
    ),
    Key("r", "reward", "Show what it earned and what it took.", (("r", "rewards"),)),
    Key("c", "compare", "Compare with another sample of the same group, side by side.", (("c", "compare"),)),
    Key("l", "plot", "Plot scores, turns, calls, faults, tokens and ends by step.", (("l", "plots"),)),
)
REST = (
    Key("F", "follow", "Go along with a run that is writing: always the newest sample.", (("F", "follow"),)),
    Key("y", "copy", "Copy the sample to the clipboard as Markdown.", (("y", "copy"),)),
    Key("e", "save", "Write the sample to a Markdown file in the present directory.", (("e", "export"),)),
    Key("?", "help", "This help.", (("question_mark", "help"),)),
    Key("q", "quit", "Leave.", (("q", "app.quit"),)),
)
GROUPS = (("moving", MOVING), ("finding", FINDING), ("looking", LOOKING), ("and", REST))
KEYS = (*MOVING, *FINDING, *LOOKING, *REST)


def bindings(keys: tuple[Key, ...]) -> list[Binding]:
    """Textual's bindings of some keys."""
    return [Binding(name, action, key.label, show=False) for key in keys for name, action in key.actions]
