"""Taking a sample out of the viewer, as Markdown: to a file, or to the browser."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from textual.app import App

from toolroll.records.record import Record
from toolroll.viewer.listing import Place
from toolroll.viewer.markdown import markdown


def sample_markdown(place: Place | None, record: Record | None) -> str | None:
    """A sample as Markdown; None where there is none."""
    if place is None or record is None:
        return None
    return markdown(record, f"step {place.step.name}, sample {place.row + 1}")


def file_name(place: Place) -> str:
    """What the file is called."""
    step = re.sub(r"[^\w.-]", "_", place.step.name)[:80] or "_"
    return f"step-{step}-sample-{place.row + 1}.md"


def free_path(directory: Path, name: str) -> Path:
    """A path of this name at which nothing is yet."""
    path, number = directory / name, 2
    while path.exists():
        path = directory / f"{Path(name).stem}-{number}.md"
        number += 1
    return path


def export_sample(app: App[Any], place: Place | None, record: Record | None) -> None:
    """Write the sample, and say where to. Nothing is ever overwritten."""
    text = sample_markdown(place, record)
    if place is None or text is None:
        app.notify("There is no sample to export.")
        return
    name = file_name(place)
    if app.is_web:
        app.deliver_text(io.StringIO(text), save_filename=name)
        return
    path = free_path(Path.cwd(), name)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        app.notify(f"{path} can't be written: {error.strerror}.", severity="error", markup=False)
    else:
        app.notify(f"Written to {path}", markup=False)
