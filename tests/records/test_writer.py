"""Written lines are on disk and complete, with concurrent writers and after failures."""

import asyncio
import errno
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_samples import trajectory

from toolroll.errors import ConfigError
from toolroll.records.append_file import AppendFile
from toolroll.records.reader import read_records
from toolroll.records.writer import RecordWriter, WriterClosed

KIB = 1024


def ids_of(directory: Path, **options: Any) -> list[str | None]:
    return [record.request_id for record in read_records(directory, **options)]


async def test_concurrent_coroutines_write_each_line_once(tmp_path: Path) -> None:
    async with RecordWriter(tmp_path) as writer:

        async def work(worker: int) -> None:
            for number in range(25):
                text = chr(97 + worker % 26) * random.choice([10, 5000, 200_000])
                await writer.write(trajectory(100 * worker + number, text=text), step=number % 3)

        await asyncio.gather(*map(work, range(40)))
    found = Counter(ids_of(tmp_path))
    assert found == Counter(f"request-{100 * worker + number}" for worker in range(40) for number in range(25))
    assert {path.name for path in tmp_path.iterdir()} == {"0.jsonl", "1.jsonl", "2.jsonl"}
    assert {record.step for record in read_records(tmp_path, steps=[1])} == {1}


async def test_write_all_writes_a_batch(tmp_path: Path) -> None:
    async with RecordWriter(tmp_path) as writer:
        await asyncio.gather(
            *(writer.write_all([trajectory(number) for number in range(500)], step) for step in (1, 2))
        )
        assert ids_of(tmp_path) == 2 * [f"request-{number}" for number in range(500)]


def test_threads_and_event_loops_write_concurrently(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:

        def work(worker: int) -> None:
            async def write() -> None:
                for number in range(20):
                    await writer.write(trajectory(100 * worker + number), 1)

            if worker % 2:
                asyncio.run(write())
            else:
                for number in range(20):
                    writer.append(trajectory(100 * worker + number), 1)

        threads = [threading.Thread(target=work, args=[worker]) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(ids_of(tmp_path))) == len(ids_of(tmp_path)) == 160


WRITER_PROCESS = """
import random, sys
from toolroll.records.writer import RecordWriter

directory, name = sys.argv[1:]
with RecordWriter(directory, writer=name) as writer:
    for number in range(100):
        writer.append({"request_id": f"{name}/{number}", "output": "x" * random.randrange(30_000)}, 5)
"""


@pytest.mark.process
def test_processes_write_to_separate_directories(tmp_path: Path) -> None:
    names = [f"rank-{number}" for number in range(4)]
    processes = [subprocess.Popen([sys.executable, "-c", WRITER_PROCESS, tmp_path, name]) for name in names]
    assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    assert sorted(ids_of(tmp_path), key=str) == sorted(f"{name}/{number}" for name in names for number in range(100))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")) == [
        f"{name}/5.jsonl" for name in names
    ]


