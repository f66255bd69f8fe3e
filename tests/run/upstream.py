"""A pure tool that asks an HTTP server, and the server, which counts the requests of each word."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

from toolroll import InfraFault, tool

URL_VARIABLE = "TEST_UPSTREAM_URL"


@tool(pure=True)
def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: The word.
    """
    try:
        with urlopen(f"{os.environ[URL_VARIABLE]}/?word={word}&pid={os.getpid()}", timeout=60) as answer:
            return str(answer.read().decode())
    except OSError as error:
        raise InfraFault(f"The dictionary is unreachable: {error}") from error


class Upstream:
    """Counts requests. Answers while `is_open` is set."""

    def __init__(self) -> None:
        self.words: Counter[str] = Counter()
        self.pids: list[int] = []
        self.arrived = threading.Event()
        self.is_open = threading.Event()
        self.is_open.set()
        self.url = ""


@contextmanager
def serve() -> Iterator[Upstream]:
    """Run the server in a thread."""
    upstream = Upstream()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            upstream.words[query["word"][0]] += 1
            upstream.pids.append(int(query["pid"][0]))
            upstream.arrived.set()
            upstream.is_open.wait()
            try:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"The meaning of {query['word'][0]}.".encode())
            except OSError:
                pass  # the client was killed

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    upstream.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield upstream
    finally:
        upstream.is_open.set()
        server.shutdown()
        server.server_close()
        thread.join()
