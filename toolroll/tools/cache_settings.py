"""Settings of the cache of a tool, as users write them in YAML and in Python.

cache:
  scope: dataset     # who shares the results: `run` (default) or `dataset`
  ttl: 86400         # age in seconds from which a result is not used any more; default: none
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CacheSettings(BaseModel):
    """Cache of the results of a pure tool.

    Example:
        >>> CacheSettings(scope="dataset", ttl=86400).max_mb
        1024
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scope: Literal["run", "dataset"] = "run"
    """Which calls share results: those of one run, or those of all runs with the same data set."""
    ttl: float | None = Field(default=None, gt=0)
    """Age in seconds from which a result is not used any more. Default: none."""
    path: str | None = None
    """SQLite file with the results, relative to the directory of the tool config. Default: in the run's directory; with
    scope `dataset`, in the user's cache directory."""
    max_mb: int = Field(default=1024, ge=1)
    """Maximum size of the results in the file, in MB. The oldest are removed."""
    owner: str = Field(default="", exclude=True, repr=False)
    """Id of the run or the data set. Set by `toolroll run`."""

    def with_path_in(self, directory: Path) -> CacheSettings:
        """Return the settings with an absolute path.

        Args:
            directory: Directory to which a relative path refers.

        Returns:
            The settings.
        """
        if self.path is None:
            return self
        return self.model_copy(update={"path": str((directory / Path(self.path).expanduser()).absolute())})
