"""`toolroll view`, as typed in a shell without a terminal."""

import subprocess
import sys
from pathlib import Path

import pytest


def view(*words: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("toolroll")
    return subprocess.run([command, "view", *words], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "There is no directory nowhere"),
        (["nowhere", "--web"], "There is no directory nowhere"),
        (["."], "The viewer needs a terminal"),
        ([".", "--mask-str", "("], "is no regular expression"),
    ],
)
def test_what_keeps_it_from_beginning_is_said_in_a_line(words: list[str], said: str) -> None:
    done = view(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_help() -> None:
    assert "rollout_data_dir" in view("--help").stdout


def test_without_the_extra_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.modules['textual'] = None; sys.argv = ['toolroll', 'view', '.']\n"
        "from toolroll.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install 'toolroll[viewer]'" in done.stderr
