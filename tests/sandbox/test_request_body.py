"""Hostile and slow request bodies cost the sender, not other clients."""

import asyncio
import contextlib
import gzip
import io
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import JSON
from yarl import URL

from sandbox.http_front import FrontServer, http_front
from toolroll.sandbox.server.api import request_body
from toolroll.sandbox.server.api.request_body import JsonValueCounter

pytestmark = pytest.mark.virtual_time

PROGRAM = b'{"code": "1", "language": "python"'


@pytest.fixture
async def front() -> AsyncIterator[FrontServer]:
    async with http_front() as server:
        yield server


async def post(server: FrontServer, body: bytes, **headers: str) -> tuple[int, Any]:
    url, data = f"{server.url}/run_code", io.BytesIO(body)
    async with aiohttp.ClientSession() as session, session.post(url, data=data, headers=headers) as response:
        return response.status, await response.json()


@contextlib.asynccontextmanager
async def held_back(server: FrontServer, body: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """Send a part of a body and nothing more. Yields the stream of the response."""
    url = URL(server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        if body:
            writer.write(b"%x\r\n%b\r\n" % (len(body), body))
        await writer.drain()
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_held_back_bodies_reject_no_other_request(front: FrontServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(50):
            await stack.enter_async_context(held_back(front))
        for padding in (0, 10 << 20):
            assert (await post(front, PROGRAM + b" " * padding + b"}"))[0] == 200


async def test_slow_body_costs_received_bytes_until_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "MAX_HELD_BYTES", 1 << 20)
    async with http_front(request_mb=1) as front:
        large = PROGRAM + b" " * 700_000 + b"}"
        async with held_back(front, PROGRAM + b" " * 700_000):
            while front.front.http_app._bodies.held_bytes < 600_000:
                await asyncio.sleep(0.01)
            status, answer = await post(front, large)
            assert (status, "memory" in answer["detail"]) == (429, True)
            assert (await post(front, PROGRAM + b" " * 60_000 + b"}"))[0] == 200
        while front.front.http_app._bodies.held_bytes:
            await asyncio.sleep(0.01)
        assert (await post(front, large))[0] == 200
        assert front.front.http_app._bodies.held_bytes == 0


async def test_body_that_does_not_arrive_times_out(front: FrontServer) -> None:
    async with held_back(front, PROGRAM) as response:
        assert (await response.readline()).startswith(b"HTTP/1.1 408")


async def test_body_that_arrives_during_shutdown_is_rejected(front: FrontServer) -> None:
    async def slow_body() -> AsyncIterator[bytes]:
        yield PROGRAM
        await asyncio.sleep(1)
        await front.drain()
        yield b"}"

    url = f"{front.url}/run_code"
    async with aiohttp.ClientSession() as session, session.post(url, data=slow_body()) as response:
        assert response.status == 503


async def test_body_that_cannot_be_decompressed_is_rejected(front: FrontServer) -> None:
    assert (await post(front, PROGRAM + b"}", **{"Content-Encoding": "gzip"}))[0] == 400


@pytest.mark.parametrize(
    "fields",
    [
        b'"fetch_files": [' + b",".join(b"%d" % number for number in range(3_500_000)) + b"]",
        b'"ignored": [' + b"[]," * 15_000_000 + b"[]]",
        b'"ignored": [' + b"{}," * 60_000 + b"{}]",
        b'"files": {' + b",".join(b'"%d": "\\\\"' % number for number in range(100_000)) + b"}",
        (PROGRAM + b',"ignored": [' + b"1," * 60_000 + b"1]}").decode().encode("utf-16"),
    ],
    ids=["invalid values", "empty lists", "empty objects", "members", "UTF-16"],
)
async def test_too_many_json_values_are_rejected_unparsed(front: FrontServer, fields: bytes) -> None:
    body = fields if fields.startswith(b"\xff\xfe") else PROGRAM + b"," + fields + b"}"
    status, answer = await post(front, body)
    assert status == 422
    assert "JSON values" in answer["detail"] or "not JSON in UTF-8" in answer["detail"]


@pytest.mark.parametrize("text", ["[{,", 'f"{x}",', "\\", '\\"', '"\\",[', "\\\\\\", "\U0001f600,\n"])
async def test_text_of_any_content_is_accepted(front: FrontServer, text: str) -> None:
    code = text * 200_000
    status, answer = await post(front, json.dumps({"code": code, "language": "python"}).encode())
    assert status == 200
    assert answer["run_result"]["stdout"] == code


async def test_compressed_body_counts_with_its_full_size(front: FrontServer) -> None:
    body = gzip.compress(PROGRAM + b" " * (65 << 20) + b"}", 1)
    assert (await post(front, body, **{"Content-Encoding": "gzip"}))[0] == 413


def number_of_values(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(number_of_values, children))


TEXTS = st.text(st.sampled_from('a",[{}]\\\n'), max_size=8)
DOCUMENTS = JSON | st.lists(TEXTS, max_size=4) | st.dictionaries(TEXTS, TEXTS | JSON, max_size=4)


@given(value=DOCUMENTS, cuts=st.lists(st.integers(0, 100), max_size=5), ascii_only=st.booleans())
def test_count_of_values_depends_on_structure_only(value: Any, cuts: list[int], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    counter = JsonValueCounter()
    for start, end in itertools.pairwise([0, *sorted(cuts), max([len(text), *cuts])]):
        counter.feed(text[start:end])
    assert number_of_values(value) <= counter.count <= 2 * number_of_values(value)
