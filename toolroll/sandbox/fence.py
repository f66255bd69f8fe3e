"""Fence: makes the servers of a sandbox reject the programs of a dead process, so that its slots become available."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from pydantic import ValidationError

from toolroll.http.failures import AttemptFailed
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.protocol import FenceRequest, FenceResponse

FENCE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class SandboxFence:
    """`HolderFence` of a sandbox. The limiter's actor receives a copy of it."""

    client: SandboxClient

    async def __call__(self, holder: str, lease: int) -> int | None:
        """Reject the programs of a holder's leases up to a number, at all endpoints.

        Returns:
            The number of these programs that still run, or None if an endpoint did not respond, does not support
            fences, or may be several servers behind one address.
        """
        fences = (self._fence(url, holder, lease) for url in self.client.endpoints)
        counts = [count for count in await asyncio.gather(*fences) if count is not None]
        return sum(counts) if len(counts) == len(self.client.endpoints) else None

    async def _fence(self, url: str, holder: str, lease: int) -> int | None:
        path = f"/v1/holders/{quote(holder, safe='')}/fence"
        body = FenceRequest(lease=lease).model_dump()
        try:
            response = await self.client.http.send_once(url, path, body, timeout_s=FENCE_TIMEOUT_S)
            fenced = FenceResponse.model_validate_json(response.content)
            is_one_server = await _is_address_of(url, *fenced.address)
        except (AttemptFailed, ValidationError, OSError):
            return None
        return fenced.running if is_one_server else None


async def _is_address_of(url: str, host: str, port: int) -> bool:
    """Return True if an address is the only one of a URL. It is not if a proxy or load balancer is in between."""
    parts = urlsplit(url)
    expected_port = parts.port or (443 if parts.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, expected_port)
    addresses = {_normalize(str(info[4][0])) for info in found}
    is_unique = len(addresses) == 1 or all(address.is_loopback for address in addresses)
    return port == expected_port and is_unique and _normalize(host) in addresses


def _normalize(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
