"""HTTP service with a limited capacity, in place of an API that the user does not own.

Shares no code with the limiter.

    python service.py HOST PORT [SOCKET]

`GET /use?by=NAME&tokens=N` takes `ms` milliseconds. It is refused with status 429 if `capacity` requests are already
running. A request that was accepted runs to its end, even if the client disconnects.

`GET /set?capacity=8` changes a setting and returns the time of the change:

- `capacity`: Maximum number of concurrent requests.
- `ms`: Duration of a request.
- `rejecting`: If 1, all requests are refused.
- `queueing`: If 1, no request is refused. Concurrent requests beyond the capacity slow each other down.
- `retry_after`: Value of the header `Retry-After` of refused requests, in seconds. 0: no such header.

`GET /stats` returns all requests: arrival time, client, tokens, whether the request was accepted, and its end or null.
`GET /stalls` returns the periods in which the service did not run although it should have: begin and end. Requests that
were sent meanwhile have a later arrival time, because the arrival is recorded when the service reads the request.
The service also listens on a Unix socket, which processes in other network namespaces can reach.
"""

import asyncio
import json
import sys
import time
from urllib.parse import parse_qsl, urlsplit

SLICES = 10
"""Parts of a request while the service is queueing. Each takes longer if more requests are running."""
TICK_S = 0.01
MIN_STALL_S = 0.02
"""Minimum delay of a tick that is recorded as a stall."""

settings = {"capacity": 32.0, "ms": 100.0, "rejecting": 0.0, "queueing": 0.0, "retry_after": 0.0}
requests: list[list[object]] = []
stalls: list[tuple[float, float]] = []
running = 0


async def record_stalls() -> None:
    while True:
        begin = time.time()
        await asyncio.sleep(TICK_S)
        end = time.time()
        if end - begin > TICK_S + MIN_STALL_S:
            stalls.append((begin, end))


async def run(row: list[object]) -> None:
    global running
    if settings["queueing"]:
        for _ in range(SLICES):
            await asyncio.sleep(settings["ms"] / 1000 / SLICES * max(1.0, running / settings["capacity"]))
    else:
        await asyncio.sleep(settings["ms"] / 1000)
    running -= 1
    row[4] = time.time()


async def use(query: dict[str, str]) -> tuple[int, str]:
    global running
    has_room = bool(settings["queueing"]) or running < settings["capacity"]
    accepted = has_room and not settings["rejecting"]
    row: list[object] = [time.time(), query.get("by", ""), float(query.get("tokens", 0)), accepted, None]
    requests.append(row)
    if not accepted:
        row[4] = row[0]
        return 429, "full"
    running += 1  # before the task runs, so that another request which arrives now is not accepted in its place
    # A separate task, which continues if the connection breaks.
    await asyncio.shield(asyncio.create_task(run(row)))
    return 200, "done"


async def answer(path: str) -> tuple[int, str]:
    url = urlsplit(path)
    query = dict(parse_qsl(url.query))
    if url.path == "/use":
        return await use(query)
    if url.path == "/stats":
        return 200, json.dumps(requests)
    if url.path == "/stalls":
        return 200, json.dumps(stalls)
    if url.path == "/set" and query.keys() <= settings.keys():
        settings.update({name: float(value) for name, value in query.items()})
        return 200, json.dumps(time.time())
    return 404, f"Unknown path or setting: {path}. Settings: {', '.join(settings)}."


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            status, body = await answer(head.split(b" ", 2)[1].decode())
            wait = f"Retry-After: {settings['retry_after']:g}\r\n" if status == 429 and settings["retry_after"] else ""
            writer.write(f"HTTP/1.1 {status} X\r\n{wait}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    host, port, *socket = sys.argv[1:]
    server = await asyncio.start_server(serve, host, int(port), backlog=4096, limit=2**16)
    if socket:
        await asyncio.start_unix_server(serve, socket[0])
    print("up", flush=True)
    await asyncio.gather(server.serve_forever(), record_stalls())


asyncio.run(main())
