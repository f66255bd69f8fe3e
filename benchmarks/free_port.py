"""Find a free port for a server that starts later. `python free_port.py` prints one.

The port is outside the ranges from which the kernel and Ray assign ports, so it is likely to stay free. SGLang binds
its port half a minute after it starts; a port assigned by the kernel could be in use by another process by then.
"""

from __future__ import annotations

import random
import socket

MIN_PORT, MAX_PORT = 20_000, 32_767
"""Above the default ports of Ray workers, below those of the kernel (`net.ipv4.ip_local_port_range`)."""
MAX_ATTEMPTS = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that no process listens on."""
    for port in random.sample(range(MIN_PORT, MAX_PORT + 1), MAX_ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"No free port found on {host} between {MIN_PORT} and {MAX_PORT} after {MAX_ATTEMPTS} attempts.")


if __name__ == "__main__":
    print(free_port())
