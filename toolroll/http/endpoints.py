"""Choice of the endpoint for an attempt.

- Requests of one affinity go to one endpoint, by rendezvous hashing: all processes choose the same endpoint, and an
  additional endpoint only moves the requests that it receives.
- Requests without affinity go to the endpoint with the fewest outstanding requests.
- An endpoint that is down, or that sent `Retry-After`, cools down: it gets no requests while another endpoint is
  available. The cool-down doubles with each consecutive outage.

The functions are pure: the current time is an argument.
"""

from __future__ import annotations

import asyncio
import logging
import random
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from toolroll.http.failures import AttemptFailed

logger = logging.getLogger(__name__)

ENDPOINT_COOLDOWN_S = 2.0
"""Cool-down after the first outage of an endpoint."""
MAX_COOLDOWN_S = 30.0
RESERVED_FILES = 256
"""Number of open files reserved for the rest of the process."""


@dataclass(eq=False)
class Endpoint:
    """A server, as seen from one event loop."""

    url: str
    slots: asyncio.Semaphore
    """Free connections."""
    outstanding: int = 0
    """Number of requests that are being processed by this endpoint or wait for a slot."""
    cooldown_until: float = 0.0
    outages: int = 0
    """Number of consecutive outages since the last response."""
    down_since: float | None = None
    """Time of the first of these outages."""

    def record_success(self) -> None:
        """End the outages after a response."""
        self.outages, self.down_since = 0, None

    def is_cooling(self, now: float) -> bool:
        """Return True if the endpoint should not get requests at the moment."""
        return self.cooldown_until > now

    def record_failure(self, failure: AttemptFailed, now: float) -> None:
        """Start or extend the cool-down after an outage or a `Retry-After`."""
        pause_s = failure.retry_after_s or 0.0
        if failure.endpoint_down:
            if not self.outages or not self.is_cooling(now):  # concurrent failures are one outage
                self.outages += 1
            self.down_since = now if self.down_since is None else self.down_since
            pause_s = max(pause_s, ENDPOINT_COOLDOWN_S * 2 ** min(self.outages - 1, 10))
        self.cooldown_until = max(self.cooldown_until, now + min(pause_s, MAX_COOLDOWN_S))


def affinity_endpoint(endpoints: Sequence[Endpoint], affinity: str) -> Endpoint:
    """Return the endpoint of an affinity, even if the endpoint is down."""
    return min(endpoints, key=lambda endpoint: _rendezvous_rank(affinity, endpoint.url))


def choose_endpoint(
    endpoints: Sequence[Endpoint], affinity: str | None, attempts_by_url: Mapping[str, int], now: float
) -> Endpoint:
    """Return the endpoint for the next attempt of a request.

    Endpoints that do not cool down come first, then those with the fewest attempts of this request, then the endpoint
    of the affinity or the one with the fewest outstanding requests.
    """

    def rank(endpoint: Endpoint) -> tuple[float, int, float, float]:
        preference = endpoint.outstanding if affinity is None else _rendezvous_rank(affinity, endpoint.url)
        attempts = attempts_by_url.get(endpoint.url, 0)
        return max(endpoint.cooldown_until, now), attempts, preference, random.random()  # noqa: S311

    return min(endpoints, key=rank)


def connections_per_endpoint(endpoint_count: int, max_connections: int) -> int:
    """Return the connection limit for each endpoint: `max_connections`, or fewer if too few files can be opened."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files == resource.RLIM_INFINITY:
        return max_connections
    share = max(1, (open_files - RESERVED_FILES) // endpoint_count)
    if share < max_connections:
        message = "max_connections=%d reduced to %d by the limit of open files. Raise it with: ulimit -n"
        logger.info(message, max_connections, share)
    return min(share, max_connections)


def _rendezvous_rank(affinity: str, url: str) -> int:
    return int.from_bytes(blake2b(f"{affinity} {url}".encode(), digest_size=8).digest())
