"""Prepared system calls have the effects and the errors of ordinary ones."""

import ctypes
import errno
import os
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("system calls of Linux", allow_module_level=True)

from toolroll.sandbox.server.isolation import syscalls


def test_result_is_an_argument_of_later_calls(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    descriptors = os.listdir("/proc/self/fd")
    calls = syscalls.prepare_write(str(file), b"content")
    for _ in range(2):  # calls can be made repeatedly
        syscalls.make(calls)
        assert file.read_bytes() == b"content"
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_buffer_can_change_after_the_preparation(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    value = ctypes.create_string_buffer(3)
    calls = syscalls.prepare_write(str(file), value)
    value.raw = b"one"
    syscalls.make(calls)
    value.raw = b"two"
    syscalls.make(calls)
    assert file.read_bytes() == b"two"


def test_failed_call_is_named_and_stops_the_others(tmp_path: Path) -> None:
    calls = [*syscalls.prepare_write(str(tmp_path / "missing"), b""), syscalls.prepare_mkdir(str(tmp_path / "after"))]
    with pytest.raises(OSError, match=f"open {tmp_path}/missing: No such file") as raised:
        syscalls.make(calls)
    assert raised.value.errno == errno.ENOENT
    assert not (tmp_path / "after").exists()
