"""Every language of the protocol is run by the machine's toolchain, or reported with an install instruction."""

import base64
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from toolroll.errors import SandboxRefused
from toolroll.sandbox import protocol
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.execution import ExecutionOutcome
from toolroll.sandbox.protocol import Language
from toolroll.sandbox.server.execution import languages
from toolroll.sandbox.server.execution.languages import (
    RECIPES,
    MissingToolchain,
    Toolchain,
    find_all,
    prepare,
)
from toolroll.sandbox.server.job_spec import ProgramSpec

pytestmark = pytest.mark.sandbox

LANGUAGES: tuple[Language, ...] = get_args(Language)
Found = dict[Language, Toolchain | MissingToolchain]
RUN_BY_PYTHON = {"python", "pytest", "sql"}
REQUIRED = [{"bash"}, {"cpp"}, {"nodejs"}, {"java"}, {"perl"}, {"sql"}, {"pytest"}, {"rust", "go"}]
"""Groups of languages. A machine that runs the tests must have at least one of each group."""
TIMEOUT_S = 60.0
"""Timeout of compilers and programs on a machine that is busy with other tests."""


@dataclass(frozen=True)
class Sample:
    """Test programs of one language."""

    echo: str
    """Program that prints `hello` and a line of its standard input, or `expected`."""
    fails: str
    """Program that prints `before` and fails."""
    return_code: int = 3
    broken: str = ""
    """Program that does not compile, if the language has a compiler."""
    compiler_error: str = ""
    """Part of the compiler's error message."""
    expected: str = "hello wörld"


