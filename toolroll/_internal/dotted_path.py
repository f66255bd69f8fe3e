"""Import objects that a config names by their dotted path."""

from __future__ import annotations

import importlib
from typing import Any

from toolroll.errors import ConfigError, did_you_mean

_MISSING = object()


def import_dotted_path(path: str, *, setting: str | None = None) -> Any:
    """Import the object that a dotted path names.

    Args:
        path: Module and attribute, such as "my_package.my_module.MyTool".
        setting: Name of the setting that contains the path. Error messages start with it.

    Returns:
        The attribute of the module.

    Raises:
        ConfigError: If the path has no module, the module cannot be imported, or it has no such attribute.

    Example:
        >>> import_dotted_path("math.floor")(2.5)
        2
    """
    prefix = f"{setting}: " if setting else ""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        example = f"my_module.{attribute or 'my_name'}"
        raise ConfigError(f"{prefix}Expected a dotted path, got {path!r}. Include the module: {example}.")
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, attribute, _MISSING)  # a lazy module may import others here
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        named_by_path = f"{module_name}.".startswith(f"{missing}.")
        needed_by = path if named_by_path else module_name
        remedy = "Install it, or add its directory to PYTHONPATH" if named_by_path else "Install it"
        raise ConfigError(f"{prefix}No module named {missing!r}, needed by {needed_by!r}. {remedy}.") from error
    except (Exception, SystemExit) as error:
        remedy = f"Check that `python -c 'import {module_name}'` works"
        raise ConfigError(f"{prefix}Importing {path!r} failed: {type(error).__name__}: {error}. {remedy}.") from error
    if found is _MISSING:
        hint = did_you_mean(attribute, [name for name in dir(module) if not name.startswith("_")])
        raise ConfigError(f"{prefix}Module {module_name!r} has no attribute {attribute!r}{hint}.")
    return found
