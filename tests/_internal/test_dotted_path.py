"""Objects are imported by their dotted path, and an error names the part that failed."""

import math
from pathlib import Path

import pytest

from toolroll._internal.dotted_path import import_dotted_path
from toolroll.errors import ConfigError

LAZY = """
def __getattr__(name):
    if name == "heavy":
        import not_installed_anywhere
    raise AttributeError(name)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        "dotted_needy": "import not_installed_anywhere",
        "dotted_raising": "1 / 0",
        "dotted_exiting": "raise SystemExit(3)",
        "dotted_lazy": LAZY,
        "dotted_few": "Echo = 1",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_object_is_imported() -> None:
    assert import_dotted_path("math.floor") is math.floor
    assert import_dotted_path("os.path.join") is __import__("os").path.join


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Echo", "Expected a dotted path, got 'Echo'. Include the module: my_module.Echo."),
        ("", "Expected a dotted path, got ''. Include the module: my_module.my_name."),
        (
            "not_there.sub.Echo",
            "No module named 'not_there', needed by 'not_there.sub.Echo'. "
            "Install it, or add its directory to PYTHONPATH.",
        ),
        ("dotted_needy.X", "No module named 'not_installed_anywhere', needed by 'dotted_needy'. Install it."),
        ("dotted_lazy.heavy", "No module named 'not_installed_anywhere', needed by 'dotted_lazy'. Install it."),
        ("dotted_raising.X", "Importing 'dotted_raising.X' failed: ZeroDivisionError: division by zero. Check"),
        ("dotted_exiting.X", "Importing 'dotted_exiting.X' failed: SystemExit: 3. Check"),
        (".relative.X", "Importing '.relative.X' failed: TypeError"),
        ("math.flor", "Module 'math' has no attribute 'flor'"),
        ("dotted_lazy.light", "Module 'dotted_lazy' has no attribute 'light'."),
    ],
)
def test_error_names_the_failure_and_the_fix(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_dotted_path(path)
    assert str(caught.value).startswith(message)
    with pytest.raises(ConfigError) as caught:
        import_dotted_path(path, setting="engine.kind")
    assert str(caught.value).startswith(f"engine.kind: {message}")


def test_near_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"'Ecko'.*'Echo'"):
        import_dotted_path("dotted_few.Ecko")
