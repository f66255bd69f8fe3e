"""Send spans to an OpenTelemetry collector, in a thread.

Invariants:

- Adding a trajectory neither blocks nor fails, whatever the collector does. If `MAX_PENDING_TRAJECTORIES` are waiting,
  further ones are dropped.
- A collector that fails causes one warning, and so do values that cannot be encoded. Tracing continues.
- Closing takes at most `FLUSH_TIMEOUT_S`, plus the time to give up.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from toolroll._internal.text import hide_credentials, replace_lone_surrogates
from toolroll.errors import ConfigError, MissingExtra
from toolroll.tracing.context import current_sink, set_sink
from toolroll.tracing.spans import TraceSpan, live_fields, trajectory_spans

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
TRACES_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""Variable with the complete URL for traces."""
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
SAMPLER_VARIABLE = "OTEL_TRACES_SAMPLER"
RATIO_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"
DEFAULT_ENDPOINT = "http://localhost:4318"
EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
MAX_PENDING_TRAJECTORIES = 2048
MAX_BATCH_SPANS = 512
"""Number of spans at which a batch is sent. Encoding one takes about 20 ms."""
BATCH_INTERVAL_S = 1.0
"""Maximum time that the first spans of a batch wait for others."""
FLUSH_TIMEOUT_S = 5.0
"""Time to send the remaining spans when tracing ends."""
GIVE_UP_TIMEOUT_S = 2.0


class SpanSender:
    """Encodes spans and sends them to a collector.

    Args:
        endpoint: URL of the collector, with or without the path of traces. The value of `TRACES_ENDPOINT_VARIABLE` is
            used as it is.

    Raises:
        ConfigError: If the URL is not HTTP.
        MissingExtra: If OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            shown = hide_credentials(endpoint)
            raise ConfigError(f"Invalid URL of a collector: {shown!r}. Expected a URL such as {DEFAULT_ENDPOINT!r}.")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise MissingExtra("opentelemetry-exporter-otlp-proto-http", "otel") from error
        url = endpoint.rstrip("/")
        is_complete = url.endswith(TRACES_PATH) or endpoint == os.environ.get(TRACES_ENDPOINT_VARIABLE)
        self._exporter: Any = OTLPSpanExporter(endpoint if is_complete else url + TRACES_PATH)
        name = os.environ.get("OTEL_SERVICE_NAME", "toolroll")
        self._resource = Resource.create({"service.name": name, "service.version": version("toolroll")})
        self._scope = InstrumentationScope("toolroll", version("toolroll"))

    def send(self, spans: Iterable[TraceSpan]) -> bool:
        """Send spans. Return False if the collector did not accept them in time."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        return self._exporter.export([self._to_otel(span) for span in spans]) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Give up on the current request, and send nothing more."""
        self._exporter.shutdown()

    def _to_otel(self, span: TraceSpan) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace, flags = int(span.trace_id, 16), TraceFlags(TraceFlags.SAMPLED)
        parent = None if span.parent_id is None else SpanContext(trace, int(span.parent_id, 16), False, flags)
        return ReadableSpan(
            replace_lone_surrogates(span.name),
            context=SpanContext(trace, int(span.span_id, 16), False, flags),
            parent=parent,
            resource=self._resource,
            attributes={key: _clean(value) for key, value in span.attributes.items()},
            kind=SpanKind.CLIENT if span.is_client else SpanKind.INTERNAL,
            status=Status() if span.error is None else Status(StatusCode.ERROR, replace_lone_surrogates(span.error)),
            start_time=int(span.start * 1e9),
            end_time=int(span.end * 1e9),
            instrumentation_scope=self._scope,
        )


def _clean(value: Any) -> Any:
    """Return a value that can be encoded. Tools choose some of them."""
    if isinstance(value, list):
        return [_clean(one) for one in value]
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
    return value if is_number else replace_lone_surrogates(str(value))