SAMPLES: dict[str, Sample] = {
    "python": Sample("print('hello', input())", "print('before'); raise SystemExit(3)"),
    "pytest": Sample(
        "def test_hello(capsys):\n    with capsys.disabled():\n        print('hello')",
        "def test_fails():\n    print('before')\n    assert 1 == 2",
        return_code=1,
        expected="hello",
    ),
    "sql": Sample(
        "CREATE TABLE t (word TEXT, number); INSERT INTO t VALUES ('hello', NULL), ('a;b', 1);\n"
        "SELECT * FROM t; -- a comment\nSELECT count(*)\nFROM t",
        "SELECT 'before'; SELECT * FROM nowhere;",
        return_code=1,
        expected="hello",
    ),
    "bash": Sample('read line; echo "hello $line"', "echo before; exit 3"),
    "cpp": Sample(
        "#include <iostream>\n#include <string>\n"
        'int main() { std::string line; std::getline(std::cin, line); std::cout << "hello " << line; }',
        '#include <cstdio>\nint main() { puts("before"); return 3; }',
        broken="int main() { return nothing; }",
        compiler_error="was not declared",
    ),
    "rust": Sample(
        'fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap(); print!("hello {}", s); }',
        'fn main() { println!("before"); std::process::exit(3) }',
        broken="fn main() { nothing }",
        compiler_error="cannot find value `nothing`",
    ),
    "go": Sample(
        'package main\nimport ("bufio"; "fmt"; "os")\n'
        'func main() { s := bufio.NewScanner(os.Stdin); s.Scan(); fmt.Println("hello", s.Text()) }',
        'package main\nimport ("fmt"; "os")\nfunc main() { fmt.Println("before"); os.Exit(3) }',
        broken="package main\nfunc main() { nothing() }",
        compiler_error="undefined: nothing",
    ),
    "go_test": Sample(
        'package main\nimport "testing"\nfunc Same[T int | string](a, b T) bool { return a == b }\n'
        'func TestSame(t *testing.T) { if !Same(1, 1) { t.Fatal("no") } }',
        'package main\nimport "testing"\nfunc TestFails(t *testing.T) { t.Fatal("before") }',
        return_code=1,
        expected="ok",
    ),
    "java": Sample(
        "import java.util.Scanner;\npublic class Main { public static void main(String[] a) {\n"
        '  System.out.println("hello " + new Scanner(System.in).nextLine()); } }',
        "public class Main { public static void main(String[] a) {\n"
        '  try { assert false; } catch (AssertionError e) { System.out.println("before"); System.exit(3); } } }',
        broken="public class Main { int x = nothing; }",
        compiler_error="cannot find symbol",
    ),
    "junit": Sample(
        "import org.junit.jupiter.api.*;\npublic class HelloTest {\n"
        '  @Test void hello() { System.out.println("hello"); Assertions.assertEquals(2, 1 + 1); } }',
        "import org.junit.jupiter.api.*;\npublic class HelloTest {\n"
        '  @Test void fails() { System.out.println("before"); Assertions.fail("no"); } }',
        return_code=1,
        broken="public class HelloTest { int x = nothing; }",
        compiler_error="cannot find symbol",
        expected="hello",
    ),
    "nodejs": Sample(
        "console.log('hello', require('fs').readFileSync(0, 'utf8').trim())",
        "console.log('before'); process.exitCode = 3",
    ),
    "typescript": Sample(
        "import { readFileSync } from 'fs'\nconst line: string = readFileSync(0, 'utf8').trim()\n"
        "console.log('hello', line as string)",
        "enum Code { Three = 3 }\nconsole.log('before'); process.exit(Code.Three)",
    ),
    "jest": Sample(
        "import { test, expect } from '@jest/globals'\n"
        "test('hello', () => { const n: number = 2; console.log('hello'); expect(1 + 1).toBe(n) })",
        "test('before', () => { expect(1).toBe(2) })",
        return_code=1,
        expected="hello",
    ),
    "php": Sample('echo "hello " . fgets(STDIN);', '\n<?php echo "before"; exit(3);'),
    "perl": Sample('print "hello " . <STDIN>;', 'print "before\\n"; exit 3;'),
    "ruby": Sample('puts "hello #{gets}"', 'puts "before"; exit 3'),
    "lua": Sample('print("hello " .. io.read())', 'print("before") os.exit(3)'),
    "R": Sample('cat("hello", readLines(file("stdin"), 1), "\\n")', 'cat("before\\n"); quit(status = 3)'),
    "D_ut": Sample(
        'import std.stdio;\nunittest { writeln("hello ", readln()); assert(1 + 1 == 2); }\nvoid main() {}',
        'import std.stdio;\nunittest { writeln("before"); assert(1 == 2); }\nvoid main() {}',
        return_code=1,
        broken="void main() { nothing(); }",
        compiler_error="undefined identifier `nothing`",
    ),
    "verilog": Sample(
        'module tb; initial begin $display("hello"); $finish; end endmodule',
        'module tb; initial begin $display("before"); $fatal(1); end endmodule',
        return_code=1,
        broken="module tb; nothing here endmodule",
        compiler_error="syntax error",
        expected="hello",
    ),
    "racket": Sample(
        '#lang racket/base\n(printf "hello ~a\\n" (read-line))', '#lang racket/base\n(displayln "before")(exit 3)'
    ),
    "julia": Sample('println("hello ", readline())', 'println("before"); exit(3)'),
    "scala": Sample(
        'object Hello { def main(a: Array[String]): Unit = println("hello " + scala.io.StdIn.readLine()) }',
        'object Fails { def main(a: Array[String]): Unit = { println("before"); sys.exit(3) } }',
        broken="object Broken { val x = nothing }",
        compiler_error="ot found",
    ),
    "kotlin_script": Sample('println("hello " + readLine())', 'println("before"); kotlin.system.exitProcess(3)'),
    "swift": Sample(
        'print("hello", readLine()!)',
        'import Foundation\nprint("before"); exit(3)',
        broken="nothing()",
        compiler_error="cannot find 'nothing'",
    ),
    "lean": Sample(
        '#eval IO.println "hello"', '#eval IO.println "before"\nexample : 1 = 2 := rfl', 1, expected="hello"
    ),
    "csharp": Sample(
        'Console.WriteLine("hello " + Console.ReadLine());', 'Console.WriteLine("before"); Environment.Exit(3);'
    ),
}


