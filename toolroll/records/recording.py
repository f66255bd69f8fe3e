"""Recorded trajectories of a directory, for replays."""

from __future__ import annotations

import logging
from pathlib import Path

from toolroll.errors import ConfigError, ReplayMiss
from toolroll.images import Image, read_image
from toolroll.records.directory import StrPath, dump_files
from toolroll.records.image_directory import IMAGES_NAME
from toolroll.records.json_line import BadLine
from toolroll.records.reader import READ_BUFFER_BYTES, check_complete, read_lines
from toolroll.records.record import Record
from toolroll.records.restore import restore_trajectory
from toolroll.rollout.engines.base import LogprobsMode
from toolroll.rollout.replay.recording import RecordedTrajectory

logger = logging.getLogger(__name__)


class RecordDirectory:
    """The recorded trajectories of a run's directory. Implements `Recording`.

    All files are read once to find the position of each sample; the samples themselves are read when they are needed.
    If a sample was recorded several times, the record of the last step is used.

    Args:
        directory: The run's `rollout_data_dir`.

    Raises:
        ConfigError: If the directory does not exist, cannot be read, or has no records.
    """

    def __init__(self, directory: StrPath) -> None:
        self._directory = Path(directory)
        self._places: dict[tuple[str, int], tuple[str, int, int]] = {}
        self.logprobs_mode: LogprobsMode | None = None
        self._repeated = 0
        for file in dump_files(directory):
            position = 0
            try:
                opened = Path(file.path).open("rb", READ_BUFFER_BYTES)  # noqa: SIM115 (only opening is in the try block)
            except OSError as error:
                raise ConfigError(f"Cannot read {file.path}: {error.strerror}.") from error
            with opened:
                for line in read_lines(opened):
                    self._add(file.path, position, line)
                    position += len(line)
        if not self._places:
            raise ConfigError(f"No records in {directory}. Pass the rollout_data_dir of a run.")
        if self._repeated:
            message = "%s has %d records of samples that are recorded again later. The last record of each is replayed."
            logger.warning(message, directory, self._repeated)

    def __len__(self) -> int:
        return len(self._places)

    def find(self, group: str, sample: int) -> RecordedTrajectory:
        """Return a recorded trajectory.

        Args:
            group: Group of the trajectory.
            sample: Index of the sample in its group.

        Returns:
            The trajectory, read from its file.

        Raises:
            ReplayMiss: If there is no record of it, or the record cannot be read.
        """
        if (group, sample) not in self._places:
            raise ReplayMiss(f"No record of sample {sample} of group {group!r} in {self._directory}.")
        path, start, length = self._places[group, sample]
        try:
            with Path(path).open("rb") as file:
                file.seek(start)
                record = Record.parse(check_complete(file.read(length)))
            return RecordedTrajectory.of(restore_trajectory(record, self._read_image))
        except (BadLine, ConfigError, OSError, ValueError) as error:  # ConfigError: an image is missing
            raise ReplayMiss(f"The record of sample {sample} of group {group!r} cannot be read: {error}") from error

    def _add(self, path: str, position: int, line: bytes) -> None:
        try:
            record = Record.parse(check_complete(line))
        except BadLine:
            return
        if record.is_native and record.group is not None and record.sample is not None:
            self._repeated += (record.group, record.sample) in self._places
            self._places[record.group, record.sample] = path, position, len(line)
            self.logprobs_mode = self.logprobs_mode or record.fields.get("logprobs_mode")

    def _read_image(self, image: Image) -> Image:
        return read_image(self._directory / IMAGES_NAME / image.file_name)
