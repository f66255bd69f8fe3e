"""`toolroll sandbox run` and `serve`, as they are typed."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def toolroll(*words: str, stdin: str = "", wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrapper, sys.executable, "-m", "toolroll.cli", "sandbox", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_run_shows_what_the_program_wrote_and_ends_as_it_did(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import sys\nprint(input())\nprint('[red]', file=sys.stderr)\nsys.exit(7)")
    (tmp_path / "in").write_text("given\n")
    done = toolroll("run", f"{tmp_path}/a.py", "--stdin", f"{tmp_path}/in")
    assert (done.returncode, done.stdout) == (7, "given\n")
    assert done.stderr.splitlines()[0] == "[red]"
    assert done.stderr.splitlines()[-1].startswith("failed with 7 after 0.")


def test_run_takes_the_language_from_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("echo $((6 * 7))")
    done = toolroll("run", f"{tmp_path}/a.sh")
    assert (done.returncode, done.stdout) == (0, "42\n")
    assert toolroll("run", "-", "--language", "perl", stdin="print 'perl'").stdout == "perl"


def test_run_json_and_a_running_server(sandbox_url: str) -> None:
    done = toolroll("run", "-", "--json", "--url", sandbox_url, "--timeout", "0.3", stdin="while True: pass")
    found = json.loads(done.stdout)
    assert (done.returncode, found["outcome"], found["endpoint"]) == (1, "timeout", sandbox_url)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "/no/such/file"), "/no/such/file: No such file"),
        (("run", "-", "--language", "cobol"), "There is no language 'cobol'"),
        (("run", "-", "--language", "cuda"), "This server has no cuda"),
        (("run", "-", "--url", "http://127.0.0.1:9", "--timeout", "0.1"), "http://127.0.0.1:9"),
        (("serve", "--capacity", "0"), "capacity"),
        (("serve", "--python", "/no/python"), "/no/python"),
        (("serve", "--host", "203.0.113.1"), "can't be started"),
    ],
)
def test_what_cannot_be_begun_ends_with_2_and_one_line(words: tuple[str, ...], says: str) -> None:
    done = toolroll(*words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


NOTHING = """
    import errno, os, sys
    import pyseccomp
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in ("unshare", "clone3", 444):  # 444: landlock_create_ruleset
        rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), name)
    rules.load()
    os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_where_nothing_isolates_nothing_is_served() -> None:
    wrapper = (sys.executable, "-c", textwrap.dedent(NOTHING))
    done = toolroll("serve", "--port", "0", wrapper=wrapper)
    assert done.returncode == 2
    assert "Programs can't be isolated here" in done.stderr
    assert "no Landlock" in done.stderr
    assert "unshare" in done.stderr
    assert toolroll("run", "-", stdin="print(1)", wrapper=wrapper).returncode == 2
