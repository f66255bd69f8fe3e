"""OutputReader keeps the first bytes of a program's output and discards the rest without blocking the program."""

import asyncio
import os
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scaled

from toolroll.sandbox.server.execution.output import OutputReader


@settings(max_examples=scaled(60))
@given(chunks=st.lists(st.binary(min_size=1, max_size=3000), max_size=60), limit_bytes=st.integers(0, 20_000))
def test_output_is_truncated_at_limit(chunks: list[bytes], limit_bytes: int) -> None:
    async def collect() -> tuple[bytes, bool]:
        reader = OutputReader(limit_bytes)
        write_fd = os.dup(reader.write_fd)
        reader.close_write_end()

        def write() -> None:
            for chunk in chunks:
                os.write(write_fd, chunk)
            os.close(write_fd)

        await asyncio.to_thread(write)
        return reader.close(), reader.truncated

    kept, truncated = asyncio.run(collect())
    output = b"".join(chunks)
    assert kept == output[:limit_bytes]
    assert truncated == (len(output) > limit_bytes)


async def test_flood_blocks_neither_writer_nor_event_loop() -> None:
    reader = OutputReader(1000)
    write_fd = os.dup(reader.write_fd)
    reader.close_write_end()
    written = 0

    def flood() -> float:
        nonlocal written
        while written < 500_000_000:
            written += os.write(write_fd, b"x" * 65536)
        os.close(write_fd)
        return time.thread_time()

    began = time.thread_time()
    writer_s = await asyncio.to_thread(flood)
    reader_s = time.thread_time() - began
    assert reader_s < 2 * writer_s, "discarding costs about as much as writing"
    assert (len(reader.close()), reader.truncated) == (1000, True)


async def test_close_does_not_wait_for_writers() -> None:
    reader = OutputReader(100)
    os.write(reader.write_fd, b"here")
    assert reader.close() == b"here"
    assert reader.close() == b"here"


async def test_take_returns_output_since_last_call() -> None:
    reader = OutputReader(5)
    os.write(reader.write_fd, b"first piece")
    assert reader.take() == (b"first", True)
    assert reader.take() == (b"", False)
    os.write(reader.write_fd, b"next")
    assert reader.take() == (b"next", False)
    reader.close()
