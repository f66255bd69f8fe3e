"""The YAML on the page about limits is valid."""

import re
from pathlib import Path

import yaml

from toolroll import ResourceLimits

BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_keys_on_the_page_are_those_of_the_settings(root: Path) -> None:
    [block] = BLOCK.findall((root / "docs/limiter.md").read_text())
    shown = yaml.safe_load(block)["limits"]
    assert shown.keys() == ResourceLimits.model_fields.keys()
    assert ResourceLimits(**shown).policy().adapts


def test_examples_of_the_table_are_valid(root: Path) -> None:
    page = (root / "docs/limiter.md").read_text()
    [table] = re.findall(r"^## Choosing limits\n\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    rows = [re.findall(r"`([^`]+)`", row.split("|")[3]) for row in table.splitlines()[2:]]
    assert len(rows) == 5
    for examples in rows:
        of_resource = [example for example in examples if not example.startswith("rate_limit:")]
        limits = ResourceLimits(**yaml.safe_load("\n".join(of_resource)))
        assert limits.policy() != ResourceLimits().policy()
