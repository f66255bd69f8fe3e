"""Programs are compiled once, and the cache changes nothing else."""

import asyncio
import json
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox.serving import serving
from toolroll.sandbox.protocol import CommandRunResult, CommandStatus
from toolroll.sandbox.server.execution.compile_cache import CompileCache, CompiledProgram


def compiled(program: bytes | None = b"elf", return_code: int | None = 0) -> CompiledProgram:
    status = CommandStatus.FINISHED if return_code is not None else CommandStatus.TIME_LIMIT_EXCEEDED
    return CompiledProgram(CommandRunResult(status=status, return_code=return_code, execution_time=1.5), program)


class Compiler:
    """A compiler that counts its runs and takes one turn of the event loop."""

    def __init__(self, *results: CompiledProgram) -> None:
        self.results, self.runs = results, 0

    async def __call__(self) -> CompiledProgram:
        self.runs += 1
        await asyncio.sleep(0)
        return self.results[min(self.runs, len(self.results)) - 1]


async def test_concurrent_requests_compile_once() -> None:
    cache, compiler = CompileCache(), Compiler(compiled())
    results = await asyncio.gather(*(cache.get("key", compiler) for _ in range(20)))
    assert compiler.runs == 1
    assert {result.program for result in results} == {b"elf"}
    assert sorted(result.result.execution_time or 0.0 for result in results) == [0.0] * 19 + [1.5]
    await cache.get("other", compiler)
    assert compiler.runs == 2


@pytest.mark.parametrize("failure", [compiled(None, 1), compiled(None, None), compiled(None, -9), compiled(None, 0)])
async def test_failures_are_not_cached(failure: CompiledProgram) -> None:
    cache, compiler = CompileCache(), Compiler(failure, failure, compiled())
    first, second = await asyncio.gather(cache.get("key", compiler), cache.get("key", compiler))
    assert (first, second) == (failure, failure)
    assert (await cache.get("key", compiler)).program == b"elf"
    assert compiler.runs == 3


async def test_another_request_compiles_if_the_first_is_cancelled() -> None:
    cache, compiler = CompileCache(), Compiler(compiled())
    first = asyncio.create_task(cache.get("key", compiler))
    second = asyncio.create_task(cache.get("key", compiler))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).program == b"elf"
    assert compiler.runs == 2
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_entry_that_was_not_used_for_longest_is_evicted() -> None:
    cache, compiler = CompileCache(max_bytes=25), Compiler(compiled(b"x" * 10))
    for key in ("a", "b", "a", "c"):
        await cache.get(key, compiler)
    assert compiler.runs == 3
    await cache.get("a", compiler)
    assert compiler.runs == 3, "a is still there"
    await cache.get("b", compiler)
    assert compiler.runs == 4


# A real server and a real compiler

GREETER = """
#include <fstream>
#include <iostream>
#include <string>
int main() {
    std::string name; std::cin >> name; std::cout << "hello " << name << std::endl;
    std::ofstream("test.new") << "#!/bin/sh\\necho replaced\\n";
    rename("test.new", "test");
    return name == "fail" ? 3 : 0;
}
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--capacity", "4") as server:
        yield server.url


def run(url: str, code: str, **options: Any) -> dict[str, Any]:
    body = json.dumps({"code": code, "language": "cpp", "run_timeout": 10, "compile_timeout": 60, **options}).encode()
    request = urllib.request.Request(f"{url}/run_code", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


@pytest.mark.sandbox
async def test_cases_of_a_program_compile_once(url: str) -> None:
    """Each case runs in its own jail: a program that replaces its file does not affect the others."""
    answers = await asyncio.gather(*(asyncio.to_thread(run, url, GREETER, stdin=f"n{case}") for case in range(8)))
    assert [answer["run_result"]["stdout"] for answer in answers] == [f"hello n{case}\n" for case in range(8)]
    assert {answer["status"] for answer in answers} == {"Success"}
    assert {answer["compile_result"]["return_code"] for answer in answers} == {0}
    assert sum(answer["compile_result"]["execution_time"] > 0 for answer in answers) == 1
    failed = run(url, GREETER, stdin="fail")
    assert (failed["status"], failed["run_result"]["return_code"]) == ("Failed", 3)
    assert failed["compile_result"]["cpu_time"] == 0


@pytest.mark.sandbox
def test_everything_that_the_compiler_reads_counts(url: str) -> None:
    code = '#include <iostream>\n#include "a.h"\nint main() { std::cout << VALUE; }'
    for value in ("1", "2"):
        answer = run(url, code, files={"a.h": b64encode(f"#define VALUE {value}".encode()).decode()})
        assert answer["run_result"]["stdout"] == value
        assert answer["compile_result"]["execution_time"] > 0


@pytest.mark.sandbox
def test_errors_and_warnings_of_the_compiler_are_reported(url: str) -> None:
    for _ in range(2):
        broken = run(url, "int main() { return x; }")
        assert broken["status"] == "Failed"
        assert "not declared" in broken["compile_result"]["stderr"]
        assert broken["run_result"] is None
        warned = run(url, "#warning look here\nint main() { return 0; }")
        assert warned["status"] == "Success"
        assert "look here" in warned["compile_result"]["stderr"]


@pytest.mark.sandbox
def test_files_of_the_request_are_there_and_fetched(url: str) -> None:
    code = '#include <fstream>\nint main() { std::ifstream in("in"); std::ofstream("out") << in.rdbuf(); }'
    for _ in range(2):
        answer = run(url, code, files={"in": "aGk="}, fetch_files=["out", "missing"])
        assert answer["files"] == {"out": "aGk="}
