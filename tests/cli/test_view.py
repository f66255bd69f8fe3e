"""`toolroll view` without a terminal."""

import subprocess
import sys

import pytest

from toolroll.cli.app import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "No such directory: nowhere"),
        (["nowhere", "--web"], "No such directory: nowhere"),
        (["."], "The viewer needs a terminal"),
        ([".", "--mask-str", "("], "Invalid regular expression"),
        ([], "Missing argument"),
    ],
)
def test_start_errors_are_reported(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["toolroll", "view", *words])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.process
def test_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['textual'] = None; sys.argv = ['toolroll', 'view', '.']\n"
        "from toolroll.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install 'toolroll[viewer]'" in done.stderr
    assert "Traceback" not in done.stderr
