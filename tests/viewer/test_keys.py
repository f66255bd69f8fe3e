"""Every key of the viewer."""

import json
from pathlib import Path

import pytest
from textual.widgets import Input

from toolroll.viewer.keys import BROWSE_KEYS
from toolroll.viewer.screens import compare, plots
from toolroll.viewer.screens.browse import BrowseScreen
from toolroll.viewer.screens.compare import CompareScreen
from toolroll.viewer.screens.dialogs import HelpScreen
from toolroll.viewer.screens.plots import PlotScreen
from viewer.driving import NARROW, WIDE, User, Viewer, viewing
from viewer.dumps import write_toolroll_run

pytestmark = pytest.mark.viewer

VERL_KEYS = set("fnpNPjkgGs") | {"tab", "left", "right", "enter", "escape"}
"""Keys of verl's rollout viewer."""


@pytest.mark.parametrize("size", [NARROW, WIDE])
async def test_footer_and_help_show_every_key(our_run: Path, size: tuple[int, int]) -> None:
    bound = {name for key in BROWSE_KEYS for name, _ in key.actions.items()}
    assert bound >= VERL_KEYS
    actions = [action.split("(")[0] for key in BROWSE_KEYS for action in key.actions.values()]
    assert all(hasattr(BrowseScreen, f"action_{action}") for action in actions if "." not in action)
    async with viewing(our_run, size) as user:
        footer = " ".join(user.lines[-3:])
        for key in BROWSE_KEYS:
            assert f"{key.shown} {key.label}" in footer
        if size is WIDE:
            return
        await user.press("question_mark")
        assert isinstance(user.app.screen, HelpScreen)
        seen = user.text
        for _ in range(6):
            await user.press("j")
            seen += user.text
        for key in BROWSE_KEYS:
            assert key.help.split(":")[0].split(",")[0][:30] in " ".join(seen.split())
        await user.press("k", "escape")
        assert isinstance(user.app.screen, BrowseScreen)


@pytest.mark.parametrize("keys", [compare.COMPARE_KEYS, plots.PLOT_KEYS])
def test_keys_of_other_screens_have_actions(keys: tuple[object, ...]) -> None:
    screen = CompareScreen if keys is compare.COMPARE_KEYS else PlotScreen
    for key in keys:
        for action in key.actions.values():  # type: ignore[attr-defined]
            name = action.split("(")[0]
            assert "." in name or hasattr(screen, f"action_{name}")


async def test_click_on_footer_runs_action(our_run: Path) -> None:
    async with viewing(our_run) as user:
        line = next(number for number, text in enumerate(user.lines) if "N P step" in text)
        await user.pilot.click(offset=(user.lines[line].index("N P") + 1, line))
        await user.settle()
        assert user.browse.navigator.step_list.cursor == 1


async def test_samples_and_steps_wrap_around(run: Path) -> None:
    async with viewing(run) as user:
        listed, steps = len(user.browse.navigator.listing), len(user.browse.navigator.steps)
        await user.sees(f"sample 1 of {listed}")
        await user.press("n")
        await user.sees(f"sample 2 of {listed}")
        assert user.pane.position is not None
        assert user.pane.position.row == 1
        await user.press("p", "p")
        await user.sees(f"sample {listed} of {listed}")
        await user.press("n")
        await user.sees(f"sample 1 of {listed}")
        await user.press("n", "N")
        assert user.browse.navigator.step is user.browse.navigator.steps[1]
        await user.sees("sample 1 of")
        await user.press(*["N"] * (steps - 1))
        assert user.browse.navigator.step is user.browse.navigator.steps[0]
        await user.press("P")
        assert user.browse.navigator.step is user.browse.navigator.steps[-1]


async def test_sample_scrolls_from_any_pane(run: Path) -> None:
    async with viewing(run) as user:
        view = user.pane.content
        for focus in ("samples", "steps"):
            user.browse.query_one(f"#{focus}").focus()
            await user.press("j")
            page = view.scroll_offset.y
            assert page > 3
            await user.press("G")
            assert view.scroll_offset.y == view.max_scroll_y > page
            await user.press("k")
            assert view.scroll_offset.y < view.max_scroll_y
            await user.press("g")
            assert view.scroll_offset.y == 0


