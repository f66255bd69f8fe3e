"""`toolroll sandbox run` and `toolroll sandbox serve` on the command line."""

import json
import logging
import os
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from toolroll import ServerSettings
from toolroll.cli import output
from toolroll.cli.app import app

pytestmark = pytest.mark.sandbox


def toolroll(*arguments: str, stdin: str = "", wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrapper, sys.executable, "-m", "toolroll.cli", "sandbox", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_run_prints_output_and_exits_with_status(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import sys\nprint(input())\nprint('[red]', file=sys.stderr)\nsys.exit(7)")
    (tmp_path / "in").write_text("given\n")
    done = toolroll("run", f"{tmp_path}/a.py", "--stdin", f"{tmp_path}/in")
    assert (done.returncode, done.stdout) == (7, "given\n")
    assert done.stderr.splitlines()[0] == "[red]"
    assert done.stderr.splitlines()[-1].startswith("failed with status 7 after 0.")


def test_run_infers_language_from_file_name(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("echo $((6 * 7))")
    done = toolroll("run", f"{tmp_path}/a.sh")
    assert (done.returncode, done.stdout) == (0, "42\n")
    assert toolroll("run", "-", "--language", "perl", stdin="print 'perl'").stdout == "perl"


def test_run_prints_json_from_running_server(sandbox_url: str) -> None:
    done = toolroll("run", "-", "--json", "--url", sandbox_url, "--timeout", "0.3", stdin="while True: pass")
    found = json.loads(done.stdout)
    assert (done.returncode, found["outcome"], found["endpoint"]) == (1, "timeout", sandbox_url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "/no/such/file"), "/no/such/file: No such file"),
        (("run", "-", "--language", "cobol"), "Unknown language 'cobol'"),
        (("run", "-", "--language", "cuda"), "Language 'cuda' is not available"),
        (("run", "-", "--url", "http://127.0.0.1:9", "--timeout", "0.1"), "http://127.0.0.1:9"),
        (("serve", "--capacity", "0"), "capacity"),
        (("serve", "--python", "/no/python"), "/no/python"),
        (("serve", "--host", "203.0.113.1"), "could not be started"),
    ],
)
def test_invalid_command_exits_with_2_and_message(arguments: tuple[str, ...], message: str) -> None:
    done = toolroll(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


WITHOUT_ISOLATION = """
    import errno, os, sys
    import pyseccomp
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in ("unshare", "clone3", 444):  # 444: landlock_create_ruleset
        rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), name)
    rules.load()
    os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_server_does_not_start_without_isolation() -> None:
    wrapper = (sys.executable, "-c", textwrap.dedent(WITHOUT_ISOLATION))
    done = toolroll("serve", "--port", "0", wrapper=wrapper)
    assert done.returncode == 2
    assert "Programs cannot be isolated on this machine" in done.stderr
    assert "no Landlock" in done.stderr
    assert "unshare" in done.stderr
    assert toolroll("run", "-", stdin="print(1)", wrapper=wrapper).returncode == 2


def test_settings_from_the_environment_and_json_log() -> None:
    """Every setting of the server has a variable, and each line of the log is a JSON object."""
    variables = {"CAPACITY": "7", "PORT": "0", "QUEUE": "5", "LOG_FORMAT": "json", "ACCESS_LOG": "1"}
    command = [sys.executable, "-m", "toolroll", "sandbox", "serve", "--queue", "6"]
    environment = {**os.environ, **{f"TOOLROLL_SANDBOX_{name}": value for name, value in variables.items()}}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    started = json.loads(process.stderr.readline())
    assert (started["level"], started["capacity"]) == ("INFO", 7)
    with urllib.request.urlopen(f"{started['url']}/v1/ping", timeout=10) as response:
        assert json.load(response)["capacity"] == 7
    access = json.loads(process.stderr.readline())
    assert {key: access[key] for key in ("logger", "method", "path", "status", "remote")} == {
        "logger": "toolroll.sandbox.access", "method": "GET", "path": "/v1/ping", "status": 200, "remote": "127.0.0.1",
    }  # fmt: skip
    assert access["seconds"] >= 0
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out == "", "nothing but the log"
    assert [json.loads(line)["message"] for line in err.splitlines()] == ["Stopping; waiting for 0 running programs."]


def test_every_setting_of_the_server_is_an_option() -> None:
    shown = CliRunner().invoke(app, ["sandbox", "serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for name in ServerSettings.model_fields:
        assert f"TOOLROLL_SANDBOX_{name.upper()}" in shown


def test_json_log_has_exceptions_and_extra_fields_on_one_line() -> None:
    record = logging.makeLogRecord({"msg": "a\nb \x1b[31m %s", "args": ("c",), "name": "n", "levelname": "ERROR"})
    record.seconds, record._private = 1.5, 2  # Ray adds private fields to all records
    try:
        raise ValueError("wrong")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = output.JsonFormatter().format(record)
    assert line.isascii()
    assert line.isprintable()
    fields = json.loads(line)
    assert fields["message"] == "a\nb \x1b[31m c"
    assert fields["seconds"] == 1.5
    assert "ValueError: wrong" in fields["exception"]
    assert fields.keys() == {"time", "level", "logger", "message", "seconds", "exception"}
