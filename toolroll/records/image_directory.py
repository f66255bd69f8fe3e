"""Images of records, each in a file that is named by its hash. Several processes may write to the same directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from toolroll.images import Image

IMAGES_NAME = "images"


class ImageDirectory:
    """A directory of images. It is created with the first image.

    Args:
        path: Path of the directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: set[str] = set()

    def add(self, images: Iterable[Image]) -> None:
        """Write the images that the directory does not contain.

        Raises:
            OSError: If an image cannot be written.
        """
        for image in images:
            if image.hash in self._written:
                continue
            file = self._path / image.file_name
            if not file.exists():
                self._path.mkdir(parents=True, exist_ok=True)
                # Under a temporary name, so that a file of an image is always complete.
                half = self._path / f".{image.hash}.{os.getpid()}.{threading.get_ident()}"
                half.write_bytes(image.data)
                half.replace(file)
            self._written.add(image.hash)
