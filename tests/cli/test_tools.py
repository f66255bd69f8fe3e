"""Tests of `toolroll tools`, run as a command."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port
from rollout import small_tokenizer
from rollout.test_hermes import TEMPLATE

pytestmark = pytest.mark.process

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
    def run(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        command = Path(sys.executable).with_name("toolroll")
        environment = {**os.environ, "COLUMNS": "100"}
        return subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=60, cwd=root, env=environment, **kwargs
        )

    return run


def test_call_prints_result_as_json(toolroll: Any) -> None:
    completed = toolroll(
        "tools", "call", GSM8K, "calc_gsm8k_reward", '{"answer": "72"}', "--create", '{"ground_truth": "72"}', "--json"
    )
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout) == {
        "response": {"text": "Current parsed answer='72' reward=1.0"},
        "reward": 0.0,
        "metrics": {},
        "final_reward": 1.0,
    }


def test_call_reads_arguments_from_stdin(toolroll: Any) -> None:
    completed = toolroll(
        "tools", "call", CUSTOM, "pantry", "-", "--create", '{"eggs": 6}', input='{"item": "eggs", "count": 6}'
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[0] == "12 eggs stored"
    assert "final reward 1.0" in completed.stdout


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
    ("arguments", "status", "fault", "message"),
    [
        ((CUSTOM, "convert", '{"amount": 1, "unit": "pinch"}'), 1, "policy", "must be one of"),
        ((CUSTOM, "convert", '{"amount": 1,'), 1, "policy", "invalid JSON"),
        ((GSM8K, "calc_gsm8k_reward", '{"answer": "1"}'), 1, "infra", "ground_truth"),
    ],
)
def test_failed_call_prints_fault_and_message(
    toolroll: Any, arguments: tuple[str, ...], status: int, fault: str, message: str
) -> None:
    completed = toolroll("tools", "call", *arguments, "--json")
    assert completed.returncode == status
    output = json.loads(completed.stdout)
    assert output["fault"] == fault
    assert message in output["error"]
    without_json = toolroll("tools", "call", *arguments)
    assert without_json.returncode == status
    assert message in without_json.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("call", CUSTOM, "convertt", "{}"), "Unknown tool 'convertt'. Did you mean 'convert'?"),
        (("call", CUSTOM, "convert", "{}", "--create", "{"), "--create: invalid JSON"),
        (("call", CUSTOM, "convert", "{}", "--create", "[]"), "--create: expected a JSON object"),
        (("list", "nowhere.yaml"), "nowhere.yaml: file not found"),
    ],
)
def test_invalid_input_exits_with_status_2(toolroll: Any, arguments: tuple[str, ...], message: str) -> None:
    completed = toolroll("tools", *arguments)
    assert completed.returncode == 2
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr


def test_output_of_tool_goes_to_stderr(toolroll: Any, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: loud.shout}]")
    completed = toolroll("tools", "call", str(tmp_path / "tools.yaml"), "shout", "--json")
    assert json.loads(completed.stdout)["response"] == {"text": "\ud800"}
    assert "loading" in completed.stderr
    assert "calling" in completed.stderr


def test_interrupt_does_not_wait_for_sync_tool(root: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: slow.nap}]")
    command = [Path(sys.executable).with_name("toolroll"), "tools", "call", tmp_path / "tools.yaml", "nap"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "asleep\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
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
        assert check["finding"] == "ok" or check["remedy"], f"{check['name']} has no remedy"
    shown = toolroll("doctor")
    assert shown.returncode == 0
    assert "python" in shown.stdout


def test_doctor_checks_servers(toolroll: Any) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    found = json.loads(toolroll("doctor", "--engine", dead, "--sandbox", dead, "--json").stdout)
    checks = {check["name"]: check for check in found}
    for name in ("engine", "sandbox server"):
        assert checks[name]["finding"] == "missing"
        assert checks[name]["detail"] == f"{dead} is unreachable"


def test_call_without_a_sandbox_says_at_once_what_it_waits_for(root: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "toolroll", "tools", "call", "examples/sandbox_fusion/tool_config.yaml"]
    process = subprocess.Popen(
        [*command, "code_interpreter", '{"code": "1"}'],
        stderr=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "SANDBOX_FUSION_URL": url},
    )  # fmt: skip
    assert process.stderr is not None
    first_lines = [process.stderr.readline(), process.stderr.readline()]
    assert process.poll() is None, "the call still waits"
    process.kill()
    process.communicate()
    wanted = f"Cannot connect to the sandbox at {url}. Trying again for 30 s. To start one: toolroll sandbox serve\n"
    assert wanted in first_lines


def test_doctor_checks_a_model(toolroll: Any, tmp_path: Path) -> None:
    small_tokenizer.make(chat_template=TEMPLATE).save_pretrained(tmp_path / "with tools")
    small_tokenizer.make(chat_template=small_tokenizer.CHATML_TEMPLATE).save_pretrained(tmp_path / "without tools")
    good = toolroll("doctor", str(tmp_path / "with tools"))
    assert good.returncode == 0
    assert "5 of 5 kinds read back as rendered" in good.stdout
    assert "hermes" in good.stdout
    bad = toolroll("doctor", str(tmp_path / "without tools"), "--json")
    assert bad.returncode == 1
    assert "it does not show the tools. Set tool_prompt: hermes" in json.loads(bad.stdout)["problem"]
    remedied = toolroll("doctor", str(tmp_path / "without tools"), "--tool-prompt", "hermes", "--json")
    found = json.loads(remedied.stdout)
    assert (found["format"], found["call_form"], found["problem"]) == ("template", "hermes", None)
    assert all(check["passed"] for check in found["checks"])
    typo = toolroll("doctor", str(tmp_path / "with tools"), "--tool-prompt", "hermés")
    assert "Unknown tool prompt 'hermés'. The only one is 'hermes'." in typo.stderr
