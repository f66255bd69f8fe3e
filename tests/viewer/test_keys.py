"""Every key, pressed."""

import json
from pathlib import Path

import pytest
from textual.widgets import Input

from toolroll.viewer import compare, plots
from toolroll.viewer.browse import BrowseScreen
from toolroll.viewer.compare import CompareScreen
from toolroll.viewer.help import HelpScreen
from toolroll.viewer.keys import KEYS
from toolroll.viewer.plots import PlotScreen
from viewer.driving import NARROW, WIDE, User, Viewer, viewing
from viewer.dumps import ours

ORIGINAL = set("fnpNPjkgGs") | {"tab", "left", "right", "enter", "escape"}
"""The keys of verl's viewer."""


@pytest.mark.parametrize("size", [NARROW, WIDE])
async def test_every_key_is_in_the_footer_and_in_the_help(our_run: Path, size: tuple[int, int]) -> None:
    bound = {name for key in KEYS for name, _ in key.actions}
    assert bound >= ORIGINAL
    assert all(
        hasattr(BrowseScreen, f"action_{action}") for key in KEYS for _, action in key.actions if "." not in action
    )
    async with viewing(our_run, size) as user:
        footer = " ".join(user.lines[-3:])
        for key in KEYS:
            assert f"{key.shown} {key.label}" in footer
        if size is WIDE:
            return
        await user.press("question_mark")
        assert isinstance(user.app.screen, HelpScreen)
        seen = user.text
        for _ in range(6):
            await user.press("j")
            seen += user.text
        for key in KEYS:
            assert key.help.split(":")[0].split(",")[0][:30] in " ".join(seen.split())
        await user.press("k", "escape")
        assert isinstance(user.app.screen, BrowseScreen)


@pytest.mark.parametrize("keys", [compare.KEYS, plots.KEYS])
def test_other_screens_have_an_action_for_each_of_their_keys(keys: tuple[object, ...]) -> None:
    screen = CompareScreen if keys is compare.KEYS else PlotScreen
    for key in keys:
        for _, action in key.actions:  # type: ignore[attr-defined]
            name = action.split("(")[0]
            assert "." in name or hasattr(screen, f"action_{name}")


async def test_a_click_on_the_footer_does_what_the_key_does(our_run: Path) -> None:
    async with viewing(our_run) as user:
        line = next(number for number, text in enumerate(user.lines) if "N P step" in text)
        await user.pilot.click(offset=(user.lines[line].index("N P") + 1, line))
        await user.settle()
        assert user.browse.step_list.cursor == 1


async def test_samples_and_steps_go_around(run: Path) -> None:
    async with viewing(run) as user:
        listed, steps = len(user.browse.listing), len(user.browse.steps)
        await user.sees(f"sample 1 of {listed}")
        await user.press("n")
        await user.sees(f"sample 2 of {listed}")
        assert user.pane.place is not None
        assert user.pane.place.row == 1
        await user.press("p", "p")
        await user.sees(f"sample {listed} of {listed}")
        await user.press("n")
        await user.sees(f"sample 1 of {listed}")
        await user.press("n", "N")
        assert user.browse.step is user.browse.steps[1]
        await user.sees("sample 1 of")
        await user.press(*["N"] * (steps - 1))
        assert user.browse.step is user.browse.steps[0]
        await user.press("P")
        assert user.browse.step is user.browse.steps[-1]


async def test_pages_and_ends_of_the_sample_whatever_has_the_focus(run: Path) -> None:
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


