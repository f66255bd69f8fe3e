"""`toolroll view`, where there is no terminal."""

import subprocess
import sys

import pytest

from toolroll.cli.app import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "There is no directory nowhere"),
        (["nowhere", "--web"], "There is no directory nowhere"),
        (["."], "The viewer needs a terminal"),
        ([".", "--mask-str", "("], "is no regular expression"),
        ([], "Missing argument"),
    ],
)
def test_what_keeps_it_from_beginning_is_said(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["toolroll", "view", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_without_the_extra_it_says_which() -> None:
    code = (
        "import sys; sys.modules['textual'] = None; sys.argv = ['toolroll', 'view', '.']\n"
        "from toolroll.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install 'toolroll[viewer]'" in done.stderr
    assert "Traceback" not in done.stderr
