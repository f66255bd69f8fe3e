"""Rules for the package as a whole: unique names, small folders, a documented public API."""

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import toolroll

PACKAGE = Path(toolroll.__file__).parent
MODULES = {
    path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8"))
    for path in PACKAGE.rglob("*.py")
    if "_examples" not in path.parts  # the wheel contains the examples, which are not modules
}
MAX_MODULES_PER_FOLDER = 16


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path, module in MODULES.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path))
    assert len(places) > 200
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_constants_of_one_name_have_one_value() -> None:
    values: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, module in MODULES.items():
        for node in module.body:
            names = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for name in names:
                if isinstance(name, ast.Name) and name.id.isupper() and node.value is not None:  # type: ignore[attr-defined]
                    values[name.id.lstrip("_")][ast.unparse(node.value)].append(str(path))  # type: ignore[attr-defined]
    assert len(values) > 100
    assert {name: dict(found) for name, found in values.items() if len(found) > 1} == {}


def test_folders_stay_small() -> None:
    sizes: defaultdict[str, int] = defaultdict(int)
    for path in MODULES:
        sizes[str(path.parent)] += path.name != "__init__.py"
    assert len(sizes) > 20
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES_PER_FOLDER} == {}


def public_functions(exported: Any) -> Iterator[tuple[Callable[..., Any], str]]:
    """Yield an exported function, or the public methods that an exported class defines, with their docstrings."""
    if inspect.isfunction(exported):
        yield exported, inspect.getdoc(exported) or ""
    elif inspect.isclass(exported):
        for name, member in vars(exported).items():
            function = getattr(member, "__func__", member)
            if not name.startswith(("_", "model_")) and inspect.isfunction(function):
                yield function, inspect.getdoc(getattr(exported, name)) or ""


def missing_sections(function: Callable[..., Any], doc: str) -> Iterator[str]:
    """Yield the Google-style sections that apply to a function and that its docstring lacks."""
    signature = inspect.signature(function)
    if set(signature.parameters) - {"self", "cls"} and "Args:" not in doc:
        yield "Args"
    is_none = signature.return_annotation in (None, "None", "NoReturn", inspect.Signature.empty)
    if not is_none and not doc.startswith("Return ") and "Returns:" not in doc and "Yields:" not in doc:
        yield "Returns"
    source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raises = any(isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) for node in ast.walk(source))
    if raises and "Raises:" not in doc:
        yield "Raises"


@pytest.mark.parametrize("name", toolroll.__all__)
def test_exported_name_is_documented(name: str) -> None:
    exported = getattr(toolroll, name)
    assert inspect.getdoc(exported), f"{name} has no docstring"
    found = {}
    for function, doc in public_functions(exported):
        if missing := [*missing_sections(function, doc)]:
            found[function.__qualname__] = missing
    assert found == {}