async def test_panes_by_tab_and_arrows_and_reading(our_run: Path) -> None:
    async with viewing(our_run) as user:
        panes = [user.browse.step_list, user.browse.sample_list, user.pane.content]

        def focused() -> int:
            return panes.index(user.app.focused)  # type: ignore[arg-type]

        assert focused() == 1
        seen = []
        for key in ("tab", "tab", "right", "left", "shift+tab"):
            await user.press(key)
            seen.append(focused())
        assert seen == [2, 0, 1, 0, 2]
        assert "faults" not in user.text  # on a narrow screen the sample has it to itself
        await user.press("escape")
        assert focused() == 1
        await user.sees("faults")
        await user.press("enter")
        assert focused() == 2
        await user.press("tab", "down", "enter")
        assert (focused(), user.browse.step_list.cursor) == (1, 1)
        await user.press("down", "down", "pagedown", "up")
        assert 2 < user.browse.sample_list.cursor < 15
        await user.press("end")
        assert user.browse.sample_list.cursor == 15
        await user.press("home")
        assert user.browse.sample_list.cursor == 0


async def test_find_counts_and_steps_through_samples(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("f")
        await user.type("Traceback")
        await user.press("enter")
        search = user.browse.search
        assert search is not None
        assert search.matches == len(search) > 10
        await user.sees(f"match 1 of {search.matches} in")
        await user.sees("▎ Traceback (most recent call last):")
        assert user.pane.place == search.sample(0)
        await user.press("full_stop")
        await user.sees(f"match 2 of {search.matches}")
        assert user.pane.place == search.sample(1)
        await user.press("enter")  # as in verl's viewer
        await user.sees(f"match 3 of {search.matches}")
        await user.press("comma", "comma", "comma")
        await user.sees(f"match {search.matches} of {search.matches}")
        assert user.pane.place == search.sample(len(search) - 1)
        assert user.browse.step is not user.browse.steps[0]
        await user.press("escape")
        assert user.browse.search is None
        assert "match" not in user.lines[-4]


async def test_find_within_a_sample_opens_folds_and_works_in_every_display(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("f")
        await user.type("i should compute")
        await user.press("enter")
        await user.sees("▾ thinking")
        await user.sees("I should compute this.")
        counted = user.browse.search.matches if user.browse.search else 0
        for _ in range(2):  # plain text, table
            await user.press("s")
            assert user.browse.search is not None
            assert user.browse.search.matches >= counted  # there it is in `input` or `output` and in `messages`
            await user.press("full_stop")
            await user.sees("I should compute this.")
        await user.press("escape", "f")
        await user.type("no such text anywhere")
        await user.press("enter")
        await user.sees("0 matches in 0 samples")
        await user.press("full_stop", "escape", "full_stop")
        assert "Nothing is searched for" in user.told


async def test_find_keeps_to_the_filter(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("slash")
        await user.type("score==0")
        await user.press("enter", "f")
        await user.type("####")
        await user.press("enter")
        search = user.browse.search
        assert search is not None
        places = [search.sample(number) for number in range(len(search))]
        assert places
        assert all(place.step.column("score")[place.row] == 0 for place in places)


async def test_filter_says_what_is_wrong_where_one_types(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("slash")
        await user.sees("e.g. score < 0.5")
        await user.type("score <")
        line = next(number for number, text in enumerate(user.lines) if text.startswith(" filter score <"))
        assert user.lines[line + 1].index("^ unfinished") == user.lines[line].index("<") + 1
        await user.press("enter")
        assert isinstance(user.app.focused, Input)  # it isn't taken like this
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
        await user.sees("No sample matches")
        await user.press("slash", "ctrl+u", "enter")
        assert len(user.scores) == 16


async def test_filter_over_all_steps_and_by_any_field(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("a", "slash")
        await user.type("'prnt' in text(line.calls) and extra.difficulty==2")
        await user.press("enter")
        assert user.browse.listing.looked_at == 48
        assert 0 < len(user.browse.listing) < 48
        assert "step" in user.lines[1][20:]
        await user.press("escape")
        assert len(user.browse.listing) == 48
        user.browse.select(0)
        await user.press("N")
        await user.sees("sample 17 of 48")
        await user.press("P", "P")
        await user.sees("sample 33 of 48")
        await user.press("a")
        await user.sees("sample 1 of 16")
        assert user.browse.step is user.browse.steps[2]


async def test_sorting_is_by_number_both_ways(tmp_path: Path) -> None:
    scores = [9, 0.5, None, 1.0, 2e-05, 10, -0.05]
    lines = [json.dumps({"input": "q", "output": "a", "score": score, "step": 1}) for score in scores]
    (tmp_path / "1.jsonl").write_text("\n".join(lines) + "\n")
    async with viewing(tmp_path) as user:
        await user.press("o")
        assert user.scores == ["-0.05", "2e-05", "0.5", "1", "9", "10", "–"]
        column = user.lines[1].index("score↑") + 6
        assert [line[:column].split()[-1] for line in user.lines[2:8]] == ["-0.05", "2e-05", "0.5", "1", "9", "10"]
        assert user.pane.place is not None
        assert user.pane.place.row == 6
        await user.press("O")
        assert user.scores == ["10", "9", "1", "0.5", "2e-05", "-0.05", "–"]
        assert "score↓" in user.lines[1]
        await user.press("n")
        assert user.pane.place.row == 0
        await user.press(*["o"] * 7)
        assert user.scores == ["9", "0.5", "–", "1", "2e-05", "10", "-0.05"]
        await user.pilot.click("#samples", offset=(13, 0))
        await user.settle()
        assert user.scores[0] == "-0.05"


async def test_a_request_id_is_gone_to(our_run: Path) -> None:
    async with viewing(our_run) as user:
        wanted = user.browse.steps[2]
        wanted.index()
        identity = wanted.column("request_id")[5]
        await user.press("slash")
        await user.type("score > 99")
        await user.press("enter", "i")
        await user.type(identity.replace("-", ""))
        await user.press("enter")
        assert user.pane.place == (wanted, 5)
        assert "The filter was dropped" in user.told
        await user.press("i")
        await user.type("[b]no")
        await user.press("enter")
        assert "No sample has the request id [b]no" in user.told


async def test_displays_go_around_as_they_did(run: Path) -> None:
    async with viewing(run) as user:
        await user.sees("▎ user")
        await user.press("s")
        assert user.pane.display_name == "plain"
        await user.sees("▎ input")
        await user.press("s")
        assert any(line.startswith("input ") and "│ " in line for line in user.lines)
        assert user.pane.display_name == "table"
        await user.press("s")
        assert user.pane.display_name == "conversation"
        await user.press("s", "escape")
        assert user.pane.display_name == "conversation"


async def test_fields_are_chosen(run: Path) -> None:
    async with viewing(run) as user:
        await user.press("d")
        await user.sees("space one · a all or none")
        await user.press("space", "escape")  # input is the first
        assert user.pane.display_name == "plain"
        assert "▎ input" not in user.text
        await user.sees("▎ output")
        await user.press("n")
        assert "▎ input" not in user.text
        await user.press("d", "a", "a", "escape")
        await user.sees("No field is chosen")
        await user.press("d", "a", "escape")
        await user.sees("▎ input")


async def test_folds_open_and_close(run: Path) -> None:
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
        assert "Nothing here can be folded" in user.told


async def test_tokens_in_both_forms(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("t")
        await user.sees("135 tokens · 64 prompt · 67 sampled · 4 tools' · mean log-prob -0.753")
        await user.sees("weights v1")
        await user.sees("mask 0: prompt tool  mask 1: p ≥ 0.9")
        await user.sees("with --tokenizer PATH their texts")
        await user.press("t", "enter")
        await user.still()  # a page is as long as the pane is now
        await user.press(*["j"] * 3)
        assert user.text.count(" 1    model ") > 3
        await user.press("g")
        assert user.text.count(" 0    prompt ") > 3
        await user.press("escape")
        assert user.pane.display_name == "conversation"


async def test_rewards(run: Path) -> None:
    async with viewing(run) as user:
        await user.press("enter", "r")
        await user.sees("▎ ground truth")
        assert "rewards by function" in user.text or "beside the score" in user.text
        await user.press("r")
        assert user.pane.display_name == "conversation"


async def test_two_samples_of_a_group_side_by_side(our_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("c")
        assert isinstance(user.app.screen, CompareScreen)
        await user.sees("group gsm8k/0 in step 1: 4 samples")
        names = [line.split()[:2] for line in user.lines[2:4]]
        assert names == [["sample", "1"], ["sample", "2"]]
        assert user.text.count("▸ the first 4 parts are the same") == 2
        await user.press("z")
        assert user.text.count("▾ the first 4 parts are the same") == 2
        await user.press("n")
        assert user.lines[3].split()[:2] == ["sample", "3"]
        await user.press("n", "n")
        assert user.lines[3].split()[:2] == ["sample", "2"]  # never beside itself
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


async def test_a_sample_that_is_alone_in_its_group_says_so(verl_run: Path) -> None:
    async with viewing(verl_run) as user:
        await user.press("c")
        assert "No other sample of its group is in this step" in user.told


async def test_plots_by_step(our_run: Path, verl_run: Path) -> None:
    async with viewing(our_run) as user:
        await user.press("l")
        assert isinstance(user.app.screen, PlotScreen)
        assert "by step · score" in user.lines[0]
        for plot in plots.PLOTS:
            await user.sees(f"by step · {plot.title}", f"  {plot.title.split(':')[0]}")
            await user.press("n")
        await user.press("p", "enter", "l")
        assert isinstance(user.app.screen, BrowseScreen)
    async with viewing(verl_run, WIDE) as user:
        await user.press("l")
        await user.sees(*(plot.title.split(":")[0] for plot in plots.PLOTS))
        await user.press("enter")
        assert plots.PLOTS[1].title not in user.text


async def test_following_a_run(tmp_path: Path) -> None:
    ours(tmp_path, steps=[1], groups=1)
    async with viewing(tmp_path) as user:
        await user.press("F")
        await user.sees("following")
        await user.sees("sample 4 of 4")
        ours(tmp_path, steps=[2], groups=1, samples=3)
        await user.look()
        await user.sees("in 2 steps")
        assert user.browse.step is user.browse.steps[1]
        await user.sees("sample 3 of 3")
        with (tmp_path / "2.jsonl").open("ab") as file:
            file.write((tmp_path / "1.jsonl").read_bytes().splitlines(keepends=True)[0])
        await user.look()
        await user.sees("sample 4 of 4")
        await user.press("p")
        assert "· following" not in user.title
        ours(tmp_path, steps=[3], groups=1)
        await user.look()
        await user.sees("in 3 steps")
        assert user.browse.step is user.browse.steps[1]
        await user.sees("sample 3 of 4")


async def test_copy_and_export(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with viewing(run) as user:
        await user.press("y")
        assert user.app.clipboard.startswith("# `step 1, sample 1`")
        assert "Copied" in user.told
        await user.press("n", "e", "e")
        written = sorted(path.name for path in tmp_path.glob("*.md"))
        assert written == ["step-1-sample-2-2.md", "step-1-sample-2.md"]
        assert "## `user`" in (tmp_path / written[0]).read_text()
        monkeypatch.setattr(Path, "write_text", _no_room)
        await user.press("e")
        assert "No space left" in user.told


async def test_in_a_browser_the_export_is_a_download(our_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    async with viewing(our_run) as user:
        monkeypatch.setattr(Viewer, "is_web", True)
        monkeypatch.setattr(
            user.app, "deliver_text", lambda file, *, save_filename: given.update({save_filename: file.read()})
        )
        await user.press("e")
        assert given["step-1-sample-1.md"].startswith("# `step 1, sample 1`")


async def test_text_is_selected_with_the_mouse(our_run: Path) -> None:
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


async def test_what_is_masked_is_shown_as_a_star(our_run: Path) -> None:
    async with viewing(our_run, mask_str="Mari.na") as user:
        await user.sees("▎ * keeps 48 jars")


def _no_room(*_: object, **__: object) -> int:
    raise OSError(28, "No space left on device")


async def test_quit(our_run: Path) -> None:
    app = Viewer(our_run)
    async with app.run_test() as pilot:
        user = User(app, pilot)
        await user.settle()
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running
