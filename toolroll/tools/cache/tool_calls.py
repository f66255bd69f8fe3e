"""The cache of one tool: its settings, the keys of its calls, and the store."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from toolroll._internal.canonical import NotCanonical, hash_of
from toolroll.errors import ConfigError
from toolroll.limiter.registry import is_connected
from toolroll.tools.base_tool import BaseTool, ToolResult
from toolroll.tools.cache.backend import ClusterStore, LocalStore, StoreBackend
from toolroll.tools.cache.encoding import ENCODING_VERSION
from toolroll.tools.cache.result_cache import Call, ResultCache
from toolroll.tools.cache.store import IN_MEMORY
from toolroll.tools.cache_settings import CacheSettings

logger = logging.getLogger(__name__)

RESULTS_FILE = "tool_results.sqlite"
"""Name of the file with the results, in the directory of a run and in the user's cache directory."""
RUN_ID_FILE = ".run_id"

_caches: dict[tuple[str, bool], ResultCache] = {}
"""Caches of this process, by path and by whether the process is connected to a Ray cluster."""
_max_mb: dict[str, int] = {}
"""Largest `max_mb` of the tools in this process that use a path."""
_inherited: list[ResultCache] = []
_lock = threading.Lock()


def cache_settings(tool: BaseTool[Any]) -> CacheSettings | None:
    """Return the settings of a tool's cache, or None if its calls are not cached."""
    if isinstance(tool.cache, CacheSettings):  # a tool may use the name for something else
        return tool.cache
    return CacheSettings() if tool.pure is True else None


def register_cache(tool: BaseTool[Any]) -> CacheSettings | None:
    """Return the settings of a tool's cache, or None. Raise the maximum size of its file to that of the tool."""
    settings = cache_settings(tool)
    if settings is not None:
        with _lock:
            path = _path_of(settings)
            _max_mb[path] = max(_max_mb.get(path, 0), settings.max_mb)
    return settings


def configure_caches(tools: Iterable[BaseTool[Any]], *, run_directory: Path, data: str) -> None:
    """Set the files and owners of the tools' caches for a run.

    Args:
        tools: Tools of the run.
        run_directory: The run's directory.
        data: Hash of the run's data.

    Raises:
        ConfigError: If the run's directory cannot be used.
    """
    for tool in tools:
        if (settings := cache_settings(tool)) is not None:
            owner = _run_id(run_directory) if settings.scope == "run" else data
            tool.cache = settings.model_copy(update={"path": _file_of(settings, run_directory), "owner": owner})


def _run_id(run_directory: Path) -> str:
    """Return the id of the run in a directory, which is lost with the directory. The first caller chooses it."""
    file, run_id = run_directory / RUN_ID_FILE, uuid4().hex
    try:
        if not file.exists():
            run_directory.mkdir(parents=True, exist_ok=True)
            complete = file.with_name(f"{RUN_ID_FILE}.{run_id}")
            complete.write_text(run_id)
            with suppress(FileExistsError):  # another worker was faster
                file.hardlink_to(complete)
            complete.unlink()
        return file.read_text()
    except OSError as error:
        raise ConfigError(f"Cannot use rollout_data_dir {run_directory}: {error.strerror}.") from error


def cache_files(tools: Iterable[BaseTool[Any]], *, run_directory: Path) -> set[str]:
    """Return the files with the results of a run's tools."""
    found = [settings for tool in tools if (settings := cache_settings(tool)) is not None]
    return {_file_of(settings, run_directory) for settings in found}


def _file_of(settings: CacheSettings, run_directory: Path) -> str:
    default = run_directory if settings.scope == "run" else _user_cache()
    return settings.path or str(default / RESULTS_FILE)


async def cached_call(
    tool: BaseTool[Any],
    settings: CacheSettings,
    inputs: Mapping[str, Any],
    call: Call,
    origin: str,
) -> ToolResult:
    """Return the result of a call from the cache, or make the call. See `ResultCache.fetch`.

    Args:
        tool: The tool.
        settings: Settings of its cache, from `register_cache`.
        inputs: The arguments of the call and all other values on which its result depends.
        call: Makes the call.
        origin: Id of the trajectory.
    """
    if tool.fingerprint is None:
        return await call()
    try:
        key = hash_of(ENCODING_VERSION, tool.name, tool.fingerprint, inputs, settings.scope, _owner(settings))
    except NotCanonical as error:
        logger.debug("A call of %r is not cached: %s", tool.name, error)
        return await call()
    max_mb = _max_mb.get(_path_of(settings), settings.max_mb)
    return await _get_cache(settings).fetch(key, call, settings.model_copy(update={"max_mb": max_mb}), origin)


def close_result_caches() -> None:
    """Close the stores of this process. Their files keep the results."""
    with _lock:
        caches = list(_caches.values())
        _caches.clear()
    for cache in caches:
        cache.close()


def _get_cache(settings: CacheSettings) -> ResultCache:
    connected, path = is_connected(), _path_of(settings)
    with _lock:
        if (path, connected) not in _caches:
            backend: StoreBackend = ClusterStore(path) if connected else LocalStore(path)
            _caches[path, connected] = ResultCache(backend, path)
        return _caches[path, connected]


def _path_of(settings: CacheSettings) -> str:
    return settings.path or (str(_user_cache() / RESULTS_FILE) if settings.scope == "dataset" else IN_MEMORY)


def _owner(settings: CacheSettings) -> str:
    if settings.owner or settings.scope == "dataset" or not is_connected():
        return settings.owner
    import ray  # without a run of toolroll, a run is a job

    return str(ray.get_runtime_context().get_job_id())


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolroll"


def _reset_after_fork() -> None:
    """Leave the parent's caches alone: closing its connections here would remove the log of the file that it uses."""
    global _lock
    _inherited.extend(_caches.values())
    _caches.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
