"""An OpenTelemetry collector for tests: receives spans over HTTP."""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Collector:
    """Receives OTLP over HTTP in a thread, and decodes the spans."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        self.paths: set[str] = set()
        self.requests = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.receive(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def receive(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.requests += 1
        self.paths.add(path)
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(resource_spans.resource)
            for scope_spans in resource_spans.scope_spans:
                self.spans += scope_spans.spans

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the collector did not receive the spans"
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """Return the attributes of a span as Python values."""

    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(one) for one in found.values] if kind == "array_value" else found

    return {one.key: value(one.value) for one in span.attributes}


def tree(spans: list[Any]) -> list[tuple[str, ...]]:
    """Return the path of names from the root to each span, sorted."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "span ids are not unique"

    def path(span: Any) -> tuple[str, ...]:
        return (*path(by_id[span.parent_span_id]), span.name) if span.parent_span_id else (span.name,)

    return sorted(map(path, spans))
