"""A port for a server that is yet to start: `python free_port.py` prints one.

It stays free until then, as far as one can tell: it isn't of those that the kernel gives to whoever asks for any, nor
of those that Ray gives to its workers. SGLang takes its port half a minute after it was told which; one of the kernel's
may be somebody else's by then, who answers in SGLang's place.
"""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 20_000, 32_767
"""Above those of Ray's workers, below those of the kernel (`net.ipv4.ip_local_port_range`), as both come."""
ATTEMPTS = 100


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens on."""
    for port in random.sample(range(LOWEST, HIGHEST + 1), ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"None of {ATTEMPTS} ports between {LOWEST} and {HIGHEST} on {host} is free.")


if __name__ == "__main__":
    print(free_port())
