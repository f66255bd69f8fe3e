"""Shell completion, by the protocol of the shells and in a real bash."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tmux_terminal import Terminal

pytestmark = pytest.mark.process

CUSTOM = "examples/custom_tool/tool_config.yaml"
RUN = "examples/gsm8k/run.yaml"
TOOLROLL = Path(sys.executable).with_name("toolroll")
NOISY = """
import logging, sys
from toolroll import tool
print("loading")
print("loading", file=sys.stderr)
logging.getLogger("noisy").error("loading")
@tool
def whisper() -> str:
    'Whisper.'
"""


def complete(folder: Path, *words: str) -> list[str]:
    """Return the proposals for the last word. A shell would show anything else that the command prints."""
    protocol = {"_TOOLROLL_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words))}
    environment = {**os.environ, **protocol, "COMP_WORDS": "\n".join(["toolroll", *words])}
    done = subprocess.run([TOOLROLL], capture_output=True, text=True, timeout=60, cwd=folder, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize("command", ["call", "schema"])
def test_tool_names(root: Path, command: str) -> None:
    assert complete(root, "tools", command, CUSTOM, "") == ["convert", "pantry"]
    assert complete(root, "tools", command, CUSTOM, "p") == ["pantry"]
    assert complete(root, "tools", command, "nowhere.yaml", "p") == []


def test_output_of_tool_modules_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: noisy.whisper}]")
    assert complete(tmp_path, "tools", "call", "tools.yaml", "") == ["whisper"]


@pytest.mark.parametrize(
    ("words", "proposals"),
    [
        (
            ["engine.k"],
            ["engine.kind=", *(f"engine.kind={kind}" for kind in ("sglang", "vllm", "openai", "transformers"))],
        ),
        (["engine.kind=v"], ["engine.kind=vllm"]),
        (["engine.kind", "=", "v"], ["vllm"]),
        (["n"], ["n=", "n=4"]),
        (["n", "="], ["4"]),
        (["n=8", "record"], ["record_tokens=", "record_tokens=true", "record_tokens=false"]),
        (["n", "=", "8", "thinking", "=", "k"], ["keep"]),
        (["tools", "=", "n", "retr"], ["retry=", "retry=infra", "retry=none"]),
        (["sampling_params."], ["sampling_params.temperature=", "sampling_params.temperature=1.0"]),
        (["model"], ["model=", "model_format="]),
        (["nothing"], []),
    ],
)
def test_settings_of_a_run(root: Path, words: list[str], proposals: list[str]) -> None:
    assert complete(root, "run", RUN, *words) == proposals


def test_all_settings_are_proposed(root: Path) -> None:
    proposed = complete(root, "run", RUN, "")
    assert {"n=", "engine.urls=", "limits.max_assistant_turns=", "rewards.functions.right="} <= set(proposed)
    assert "engine=" not in proposed
    assert "engine.kind=" in complete(root, "run", "nowhere.yaml", "")


def test_bash(root: Path, terminal: Terminal, tmp_path: Path) -> None:
    for name in ("tool_config.yaml", "run.yaml"):
        shutil.copy(root / "examples/gsm8k" / name, tmp_path)
    path = f"PATH={TOOLROLL.parent}{os.pathsep}{os.environ['PATH']}"
    terminal.run("env", path, "PS1=ready> ", "bash", "--norc", "--noprofile", folder=tmp_path)
    terminal.sees("ready>")
    terminal.type("source <(_TOOLROLL_COMPLETE=source_bash toolroll); echo sour''ced\n")
    terminal.sees("sourced")
    terminal.type("toolroll tools schema tool_config.yaml calc\t# one")
    terminal.sees("ready> toolroll tools schema tool_config.yaml calc_gsm8k_reward # one")
    terminal.press("C-u")
    terminal.type("toolroll run run.yaml engine.ki\tvl\tlimits.max_as\t9 # two")
    terminal.sees("ready> toolroll run run.yaml engine.kind=vllm", "limits.max_assistant_turns=9 # two")