async def test_panes_are_switched_by_tab_and_arrows(our_run: Path) -> None:
    async with viewing(our_run) as user:
        panes = [user.browse.navigator.step_list, user.browse.navigator.sample_list, user.pane.content]

        def focused() -> int:
            return panes.index(user.app.focused)  # type: ignore[arg-type]

        assert focused() == 1
        seen = []
        for key in ("tab", "tab", "right", "left", "shift+tab"):
            await user.press(key)
            seen.append(focused())
        assert seen == [2, 0, 1, 0, 2]
        assert "faults" not in user.text  # a narrow screen shows only the sample
        await user.press("escape")
        assert focused() == 1
        await user.sees("faults")
        await user.press("enter")
        assert focused() == 2
        await user.press("tab", "down", "enter")
        assert (focused(), user.browse.navigator.step_list.cursor) == (1, 1)
        await user.press("down", "down", "pagedown", "up")
        assert 2 < user.browse.navigator.sample_list.cursor < 15
        await user.press("end")
        assert user.browse.navigator.sample_list.cursor == 15
        await user.press("home")
        assert user.browse.navigator.sample_list.cursor == 0


async def test_find_moves_through_matches_of_all_samples(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("f")
        await user.type("Traceback")
        await user.press("enter")
        search = user.browse.search.current
        assert search is not None
        assert search.match_count == len(search) > 10
        await user.sees(f"match 1 of {search.match_count} in")
        await user.sees("▎ Traceback (most recent call last):")
        assert user.pane.position == search[0]
        await user.press("full_stop")
        await user.sees(f"match 2 of {search.match_count}")
        assert user.pane.position == search[1]
        await user.press("enter")  # like verl's viewer
        await user.sees(f"match 3 of {search.match_count}")
        await user.press("comma", "comma", "comma")
        await user.sees(f"match {search.match_count} of {search.match_count}")
        assert user.pane.position == search[len(search) - 1]
        assert user.browse.navigator.step is not user.browse.navigator.steps[0]
        await user.press("escape")
        assert user.browse.search.current is None
        assert "match" not in user.lines[-4]


async def test_find_unfolds_blocks_in_every_display(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("f")
        await user.type("i should compute")
        await user.press("enter")
        await user.sees("▾ thinking")
        await user.sees("I should compute this.")
        counted = user.browse.search.current.match_count if user.browse.search.current else 0
        for _ in range(2):  # plain text, table
            await user.press("s")
            assert user.browse.search.current is not None
            assert user.browse.search.current.match_count >= counted  # in `input` or `output`, and in `messages`
            await user.press("full_stop")
            await user.sees("I should compute this.")
        await user.press("escape", "f")
        await user.type("no such text anywhere")
        await user.press("enter")
        await user.sees("0 matches in 0 samples")
        await user.press("full_stop", "escape", "full_stop")
        assert "No search" in user.notification


async def test_find_respects_filter(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("slash")
        await user.type("score==0")
        await user.press("enter", "f")
        await user.type("####")
        await user.press("enter")
        search = user.browse.search.current
        assert search is not None
        positions = [search[index] for index in range(len(search))]
        assert positions
        assert all(position.step.column("score")[position.row] == 0 for position in positions)


async def test_filter_reports_errors_while_typing(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("slash")
        await user.sees("e.g. score < 0.5")
        await user.type("score <")
        line = next(number for number, text in enumerate(user.lines) if text.startswith(" filter score <"))
        assert user.lines[line + 1].index("^ incomplete expression") == user.lines[line].index("<") + 1
        await user.press("enter")
        assert isinstance(user.app.focused, Input)  # invalid input is not accepted
        await user.type(" 1 and scoer == 2")
        await user.sees("no field 'scoer' (did you mean 'score'?)")
        await user.press("ctrl+u")
        await user.type("score < 1")
        await user.press("enter")
        assert set(user.scores) == {"0"}
        await user.sees(f"filter score < 1: {len(user.scores)} of 16")
        await user.press("N")
        assert set(user.scores) == {"0"}
        await user.press("slash")
        await user.press("ctrl+u")
        await user.type("score > 7")
        await user.press("enter")
        await user.sees("No matching samples")
        await user.press("slash", "ctrl+u", "enter")
        assert len(user.scores) == 16


async def test_filter_covers_all_steps_and_any_field(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("a", "slash")
        await user.type("'prnt' in text(line.calls) and extra.difficulty==2")
        await user.press("enter")
        assert user.browse.navigator.listing.examined == 48
        assert 0 < len(user.browse.navigator.listing) < 48
        assert "step" in user.lines[1][20:]
        await user.press("escape")
        assert len(user.browse.navigator.listing) == 48
        user.browse.navigator.select(0)
        await user.press("N")
        await user.sees("sample 17 of 48")
        await user.press("P", "P")
        await user.sees("sample 33 of 48")
        await user.press("a")
        await user.sees("sample 1 of 16")
        assert user.browse.navigator.step is user.browse.navigator.steps[2]


async def test_sort_is_numeric_in_both_directions(tmp_path: Path) -> None:
    scores = [9, 0.5, None, 1.0, 2e-05, 10, -0.05]
    lines = [json.dumps({"input": "q", "output": "a", "score": score, "step": 1}) for score in scores]
    (tmp_path / "1.jsonl").write_text("\n".join(lines) + "\n")
    async with viewing(tmp_path) as user:
        await user.press("o")
        assert user.scores == ["-0.05", "2e-05", "0.5", "1", "9", "10", "–"]
        column = user.lines[1].index("score↑") + 6
        assert [line[:column].split()[-1] for line in user.lines[2:8]] == ["-0.05", "2e-05", "0.5", "1", "9", "10"]
        assert user.pane.position is not None
        assert user.pane.position.row == 6
        await user.press("O")
        assert user.scores == ["10", "9", "1", "0.5", "2e-05", "-0.05", "–"]
        assert "score↓" in user.lines[1]
        await user.press("n")
        assert user.pane.position.row == 0
        await user.press(*["o"] * 7)
        assert user.scores == ["9", "0.5", "–", "1", "2e-05", "10", "-0.05"]
        await user.pilot.click("#samples", offset=(13, 0))
        await user.settle()
        assert user.scores[0] == "-0.05"


async def test_request_id_selects_sample(our_run: Path) -> None:
    async with viewing(our_run) as user:
        step = user.browse.navigator.steps[2]
        step.index()
        identity = step.column("request_id")[5]
        await user.press("slash")
        await user.type("score > 99")
        await user.press("enter", "i")
        await user.type(identity.replace("-", ""))
        await user.press("enter")
        assert user.pane.position == (step, 5)
        assert "Filter cleared" in user.notification
        await user.press("i")
        await user.type("[b]no")
        await user.press("enter")
        assert "No sample has the request ID [b]no" in user.notification


async def test_displays_cycle(run: Path) -> None:
    async with viewing(run) as user:
        await user.sees("▎ user")
        await user.press("s")
        assert user.pane.current_display == "plain"
        await user.sees("▎ input")
        await user.press("s")
        assert any(line.startswith("input ") and "│ " in line for line in user.lines)
        assert user.pane.current_display == "table"
        await user.press("s")
        assert user.pane.current_display == "conversation"
        await user.press("s", "escape")
        assert user.pane.current_display == "conversation"


async def test_field_choice_hides_fields(run: Path) -> None:
    async with viewing(run) as user:
        await user.press("d")
        await user.sees("space toggle · a all/none")
        await user.press("space", "escape")  # input is the first
        assert user.pane.current_display == "plain"
        assert "▎ input" not in user.text
        await user.sees("▎ output")
        await user.press("n")
        assert "▎ input" not in user.text
        await user.press("d", "a", "a", "escape")
        await user.sees("No fields selected")
        await user.press("d", "a", "escape")
        await user.sees("▎ input")


async def test_blocks_fold_and_unfold(run: Path) -> None:
    async with viewing(run) as user:
        await user.press("enter")
        await user.sees("▸ thinking")
        await user.press("z")
        await user.sees("▾ thinking")
        await user.press("z")
        await user.sees("▸ thinking")
        line = next(number for number, text in enumerate(user.lines) if "▸ thinking" in text)
        await user.pilot.click(offset=(5, line))
        await user.settle()
        await user.sees("▾ thinking")
        await user.press("t", "z")
        assert "Nothing to fold" in user.notification


async def test_tokens_as_text_and_one_per_line(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("t")
        await user.sees("135 tokens · 64 prompt · 67 sampled · 4 tool · mean log-prob -0.753")
        await user.sees("weights v1")
        await user.sees("mask 0: prompt tool  mask 1: p ≥ 0.9")
        await user.sees("use --tokenizer PATH to show text")
        await user.press("t", "enter")
        await user.still()  # paging depends on the height of the pane
        await user.press(*["j"] * 3)
        assert user.text.count(" 1    model ") > 3
        await user.press("g")
        assert user.text.count(" 0    prompt ") > 3
        await user.press("escape")
        assert user.pane.current_display == "conversation"


async def test_rewards_display_toggles(run: Path) -> None:
    async with viewing(run) as user:
        await user.press("enter", "r")
        await user.sees("▎ ground truth")
        assert "rewards by function" in user.text or "reward extra info" in user.text
        await user.press("r")
        assert user.pane.current_display == "conversation"


async def test_compare_shows_two_samples_of_a_group(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("c")
        assert isinstance(user.app.screen, CompareScreen)
        await user.sees("group gsm8k/0 in step 1: 4 samples")
        names = [line.split()[:2] for line in user.lines[2:4]]
        assert names == [["sample", "1"], ["sample", "2"]]
        assert user.text.count("▸ 4 identical blocks") == 2
        await user.press("z")
        assert user.text.count("▾ 4 identical blocks") == 2
        await user.press("n")
        assert user.lines[3].split()[:2] == ["sample", "3"]
        await user.press("n", "n")
        assert user.lines[3].split()[:2] == ["sample", "2"]  # skips the sample on the left
        await user.press("p", "N", "P", "P")
        left, right = (line.split()[1] for line in user.lines[2:4])
        assert left != right
        before = user.text
        await user.press("G")
        assert user.text != before
        await user.press("g", "j", "k", "tab", "left", "question_mark")
        assert isinstance(user.app.screen, HelpScreen)
        await user.press("escape", "escape")
        assert isinstance(user.app.screen, BrowseScreen)


async def test_compare_without_other_sample_notifies(verl_run: Path) -> None:
    async with viewing(verl_run) as user:
        await user.press("c")
        assert "no other sample of the group" in user.notification


async def test_plots_show_one_or_all(our_run: Path, verl_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("l")
        assert isinstance(user.app.screen, PlotScreen)
        assert "score by step" in user.lines[0]
        for plot in plots.PLOTS:
            await user.sees(f"{plot.title} by step", f"  {plot.title}")
            await user.press("n")
        await user.press("p", "enter", "l")
        assert isinstance(user.app.screen, BrowseScreen)
    async with viewing(verl_run, WIDE) as user:
        await user.press("l")
        await user.sees(*(plot.title for plot in plots.PLOTS))
        await user.press("enter")
        assert plots.PLOTS[1].title not in user.text


async def test_follow_selects_newest_sample(tmp_path: Path) -> None:
    write_toolroll_run(tmp_path, steps=[1], groups=1)
    async with viewing(tmp_path) as user:
        await user.press("F")
        await user.sees("following")
        await user.sees("sample 4 of 4")
        write_toolroll_run(tmp_path, steps=[2], groups=1, samples=3)
        await user.look()
        await user.sees("in 2 steps")
        assert user.browse.navigator.step is user.browse.navigator.steps[1]
        await user.sees("sample 3 of 3")
        with (tmp_path / "2.jsonl").open("ab") as file:
            file.write((tmp_path / "1.jsonl").read_bytes().splitlines(keepends=True)[0])
        await user.look()
        await user.sees("sample 4 of 4")
        await user.press("p")
        assert "· following" not in user.title
        write_toolroll_run(tmp_path, steps=[3], groups=1)
        await user.look()
        await user.sees("in 3 steps")
        assert user.browse.navigator.step is user.browse.navigator.steps[1]
        await user.sees("sample 3 of 4")


async def test_copy_and_export_write_markdown(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with viewing(run) as user:
        await user.press("y")
        assert user.app.clipboard.startswith("# `step 1, sample 1`")
        assert "Copied" in user.notification
        await user.press("n", "e", "e")
        written = sorted(path.name for path in tmp_path.glob("*.md"))
        assert written == ["step-1-sample-2-2.md", "step-1-sample-2.md"]
        assert "## `user`" in (tmp_path / written[0]).read_text()
        monkeypatch.setattr(Path, "write_text", _raise_disk_full)
        await user.press("e")
        assert "No space left" in user.notification


async def test_export_in_browser_downloads(our_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delivered: dict[str, str] = {}
    async with viewing(our_run) as user:
        monkeypatch.setattr(Viewer, "is_web", True)
        monkeypatch.setattr(
            user.app, "deliver_text", lambda file, *, save_filename: delivered.update({save_filename: file.read()})
        )
        await user.press("e")
        assert delivered["step-1-sample-1.md"].startswith("# `step 1, sample 1`")


async def test_mouse_selects_text(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("enter")
        line = next(number for number, text in enumerate(user.lines) if "You are a careful" in text)
        await user.pilot.mouse_down(offset=(2, line))
        await user.pilot.hover(offset=(9, line + 1))
        await user.pilot.mouse_up(offset=(9, line + 1))
        await user.settle()
        assert user.app.screen.get_selected_text() == (
            "You are a careful mathematician. Use the code_interpreter for every\ncalculat"
        )


async def test_masked_text_is_shown_as_star(our_run: Path) -> None:
    async with viewing(our_run, mask_str="Mari.na") as user:
        await user.sees("▎ * keeps 48 jars")


def _raise_disk_full(*_: object, **__: object) -> int:
    raise OSError(28, "No space left on device")


async def test_q_quits(our_run: Path) -> None:
    app = Viewer(our_run)
    async with app.run_test() as pilot:
        user = User(app, pilot)
        await user.settle()
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running
