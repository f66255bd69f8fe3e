"""The list of defences that `scripts/check_defences.py` disables fits the code and the documentation."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("check_defences", ROOT / "scripts" / "check_defences.py")
assert SPEC
assert SPEC.loader
check_defences = importlib.util.module_from_spec(SPEC)
sys.modules["check_defences"] = check_defences
SPEC.loader.exec_module(check_defences)


@pytest.mark.parametrize("defence", check_defences.DEFENCES, ids=lambda defence: defence.name)
def test_code_to_disable_is_found_once(defence: Any) -> None:
    assert (ROOT / defence.file).read_text().count(defence.code) == 1


def test_documentation_lists_all_defences() -> None:
    rows = [f"| {one.name} | `{one.test.partition('::')[2]}` |" for one in check_defences.DEFENCES]
    listed = (ROOT / "docs" / "security.md").read_text().splitlines()
    assert [line for line in listed if "| `test_" in line] == rows