class Tracing:
    """Sends the trajectories of this process to a collector, from `start()` to `close()`.

    Args:
        endpoint: URL of the collector.
        model: Name of the model, for the attribute `gen_ai.request.model`.
        engine: Name of the engine, for the attribute `gen_ai.provider.name`.

    Raises:
        ConfigError: If the URL or the fraction of sampled traces is invalid.
        MissingExtra: If OpenTelemetry is not installed: `pip install 'toolroll[otel]'`.

    Attributes:
        dropped: Number of trajectories that were not exported because too many were waiting.
    """

    def __init__(self, endpoint: str, *, model: str | None = None, engine: str | None = None) -> None:
        self.dropped = 0
        self._endpoint = hide_credentials(endpoint)
        self._context = span_context(model, engine)
        self._sample_ratio = sample_ratio()
        self._sender = SpanSender(endpoint)
        self._pending: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_PENDING_TRAJECTORIES)
        self._has_failed = False
        self._export_error: str | None = None
        """Last error that OpenTelemetry's exporter logged."""
        self._has_given_up = False
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._sink = self._add
        self._is_started = False

    def start(self) -> None:
        """Start to trace the trajectories of this process. Does nothing if already started."""
        if not self._is_started:
            self._is_started = True
            logging.getLogger(EXPORTER_LOGGER).addFilter(self._is_of_others)
            self._thread.start()
            set_sink(self._sink, self._sample_ratio)

    def _add(self, trajectory: Any) -> None:
        """Export a trajectory, or drop it if too many are waiting."""
        if not self._pending.full():  # reading the fields of a trajectory takes longer than dropping it
            with contextlib.suppress(queue.Full):
                self._pending.put_nowait(live_fields(trajectory))
                return
        self.dropped += 1

    def close(self) -> None:
        """Send the remaining spans, for at most a few seconds, and stop tracing. Does nothing if already closed."""
        if current_sink() is self._sink:
            set_sink(None)
        if not self._thread.is_alive():
            return
        ends = time.monotonic() + FLUSH_TIMEOUT_S
        with contextlib.suppress(queue.Full):
            self._pending.put(None, timeout=FLUSH_TIMEOUT_S)
            self._thread.join(max(0.0, ends - time.monotonic()))
        self._has_given_up = self._thread.is_alive()
        self._sender.close()
        self._thread.join(GIVE_UP_TIMEOUT_S)
        logging.getLogger(EXPORTER_LOGGER).removeFilter(self._is_of_others)
        if self.dropped:
            logger.info("%d trajectories were not traced: the collector is too slow", self.dropped)

    def _is_of_others(self, record: logging.LogRecord) -> bool:
        """Return False for messages about our requests, which would be repeated with every batch."""
        if record.thread != self._thread.ident:
            return True
        if record.levelno >= logging.ERROR:
            self._export_error = hide_credentials(record.getMessage()).rstrip(".")
        return False

    def _run(self) -> None:
        is_open = True
        while is_open and not self._has_given_up:
            batch, is_open = self._next_batch()
            if batch:
                self._send(batch)

    def _next_batch(self) -> tuple[list[TraceSpan], bool]:
        """Wait for spans. Return them, and False if they are the last ones."""
        spans: list[TraceSpan] = []
        ends: float | None = None
        while len(spans) < MAX_BATCH_SPANS:
            try:
                fields = self._pending.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
            except queue.Empty:
                break
            if fields is None:
                return spans, False
            try:
                spans += trajectory_spans(fields, self._context)
            except Exception as error:  # an odd value of a tool: tracing must not end because of it
                self._warn_once(f"{type(error).__name__}: {error}")
            ends = ends or time.monotonic() + BATCH_INTERVAL_S
        return spans, True

    def _send(self, spans: list[TraceSpan]) -> None:
        try:
            if not self._sender.send(spans):
                self._warn_once(self._export_error or "the collector did not accept the spans in time")
        except Exception as error:  # a bug, or an odd value
            self._warn_once(f"{type(error).__name__}: {error}")

    def _warn_once(self, problem: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("cannot send traces to %s: %s. The rollout continues.", self._endpoint, problem)


def start_tracing(endpoint: str | None = None, *, model: str | None = None, engine: str | None = None) -> Tracing:
    """Send a trace of each trajectory of this process to an OpenTelemetry collector.

    Args:
        endpoint: URL of a collector that accepts OTLP over HTTP. Defaults to `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`,
            `OTEL_EXPORTER_OTLP_ENDPOINT`, or else `http://localhost:4318`. The exporter reads the other variables of
            OpenTelemetry, such as `OTEL_EXPORTER_OTLP_HEADERS`. `OTEL_TRACES_SAMPLER=traceidratio` and
            `OTEL_TRACES_SAMPLER_ARG=0.1` trace a tenth of the trajectories.
        model: Name of the model, for the attribute `gen_ai.request.model`.
        engine: Name of the engine, for the attribute `gen_ai.provider.name`.

    Returns:
        The tracing of this process. `close()` it at the end, which sends the last spans.

    Raises:
        ConfigError: If the URL or the fraction of sampled traces is invalid.
        MissingExtra: If OpenTelemetry is not installed: `pip install 'toolroll[otel]'`.

    Example:
        ```python
        from toolroll import start_tracing

        tracing = start_tracing("http://collector:4318", model="Qwen/Qwen3-8B", engine="sglang")
        ...
        tracing.close()
        ```
    """
    tracing = Tracing(endpoint or default_endpoint(), model=model, engine=engine)
    tracing.start()
    return tracing


def default_endpoint() -> str:
    """Return the endpoint that the environment names, or else that of a collector on this machine."""
    return os.environ.get(TRACES_ENDPOINT_VARIABLE) or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT


def sample_ratio() -> float:
    """Return the fraction of trajectories to trace, which the environment names as for other uses of OpenTelemetry.

    Raises:
        ConfigError: If it is not a number from 0 to 1.
    """
    sampler = os.environ.get(SAMPLER_VARIABLE, "")
    if sampler.endswith("always_off"):
        return 0.0
    text = os.environ.get(RATIO_VARIABLE) if sampler.endswith("traceidratio") else None
    try:
        ratio = float(text or 1.0)
    except ValueError:
        ratio = math.nan
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"Invalid {RATIO_VARIABLE}: {text!r}. Expected a number from 0 to 1.")
    return ratio


def span_context(model: str | None, engine: str | None) -> dict[str, Any]:
    """Return the attributes that the operations of a run share."""
    return {"gen_ai.request.model": model, "gen_ai.provider.name": engine}
