"""`toolroll tools`, as typed in a shell."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LOUD = """
from toolroll import tool
print("loading")
@tool
def shout() -> str:
    'Shout.'
    print("calling")
    return "\\ud800"
"""
SLOW = """
import sys, time
from toolroll import tool
@tool
def nap() -> str:
    'Sleep.'
    print("asleep", file=sys.stderr, flush=True)
    time.sleep(60)
"""
GSM8K = "examples/gsm8k/tool_config.yaml"
CUSTOM = "examples/custom_tool/tool_config.yaml"


@pytest.fixture
def toolroll(root: Path) -> Any:
    def run(*words: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        command = Path(sys.executable).with_name("toolroll")
        environment = {**os.environ, "COLUMNS": "100"}
        return subprocess.run(
            [command, *words], capture_output=True, text=True, timeout=60, cwd=root, env=environment, **kwargs
        )

    return run


def test_call_prints_what_the_issue_of_a_call_is(toolroll: Any) -> None:
    done = toolroll(
        "tools", "call", GSM8K, "calc_gsm8k_reward", '{"answer": "72"}', "--create", '{"ground_truth": "72"}', "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "response": {"text": "Current parsed answer='72' reward=1.0"},
        "reward": 0.0,
        "metrics": {},
        "final_reward": 1.0,
    }


def test_call_for_people_and_from_standard_input(toolroll: Any) -> None:
    done = toolroll(
        "tools", "call", CUSTOM, "pantry", "-", "--create", '{"eggs": 6}', input='{"item": "eggs", "count": 6}'
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "12 eggs stored"
    assert "final reward 1.0" in done.stdout


def test_list_and_schema(toolroll: Any) -> None:
    table = toolroll("tools", "list", CUSTOM).stdout
    assert "Convert an amount of flour" in table
    assert "amount, unit" in table
    listed = json.loads(toolroll("tools", "list", CUSTOM, "--json").stdout)
    assert [(tool["name"], tool["implementation"]) for tool in listed] == [
        ("convert", "bakery.convert"),
        ("pantry", "bakery.Pantry"),
    ]
    one = json.loads(toolroll("tools", "schema", CUSTOM, "convert").stdout)
    assert one["function"]["parameters"]["required"] == ["amount", "unit"]
    assert json.loads(toolroll("tools", "schema", CUSTOM).stdout)[0] == one


@pytest.mark.parametrize(
    ("words", "status", "fault", "said"),
    [
        ((CUSTOM, "convert", '{"amount": 1, "unit": "pinch"}'), 1, "policy", "must be one of"),
        ((CUSTOM, "convert", '{"amount": 1,'), 1, "policy", "not valid JSON"),
        ((GSM8K, "calc_gsm8k_reward", '{"answer": "1"}'), 1, "infra", "ground_truth"),
    ],
)
def test_a_call_that_fails_says_whose_fault_it_is(
    toolroll: Any, words: tuple[str, ...], status: int, fault: str, said: str
) -> None:
    done = toolroll("tools", "call", *words, "--json")
    assert done.returncode == status
    answer = json.loads(done.stdout)
    assert answer["fault"] == fault
    assert said in answer["error"]
    for_people = toolroll("tools", "call", *words)
    assert for_people.returncode == status
    assert said in for_people.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("call", CUSTOM, "convertt", "{}"), "there is no tool 'convertt' (did you mean 'convert'?)"),
        (("call", CUSTOM, "convert", "{}", "--create", "{"), "--create is not valid JSON"),
        (("call", CUSTOM, "convert", "{}", "--create", "[]"), "--create must be a JSON object"),
        (("list", "nowhere.yaml"), "nowhere.yaml: there is no such file"),
    ],
)
def test_what_cannot_be_begun_ends_with_2_and_one_line(toolroll: Any, words: tuple[str, ...], said: str) -> None:
    done = toolroll("tools", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_tools_print_does_not_get_into_the_answer(toolroll: Any, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: loud.shout}]")
    done = toolroll("tools", "call", str(tmp_path / "tools.yaml"), "shout", "--json")
    assert json.loads(done.stdout)["response"] == {"text": "\ud800".encode("utf-8", "replace").decode()}
    assert "loading" in done.stderr
    assert "calling" in done.stderr


def test_an_interrupt_does_not_wait_for_a_sleeping_tool(root: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: slow.nap}]")
    command = [Path(sys.executable).with_name("toolroll"), "tools", "call", tmp_path / "tools.yaml", "nap"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "asleep\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert time.monotonic() - began < 10
        assert "Traceback" not in process.stderr.read()


def test_version_and_help(toolroll: Any) -> None:
    assert toolroll("--version").stdout.startswith("toolroll ")
    assert "doctor" in toolroll("--help").stdout


def test_doctor(toolroll: Any) -> None:
    checks = {check["name"]: check for check in json.loads(toolroll("doctor", "--json").stdout)}
    assert checks["python"]["finding"] == "ok"
    assert checks["python"]["detail"].startswith("3.")
    assert {"toolroll", "ray", "transformers", "kernel"} <= checks.keys()
    for check in checks.values():
        assert check["finding"] == "ok" or check["remedy"], f"{check['name']} says no remedy"
    shown = toolroll("doctor")
    assert shown.returncode == 0
    assert "python" in shown.stdout
