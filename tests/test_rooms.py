"""A room imports from the floors below it, never from above or beside it."""

import ast
from pathlib import Path

import toolroll

FLOORS = {
    "schemas": 1,
    "errors": 1,
    "keeper": 1,
    "ray_cluster": 2,
    "limiter": 2,
    "sandbox": 2,
    "runner": 3,
    "rewards": 3,
    "tools": 4,
    "rollout": 5,
    "records": 6,
    "run": 7,
    "integrations": 7,
    "viewer": 7,
    "cli": 8,
}
BESIDE = {("rewards", "runner")}
"""Imports from beside: the rewards run programs as the tools do, under the same limit."""
PACKAGE = Path(toolroll.__file__).parent


def imports(path: Path) -> set[str]:
    """The rooms of ours that a file imports."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        rooms |= {name.split(".")[1] for name in names if name.startswith("toolroll.")}
    return rooms


def test_rooms_import_from_the_floors_below_only() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    assert len(files) > 10
    for path in files:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for other in imports(path) - {room}:
            assert FLOORS[other] < FLOORS[room] or (room, other) in BESIDE, (
                f"{path.relative_to(PACKAGE)} imports from {other}"
            )


def test_no_trainer_s_integration_knows_of_another_s() -> None:
    rooms = [path for path in (PACKAGE / "integrations").iterdir() if (path / "__init__.py").exists()]
    assert rooms
    for path in (PACKAGE / "integrations").rglob("*.py"):
        others = [room.name for room in rooms if room not in path.parents]
        text = path.read_text()
        assert not [name for name in others if f"toolroll.integrations.{name}" in text], path.relative_to(PACKAGE)
