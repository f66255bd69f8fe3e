"""Tests of the verl page and of its example. test_verl.py tests their settings."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import doc_page
import pytest
import yaml

from integrations import verl_stage
from toolroll import initialize_tools_from_config
from toolroll.errors import validate
from toolroll.integrations.verl.settings import AgentSettings, resolve_limits

pytestmark = pytest.mark.verl


def test_files_of_example_load() -> None:
    tools = initialize_tools_from_config(verl_stage.EXAMPLE / "tool_config.yaml")
    assert [tool.name for tool in tools] == ["code_interpreter", "calc_gsm8k_reward"]
    check_agent_loop(verl_stage.EXAMPLE / "agent_loop.yaml")


def check_agent_loop(path: Path) -> None:
    (entry,) = yaml.safe_load(path.read_text())
    assert (entry.pop("name"), entry.pop("_target_")) == ("toolroll", "toolroll.integrations.verl.ToolrollAgentLoop")
    settings = validate(AgentSettings, entry, str(path))
    resolve_limits({"prompt_length": 512, "response_length": 512, "multi_turn": {}}, settings.limits)


def test_commands_of_page(tmp_path: Path) -> None:
    """The commands run in verl's environment."""
    for file in ("prepare.py", "questions.jsonl"):
        (tmp_path / file).symlink_to(verl_stage.EXAMPLE / file)
    path = f"{Path(verl_stage.pythons()['0.9']).parent}:/usr/bin:/bin"
    commands = doc_page.commands(verl_stage.PAGE.read_text())
    assert commands
    for command in commands:
        printed = verl_stage.run(["bash", "-c", command.line], tmp_path, PATH=path)
        assert doc_page.trimmed(printed) == doc_page.trimmed(command.output)


def test_rows_of_example_have_verl_format() -> None:
    spec = spec_from_file_location("prepare", verl_stage.EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    prepare = module_from_spec(spec)
    spec.loader.exec_module(prepare)
    line = {"question": "How many?", "answer": "Some. <<1+1=2>>\n#### 1,234"}
    row = prepare.row(line, 3, "train", "toolroll")
    assert row["agent_name"] == "toolroll"
    assert row["reward_model"]["ground_truth"] == "1234"
    assert row["extra_info"]["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1234"}}}
