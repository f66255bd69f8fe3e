"""What a program writes: the first so many bytes are kept, whatever the pieces; the rest never holds it up."""

import asyncio
import os
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from toolroll.sandbox.server.output import Output


@settings(max_examples=60)
@given(pieces=st.lists(st.binary(min_size=1, max_size=3000), max_size=60), most=st.integers(0, 20_000))
def test_the_first_bytes_are_kept_and_the_rest_is_marked(pieces: list[bytes], most: int) -> None:
    async def collect() -> tuple[bytes, bool]:
        output = Output(most)
        writing = os.dup(output.writing)
        output.give_away()

        def write() -> None:
            for piece in pieces:
                os.write(writing, piece)
            os.close(writing)

        await asyncio.to_thread(write)
        return output.close(), output.truncated

    kept, truncated = asyncio.run(collect())
    whole = b"".join(pieces)
    assert kept == whole[:most]
    assert truncated == (len(whole) > most)


async def test_a_flood_neither_blocks_the_writer_nor_keeps_the_loop_busy() -> None:
    output = Output(1000)
    writing = os.dup(output.writing)
    output.give_away()
    written = 0
    stop = threading.Event()

    def flood() -> None:
        nonlocal written
        while not stop.is_set():
            written += os.write(writing, b"x" * 65536)
        os.close(writing)

    thread = threading.Thread(target=flood)
    thread.start()
    busy = time.thread_time()
    await asyncio.sleep(1.0)
    busy = time.thread_time() - busy
    stop.set()
    await asyncio.to_thread(thread.join)
    assert written > 5_000_000
    assert busy < 0.5
    assert (len(output.close()), output.truncated) == (1000, True)


async def test_it_ends_though_somebody_still_writes() -> None:
    output = Output(100)
    os.write(output.writing, b"here")
    assert output.close() == b"here"
    assert output.close() == b"here"


async def test_what_was_written_since_the_last_time() -> None:
    output = Output(5)
    os.write(output.writing, b"first piece")
    assert output.so_far() == (b"first", True)
    assert output.so_far() == (b"", False)
    os.write(output.writing, b"next")
    assert output.so_far() == (b"next", False)
    output.close()
