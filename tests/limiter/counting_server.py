"""A sandbox that counts: an HTTP server, on the standard library alone, that shares no code with the limiter.

    python counting_server.py HOST PORT

`GET /work?ms=20&by=NAME&until=EPOCH` takes 20 ms, whether or not the caller still listens, as a sandbox goes on with
what it has begun; one that arrives after `until` is refused. `GET /stats` tells the most that were ever in flight at
once, and who began and ended when.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from urllib.parse import parse_qsl, urlsplit

in_flight = most = refused = 0
done: Counter[str] = Counter()
events: list[tuple[float, str, int]] = []


async def work(query: dict[str, str]) -> None:
    global in_flight, most
    in_flight += 1
    most = max(most, in_flight)
    events.append((time.time(), query["by"], 1))
    await asyncio.sleep(float(query["ms"]) / 1000)
    in_flight -= 1
    done[query["by"]] += 1
    events.append((time.time(), query["by"], -1))


async def answer(path: str) -> tuple[int, str]:
    global refused
    url = urlsplit(path)
    query = dict(parse_qsl(url.query))
    if url.path == "/stats":
        return 200, json.dumps(
            {"in_flight": in_flight, "most": most, "refused": refused, "done": done, "events": events}
        )
    if float(query["until"]) < time.time():
        refused += 1
        return 408, "late"
    # A task of its own: it goes on if the connection breaks.
    await asyncio.shield(asyncio.create_task(work(query)))
    return 200, "done"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            status, body = await answer(head.split(b" ", 2)[1].decode())
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2]), backlog=4096, limit=2**16)
    print("up", flush=True)
    await server.serve_forever()


asyncio.run(main())