ENDLESS_WRITER = """
import asyncio, sys
from toolroll.records.writer import RecordWriter

async def main(directory, first):
    async with RecordWriter(directory) as writer:
        async def work(worker):
            number = first + worker
            while True:
                await writer.write({"request_id": str(number), "output": "x" * 3_000_000}, 1)
                print(number, flush=True)
                number += 4
        await asyncio.gather(*map(work, range(4)))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.process
def test_killed_process_loses_no_written_line(tmp_path: Path) -> None:
    """Six kills with the same file: all confirmed lines exist, and each kill leaves at most one incomplete line."""
    confirmed: list[str] = []
    for kill in range(1, 7):
        command = [sys.executable, "-c", ENDLESS_WRITER, tmp_path, str(kill * 1_000_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            confirmed += [process.stdout.readline().strip() for _ in range(kill)]
            time.sleep(random.uniform(0, 0.03))
            process.kill()
            confirmed += process.stdout.read().split()
        records = read_records(tmp_path)
        found = [record.request_id for record in records]
        assert set(confirmed) <= set(found)
        assert len(set(found)) == len(found)
        assert records.bad_lines <= kill
    assert len(confirmed) >= 21


CUT_AT = st.integers(1, 2 * KIB)


@given(CUT_AT)
def test_incomplete_line_is_terminated(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("incomplete") / "1.jsonl"
    with RecordWriter(path.parent) as writer:
        writer.append(trajectory(0), 1)
        whole = path.stat().st_size
        writer.append(trajectory(1), 1)
    os.truncate(path, whole + min(cut, path.stat().st_size - whole - 2))
    records = read_records(path.parent)
    assert [record.request_id for record in records] == ["request-0"]
    assert records.bad_lines == 1
    with RecordWriter(path.parent) as writer:
        writer.append(trajectory(2), 1)
        writer.append(trajectory(3), 1)
    again = read_records(path)
    assert [record.request_id for record in again] == ["request-0", "request-2", "request-3"]
    assert again.bad_lines == 1


async def test_slow_disk_does_not_block_event_loop(tmp_path: Path) -> None:
    """The file is a pipe without a reader at first, so that writes hang when it is full."""
    os.mkfifo(tmp_path / "1.jsonl")
    written: list[int] = []

    async def write(number: int) -> None:
        await writer.write({"output": "x" * 40 * KIB}, 1)
        written.append(number)

    async with RecordWriter(tmp_path) as writer:
        writing = asyncio.gather(*map(write, range(8)))
        gaps, last = [], time.monotonic()
        for _ in range(50):
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        assert len(written) < 8, "the pipe is full"
        assert sorted(gaps)[len(gaps) // 2] < 0.1
        reader = os.open(tmp_path / "1.jsonl", os.O_RDONLY | os.O_NONBLOCK)
        taken = b""
        while taken.count(b"\n") < 8:
            await asyncio.sleep(0.001)
            try:
                taken += os.read(reader, 1024 * KIB)
            except BlockingIOError:
                continue
        await writing
        os.close(reader)
    assert sorted(written) == list(range(8))


async def test_full_disk_raises_in_every_caller(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").symlink_to("/dev/full")
    async with RecordWriter(tmp_path) as writer:
        for failed in await asyncio.gather(*(writer.write(trajectory(), 1) for _ in range(5)), return_exceptions=True):
            assert isinstance(failed, OSError)
            assert failed.errno == errno.ENOSPC
        with pytest.raises(OSError, match="No space"):
            await writer.write_all([trajectory()], 1)
        with pytest.raises(OSError, match="No space"):
            writer.append(trajectory(), 1)
        await writer.write(trajectory(), 2)  # another file still works
        (tmp_path / "1.jsonl").unlink()
        await writer.write(trajectory(), 1)  # space is available again
    assert len(ids_of(tmp_path)) == 2


def test_disk_full_within_a_line(tmp_path: Path) -> None:
    """Lines that fit are complete, the others fail, and later lines are not affected."""
    file = AppendFile(tmp_path / "1.jsonl")
    lines = [b'{"request_id": "%d", "output": "%s"}\n' % (number, b"x" * 1000) for number in range(10)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4500, before[1]))
    try:
        for some in (lines, lines[:1]):
            with pytest.raises(OSError, match="too large"):
                file.append(some)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.append(lines[8:])
    file.close()
    records = read_records(tmp_path)
    assert [record.request_id for record in records] == ["0", "1", "2", "3", "8", "9"]
    assert records.bad_lines == 1


@pytest.mark.parametrize("deleted", ["file", "directory"])
async def test_deleted_file_or_directory_is_recreated(tmp_path: Path, deleted: str) -> None:
    folder = tmp_path / "dumps"
    async with RecordWriter(folder) as writer:
        await writer.write(trajectory(1), 1)
        (folder / "1.jsonl").rename(tmp_path / "away")
        if deleted == "directory":
            folder.rmdir()
        await writer.write(trajectory(2), 1)
        assert ids_of(folder) == ["request-2"]


async def test_impossible_directory_raises_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Cannot create the rollout_data_dir .*file: "):
        RecordWriter(tmp_path / "file")
    folder = tmp_path / "dumps"
    async with RecordWriter(folder) as writer:
        folder.rmdir()
        folder.write_text("")
        with pytest.raises(OSError, match="dumps"):
            await writer.write(trajectory(), 1)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "1.jsonl"])
def test_writer_must_be_a_directory_name(tmp_path: Path, name: str) -> None:
    if name:
        with pytest.raises(ConfigError, match="rank-0"):
            RecordWriter(tmp_path, writer=name)
    else:
        RecordWriter(tmp_path, writer=name).append(trajectory(), 1)
        assert (tmp_path / "1.jsonl").exists()


async def test_failing_decode_affects_only_its_line(tmp_path: Path) -> None:
    def decode(ids: Sequence[int]) -> str:
        if ids[0] == 99:
            raise LookupError("no such token")
        return "text"

    from toolroll.rollout.tokens import TokenStream

    broken = trajectory(1, tokens=TokenStream([99]))
    async with RecordWriter(tmp_path, decode=decode) as writer:
        good, bad = await asyncio.gather(
            writer.write(trajectory(0), 1), writer.write(broken, 1), return_exceptions=True
        )
        with pytest.raises(LookupError):
            await writer.write_all([trajectory(2), broken, trajectory(3)], 1)
    assert good is None
    assert isinstance(bad, LookupError)
    assert ids_of(tmp_path) == ["request-0", "request-2"]
    assert {record.input for record in read_records(tmp_path)} == {"text"}


async def test_cancelled_write_affects_no_other(tmp_path: Path) -> None:
    async with RecordWriter(tmp_path) as writer:
        tasks = [asyncio.create_task(writer.write(trajectory(number), 1)) for number in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found = set(ids_of(tmp_path))
    assert {f"request-{number}" for number in range(1, 50, 2)} <= found


async def test_closed_writer_raises(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    await writer.write(trajectory(), 1)
    writer.close()
    writer.close()
    with pytest.raises(WriterClosed):
        await writer.write(trajectory(), 1)
    with pytest.raises(WriterClosed):
        writer.append(trajectory(), 1)
    assert not [thread for thread in threading.enumerate() if str(tmp_path) in thread.name]


def test_open_files_are_limited(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for step in range(100):
            writer.append(trajectory(), step)
        opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        assert 0 < sum(str(tmp_path) in target for target in opened) <= 8
    assert len(ids_of(tmp_path)) == 100


def test_verl_keys_are_added_to_mappings(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        writer.append({"output": "x", "acc": 1.0}, 3)
        writer.append({"output": "y"}, 3, gts=[42])
    first, second = read_records(tmp_path)
    assert first.fields == {"input": "", "output": "x", "gts": None, "score": None, "acc": 1.0, "step": 3}
    assert second.gts == [42]
    with pytest.raises(TypeError):
        RecordWriter(tmp_path).append({}, "3")  # type: ignore[arg-type]
