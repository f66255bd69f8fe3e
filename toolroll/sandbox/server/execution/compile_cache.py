"""Cache of compiled programs, so that a solution with many test cases is compiled once.

Invariants:

- A cached program was compiled in a jail, by the same command and from the same files. A request cannot influence the
  program of another one.
- Only successes are cached. A compiler may also fail because the machine was busy, which must not last.
- If the request that compiles is cancelled, its compiler is killed, and a waiting request compiles instead.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from toolroll.sandbox.protocol import CommandRunResult, CommandStatus

MAX_CACHE_BYTES = 256 << 20
"""Maximum size of all entries together. The entry that was not used for the longest time is evicted."""


@dataclass(frozen=True)
class CompiledProgram:
    """Result of a compiler."""

    result: CommandRunResult
    program: bytes | None
    """The compiled program, or None if the compiler failed or the program is too large to be fetched."""

    @property
    def succeeded(self) -> bool:
        """Whether the compiler succeeded."""
        return self.result.status is CommandStatus.FINISHED and self.result.return_code == 0

    @property
    def size_bytes(self) -> int:
        """Size of the entry in the cache."""
        return len(self.program or b"") + len(self.result.stdout or "") + len(self.result.stderr or "")


class CompileCache:
    """Compiled programs by the hash of their sources and command.

    Args:
        max_bytes: Maximum size of all entries together.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, CompiledProgram] = OrderedDict()
        self._compiling: dict[str, asyncio.Event] = {}

    async def get(self, key: str, compile_program: Callable[[], Awaitable[CompiledProgram]]) -> CompiledProgram:
        """Return the cached program, or compile it.

        If another request compiles the same program, wait for it once. If it failed, each request compiles for itself,
        so that none waits for several timeouts.

        Args:
            key: Hash of everything that the compiler reads.
            compile_program: Function that compiles the program.
        """
        if key in self._compiling:
            await self._compiling[key].wait()
        if found := self._entries.get(key):
            self._entries.move_to_end(key)
            return replace(found, result=found.result.model_copy(update={"execution_time": 0.0, "cpu_time": 0.0}))
        ended = asyncio.Event()
        self._compiling.setdefault(key, ended)
        try:
            compiled = await compile_program()
            if compiled.succeeded and compiled.program is not None:
                self._add(key, compiled)
            return compiled
        finally:
            if self._compiling.get(key) is ended:
                del self._compiling[key]
            ended.set()

    def _add(self, key: str, compiled: CompiledProgram) -> None:
        if key in self._entries:
            return
        self._entries[key] = compiled
        self._bytes += compiled.size_bytes
        while self._bytes > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self._bytes -= evicted.size_bytes
