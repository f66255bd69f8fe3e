"""HTTP server that counts concurrent requests, in place of a sandbox. Shares no code with the limiter.

    python counting_server.py HOST PORT

`GET /work?ms=20&by=NAME&until=EPOCH` takes 20 ms, even if the client disconnects, like a sandbox that completes a
running program. A request that would end after `until` is rejected. `GET /stats` returns the maximum number of
concurrent requests, and the start and end of each.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from urllib.parse import parse_qsl, urlsplit

in_flight = max_in_flight = rejected = 0
done: Counter[str] = Counter()
events: list[tuple[float, str, int]] = []


async def work(query: dict[str, str]) -> None:
    global in_flight, max_in_flight
    in_flight += 1
    max_in_flight = max(max_in_flight, in_flight)
    events.append((time.time(), query["by"], 1))
    await asyncio.sleep(float(query["ms"]) / 1000)
    in_flight -= 1
    done[query["by"]] += 1
    events.append((time.time(), query["by"], -1))


async def answer(path: str) -> tuple[int, str]:
    global rejected
    url = urlsplit(path)
    query = dict(parse_qsl(url.query))
    if url.path == "/stats":
        counts = {"in_flight": in_flight, "max_in_flight": max_in_flight, "rejected": rejected}
        return 200, json.dumps({**counts, "done": done, "events": events})
    if float(query["until"]) < time.time() + float(query["ms"]) / 1000:
        rejected += 1
        return 408, "late"
    # A separate task, which continues if the connection breaks.
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
