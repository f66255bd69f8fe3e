"""Send the traces of records to an OpenTelemetry collector."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from toolroll._internal.text import hide_credentials
from toolroll.errors import ConfigError
from toolroll.records.record import Record
from toolroll.tracing.exporter import MAX_BATCH_SPANS, SpanSender, span_context
from toolroll.tracing.spans import TraceSpan, trajectory_spans


@dataclass
class ExportCounts:
    """Numbers of exported and skipped records."""

    records: int = 0
    spans: int = 0
    skipped: int = 0
    """Number of records that toolroll did not write, which have no timings."""


def export(records: Iterable[Record], endpoint: str, model: str | None = None) -> ExportCounts:
    """Send a trace of each record to a collector.

    Args:
        records: Records to export. Those that toolroll did not write are skipped.
        endpoint: URL of the collector.
        model: Name of the model.

    Returns:
        The numbers of records and spans.

    Raises:
        ConfigError: If the URL is invalid, or the collector does not accept the spans.
        MissingExtra: If OpenTelemetry is not installed.
    """
    sender, counts, context = SpanSender(endpoint), ExportCounts(), span_context(model, None)
    batch: list[TraceSpan] = []

    def send() -> None:
        if batch and not sender.send(batch):
            raise ConfigError(
                f"{hide_credentials(endpoint)}: The collector did not accept the spans. Check that it is running."
            )
        counts.spans += len(batch)
        batch.clear()

    try:
        for record in records:
            if not record.is_native:
                counts.skipped += 1
                continue
            batch += trajectory_spans({**record.fields, "turns": record.turns, "calls": record.calls}, context)
            counts.records += 1
            if len(batch) >= MAX_BATCH_SPANS:
                send()
        send()
    finally:
        sender.close()
    return counts
