"""Access log of the sandbox server: one line for each request, without its content."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from toolroll.tracing.context import TRACEPARENT_HEADER, read_trace_id

access_logger = logging.getLogger("toolroll.sandbox.access")


class AccessLogger(AbstractAccessLogger):
    """Logs requests with extra fields, which a formatter of structured logs can use."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log a request that was answered after `time` seconds."""
        if request.remote == "":  # it came over a Unix socket: the front that has forwarded it logs it
            return
        fields = {
            "method": request.method,
            "path": request.path,
            "status": response.status,
            "seconds": round(time, 4),
            "remote": request.remote,
        }
        message = "%(method)s %(path)s %(status)d %(seconds).4f s from %(remote)s"
        if (trace := read_trace_id(request.headers.get(TRACEPARENT_HEADER, ""))) is not None:
            fields["trace_id"] = trace
            message += " trace %(trace_id)s"
        self.logger.info(message, fields, extra=fields)