def toolchain(language: Language, version: str = "1.19.8", **variables: str) -> Toolchain:
    """Return a toolchain as if all requirements of the language were installed."""
    recipe = RECIPES[language]
    names = [command.split()[0] for command in (recipe.compile, recipe.run) if command and command[0] != "."]
    found = {variable: f"/usr/share/{variable}" for variable in recipe.required_files}
    release = version.rpartition(".")[0]
    return Toolchain(
        recipe=recipe,
        version=version,
        programs={name: f"/usr/bin/{name}" for name in names},
        variables={"release": release, "modules": "/usr/lib/node_modules", "javatuples": "", **found, **variables},
    )


def prepared(language: Language, code: str, memory: int = 1 << 30, files: tuple[str, ...] = ()) -> ProgramSpec:
    return prepare(toolchain(language), code, files, memory_bytes=memory, timeouts_s=(5, 7))


def script(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_every_language_without_gpu_has_a_recipe() -> None:
    assert set(LANGUAGES) - set(RECIPES) == {"cuda", "python_gpu"}
    assert set(SAMPLES) == set(RECIPES)


@pytest.mark.parametrize("language", RECIPES)
def test_all_variables_are_substituted(language: Language) -> None:
    sample = SAMPLES[language]
    program = prepared(language, sample.echo)
    *compilers, run = program["stages"]
    assert program["filename"]
    assert sample.echo in program["code"]
    assert [stage["timeout"] for stage in compilers] == ([5] if sample.broken else [])
    assert run["timeout"] == 7
    for stage in program["stages"]:
        assert stage["argv"][0].startswith(("/", "./"))
        assert not any("$" in word for word in stage["argv"])
    assert not any("$" in value for value in program["environment"].values())
    assert not any(b"$" in base64.b64decode(content) for content in program["files"].values())


def test_heap_size_follows_memory_limit() -> None:
    java = prepared("java", "class Main {}", memory=400 << 20)
    assert "-Xmx300m" in java["stages"][1]["argv"]
    assert "-ea" in java["stages"][1]["argv"]
    assert prepared("nodejs", "", memory=400 << 20)["environment"]["NODE_OPTIONS"] == "--max-old-space-size=300"


def test_php_tag_is_added() -> None:
    assert prepared("php", "echo 1;")["code"] == "<?php\necho 1;"
    assert prepared("php", "\n <?php echo 1;")["code"] == "<?php echo 1;"


def test_class_names_are_taken_from_code() -> None:
    assert prepared("junit", "public final class SumTest {}")["filename"] == "SumTest.java"
    assert prepared("junit", "class SumTest {}")["filename"] == "Main.java"
    for name, longest in (("T", 200), ("Ü", 60)):
        assert prepared("junit", f"public class {longest * name} {{}}")["filename"] == f"{longest * name}.java"
        assert prepared("junit", f"public class {(longest + 1) * name} {{}}")["filename"] == "Main.java"
    assert prepared("scala", "object Sum extends App {}")["stages"][1]["argv"][1:] == ["Sum"]


def test_jars_and_sources_of_request_are_used() -> None:
    program = prepared("junit", "", files=("lib/a b.jar", "Sum.java", "data.txt"))
    compiler, run = (stage["argv"] for stage in program["stages"])
    assert program["filename"] == ""
    assert compiler[-2:] == [".:/usr/share/junit:lib/a b.jar", "Sum.java"]
    assert ".:/usr/share/junit:lib/a b.jar" in run


def test_go_version_is_that_of_compiler() -> None:
    assert base64.b64decode(prepared("go", "package main")["files"]["go.mod"]) == b"module SeedSandbox\n\ngo 1.19\n"


@pytest.mark.parametrize("search_path", ["", "/nowhere"])
def test_missing_toolchains_name_packages_to_install(search_path: str) -> None:
    found = find_all(search_path, sys.executable)
    assert list(found) == list(LANGUAGES)
    for language, state in found.items():
        if language not in RUN_BY_PYTHON:
            assert isinstance(state, MissingToolchain), language
            assert state.install.startswith("install ")
    nothing = find_all(search_path, "/nowhere/python")
    assert all(isinstance(state, MissingToolchain) for state in nothing.values())


def test_hanging_or_failing_program_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(languages, "QUERY_TIMEOUT_S", 0.3)
    script(tmp_path, "g++", "sleep 60 & sleep 60")  # its children hold the pipe open
    script(tmp_path, "perl", "exit 1")
    script(tmp_path, "php", "echo PHP 8.2.1")
    (tmp_path / "lua").mkdir()
    began = time.monotonic()
    found = find_all(f"{tmp_path}:/usr/bin:/bin", sys.executable)
    assert time.monotonic() - began < 30, "waited for the program"
    for language in ("cpp", "perl"):
        state = found[language]
        assert isinstance(state, MissingToolchain)
        assert str(tmp_path) in state.install
    assert isinstance(php := found["php"], Toolchain)
    assert php.version == "8.2.1"
    assert prepare(php, "", [], memory_bytes=1, timeouts_s=(1, 1))["stages"][0]["argv"][0] == f"{tmp_path}/php"


def test_toolchains_outside_system_are_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for place in (".node/bin", ".node/lib/node_modules/tsx/dist", "bin", ".local/bin", ".rust/bin", "toolchain/bin"):
        (home / place).mkdir(parents=True)
    script(home / ".node/bin", "node", "echo v20.1.0")
    script(home / ".node/lib/node_modules/tsx/dist", "cli", "echo tsx v4.1.0")
    (home / ".local/bin/tsx").symlink_to(home / ".node/lib/node_modules/tsx/dist/cli")
    script(home / "bin", "ruby", "echo ruby 3.1.2")
    script(home / ".rust/bin", "rustc", f"echo info: syncing; echo {home}/toolchain")
    script(home / "toolchain/bin", "rustc", "echo rustc 1.80.0")
    script(home / "toolchain/bin", "cc", "")
    places = (".node/bin", "bin", ".local/bin", ".rust/bin", "toolchain/bin")
    found = find_all(":".join(str(home / place) for place in places), sys.executable)

    def readable(language: Language) -> set[str]:
        state = found[language]
        assert isinstance(state, Toolchain)
        return {str(Path(path).relative_to(home)) for path in state.readable}

    assert readable("nodejs") == {".node"}
    assert readable("typescript") == {".local/bin/tsx", ".node/lib/node_modules"}
    assert readable("ruby") == {"bin/ruby"}  # and not the home directory
    assert readable("rust") == {"toolchain"}
    assert isinstance(rust := found["rust"], Toolchain)
    assert (rust.version, rust.programs["rustc"]) == ("1.80.0", f"{home}/toolchain/bin/rustc")


# --- with the installed toolchains, over HTTP


@pytest.fixture(scope="session")
def here() -> Found:
    """Return the toolchains of this machine, which the server must report, too."""
    return find_all(os.environ["PATH"], sys.executable)


@pytest.fixture
def available(language: Language, here: Found) -> Language:
    if isinstance(state := here[language], MissingToolchain):
        pytest.skip(state.install)
    return language


def test_machine_has_required_languages(here: Found) -> None:
    for group in REQUIRED:
        missing = [
            state.install for name, state in here.items() if name in group and isinstance(state, MissingToolchain)
        ]
        assert len(missing) < len(group), " or ".join(missing)


async def test_server_lists_languages(server: str, here: Found) -> None:
    async with SandboxClient(server) as client:
        listed = await client.languages()
    assert set(listed) == set(LANGUAGES)
    for language, state in here.items():
        if isinstance(state, MissingToolchain):
            assert listed[language] == protocol.LanguageInfo(available=False, missing=state.install)
        else:
            assert listed[language] == protocol.LanguageInfo(available=True, version=state.version)


@pytest.mark.parametrize("language", SAMPLES)
async def test_program_reads_stdin_and_prints(server: str, available: Language) -> None:
    sample = SAMPLES[available]
    async with SandboxClient(server) as client:
        execution = await client.run(
            sample.echo, available, stdin="wörld\n", compile_timeout=TIMEOUT_S, run_timeout=TIMEOUT_S
        )
    assert execution.outcome is ExecutionOutcome.OK, f"{execution.stdout}\n{execution.stderr}"
    assert execution.return_code == 0
    assert sample.expected in execution.stdout
    assert (execution.compile_result is not None) == bool(sample.broken)


@pytest.mark.parametrize("language", SAMPLES)
async def test_return_code_of_program_is_reported(server: str, available: Language) -> None:
    sample = SAMPLES[available]
    async with SandboxClient(server) as client:
        execution = await client.run(sample.fails, available, compile_timeout=TIMEOUT_S, run_timeout=TIMEOUT_S)
    assert execution.outcome is ExecutionOutcome.FAILED, f"{execution.stdout}\n{execution.stderr}"
    assert execution.return_code == sample.return_code
    assert "before" in execution.stdout + execution.stderr


@pytest.mark.parametrize("language", [name for name, sample in SAMPLES.items() if sample.broken])
async def test_compiler_error_is_reported(server: str, available: Language) -> None:
    sample = SAMPLES[available]
    async with SandboxClient(server) as client:
        execution = await client.run(sample.broken, available, compile_timeout=TIMEOUT_S, run_timeout=TIMEOUT_S)
    assert execution.outcome is ExecutionOutcome.COMPILE_FAILED
    assert execution.run_result is None
    assert execution.compile_result is not None
    assert sample.compiler_error in (execution.compile_result.stderr or "") + (execution.compile_result.stdout or "")


@pytest.mark.parametrize("language", ["java"])
async def test_program_can_handle_full_heap(server: str, available: Language) -> None:
    fill = """import java.util.*;
        public class Main { public static void main(String[] a) {
            List<byte[]> all = new ArrayList<>();
            try { while (true) all.add(new byte[1 << 20]); }
            catch (OutOfMemoryError e) { int n = all.size(); all = null; System.out.println(n > 128); } } }"""
    async with SandboxClient(server) as client:
        execution = await client.run(fill, available, memory_limit_mb=256, compile_timeout=TIMEOUT_S)
    assert (execution.outcome, execution.stdout) == (ExecutionOutcome.OK, "true\n"), execution.stderr


async def test_files_of_request_replace_default_files(server: str, here: Found) -> None:
    if isinstance(here["go"], MissingToolchain):
        pytest.skip(here["go"].install)
    code = 'package main\nimport "own/greeting"\nfunc main() { greeting.Greet() }'
    files = {
        "go.mod": b"module own\n",
        "greeting/greeting.go": b'package greeting\nimport "fmt"\nfunc Greet() { fmt.Println("hello") }',
    }
    async with SandboxClient(server) as client:
        execution = await client.run(code, "go", files=files, compile_timeout=TIMEOUT_S)
    assert execution.stdout == "hello\n", execution.stderr


async def test_sql_rows_are_printed(server: str) -> None:
    async with SandboxClient(server) as client:
        execution = await client.run(SAMPLES["sql"].echo, "sql")
    assert execution.stdout == "hello|\na;b|1\n2\n"


async def test_missing_language_is_rejected_with_remedy(server: str, here: Found) -> None:
    async with SandboxClient(server) as client:
        for language, state in here.items():
            if isinstance(state, MissingToolchain):
                with pytest.raises(SandboxRefused) as caught:
                    await client.run("1", language)
                assert state.install in str(caught.value)
