"""Access log of the sandbox server: one line for each request, without its content."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

access_logger = logging.getLogger("toolroll.sandbox.access")


class AccessLogger(AbstractAccessLogger):
    """Logs requests with extra fields, which a formatter of structured logs can use."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log a request that was answered after `time` seconds."""
        fields = {
            "method": request.method,
            "path": request.path,
            "status": response.status,
            "seconds": round(time, 4),
            "remote": request.remote,
        }
        self.logger.info("%(method)s %(path)s %(status)d %(seconds).4f s from %(remote)s", fields, extra=fields)
