"""Toolchains of this machine, and the commands that run a program in each language.

`find_all` searches once, when the server starts. Each language is either a `Toolchain` or a `MissingToolchain`, which
names the packages to install. `prepare` is a pure function that turns a program into files and commands. File names,
commands and flags are those of SandboxFusion, so that programs behave the same on both servers, except for the packages
in SandboxFusion's image.

    toolchain = find_all(os.environ["PATH"], sys.executable)["cpp"]
    prepare(toolchain, "int main() {}", files=[], memory_bytes=1 << 30, timeouts_s=(10, 10))["stages"]

Commands run in the working directory, without a shell. They do not depend on the location of that directory or on HOME,
which differ between isolation tiers.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from base64 import b64encode
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from string import Template
from typing import get_args

from toolroll.sandbox.protocol import Language
from toolroll.sandbox.server.job_spec import ProgramSpec

SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
"""Directories that every program may read. Toolchains elsewhere list theirs in `Toolchain.readable`."""
QUERY_TIMEOUT_S = 10.0
"""Timeout for a command that prints a version or a directory."""
MIN_HEAP_MB = 16
_SHARED_DIRECTORIES = ("share/java", "lib/node_modules", "share/nodejs")
"""Directories of jars and modules, relative to the prefix of a toolchain."""


@dataclass(frozen=True)
class Recipe:
    """How to run a language, on any machine.

    The first word of a command is a required program; `lua|lua5.4` is the first of these that is installed. `$variable`
    is replaced by a value that is found on the machine, in the request or in the code. `$heap` is the heap size in
    megabytes for runtimes that manage their own heap, because they cannot see the memory limit of the jail.
    """

    install: str
    """What to install."""
    filename: str
    run: str
    _: KW_ONLY
    compile: str = ""
    compiled: str = ""
    """File that the compiler writes, if it is all that the program needs. It can be cached."""
    helpers: tuple[str, ...] = ()
    """Other required programs, which those of the commands start."""
    version_args: str = "--version"
    """Arguments with which the first program prints its version."""
    prefix_args: str = ""
    """Arguments with which the first program prints its real prefix, if it may be a launcher for another program."""
    name_pattern: str = ""
    """Regular expression whose first group, searched in the code, is `$name`. The default is Main."""
    code_prefix: str = ""
    """Text with which the code must start. It is added if it is missing."""
    required_files: Mapping[str, str] = field(default_factory=dict)
    """Variable → glob pattern of a jar or module that must be installed."""
    libraries: tuple[str, ...] = ()
    """Libraries that are linked if the compiler finds them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Additional files: path → text."""


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """The programs that run a language on this machine."""

    recipe: Recipe
    version: str
    programs: Mapping[str, str]
    """First word of a command → path of the program."""
    variables: Mapping[str, str]
    """Values of the variables that are known when the server starts."""
    libraries: tuple[str, ...] = ()
    """Linker flags of the available libraries."""
    readable: tuple[str, ...] = ()
    """Paths that programs must be able to read, in addition to the system's directories and those of Python."""


@dataclass(frozen=True)
class MissingToolchain:
    """A language that this machine cannot run."""

    install: str
    """Instruction for the user, for example "install g++ (Debian: apt install g++)"."""


Toolchains = Mapping[Language, Toolchain | MissingToolchain]
"""Toolchain of each language."""


_SQL = """\
import re, sqlite3, sys

def run(statement):
    try:
        for row in database.execute(statement):
            print(*("" if value is None else value for value in row), sep="|")
    except sqlite3.Error as error:
        sys.exit(f"{type(error).__name__}: {error}")

database = sqlite3.connect(":memory:", isolation_level=None)
statement = ""
for part in re.split("(?<=;)", open("main.sql").read()):
    statement += part
    if sqlite3.complete_statement(statement):
        run(statement)
        statement = ""
run(statement)
"""
_BABEL = """\
module.exports = {presets: [["$env", {targets: {node: "current"}}], "$typescript"]};
"""
_CSPROJ = """\
<Project Sdk="Microsoft.NET.Sdk">
  <PropertyGroup>
    <OutputType>Exe</OutputType>
    <TargetFramework>net$release</TargetFramework>
    <ImplicitUsings>enable</ImplicitUsings>
    <Nullable>enable</Nullable>
    <UseAppHost>false</UseAppHost>
    <UseSharedCompilation>false</UseSharedCompilation>
  </PropertyGroup>
</Project>
"""
_GO_ENVIRONMENT = {"GOPROXY": "off", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod", "GOMEMLIMIT": "${heap}MiB"}
_GO_FILES = {"go.mod": "module SeedSandbox\n\ngo $release\n"}
_NODE_ENVIRONMENT = {"NODE_OPTIONS": "--max-old-space-size=$heap", "NODE_PATH": "$modules"}
_JVM_ENVIRONMENT = {"JAVA_OPTS": "-Xmx${heap}m -XX:+UseSerialGC"}
_NET_ENVIRONMENT = {
    "DOTNET_NOLOGO": "1", "DOTNET_CLI_TELEMETRY_OPTOUT": "1", "MSBUILDDISABLENODEREUSE": "1",
    "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1",  # else it needs ICU
}  # fmt: skip
# Compilers finish before the JVM's optimizing compiler pays off, so it is disabled for them.
_JAVAC = "javac -J-Xmx${heap}m -J-XX:+UseSerialGC -J-XX:TieredStopAtLevel=1 -encoding UTF-8 -cp $classpath"
_JAVA = "java -Xmx${heap}m -XX:+UseSerialGC"
_JDK = "a Java development kit (Debian: apt install default-jdk-headless)"

RECIPES: Mapping[Language, Recipe] = {
    # Python programs run in children of zygotes and not by this command. The recipe is used to list the language.
    "python": Recipe("Python 3.11 or later", "main.py", "python main.py"),
    "pytest": Recipe(
        "pytest for the sandbox's Python: pip install pytest", "test_main.py", "python -m pytest test_main.py",
        version_args="-m pytest --version"),
    # Run by Python, so that programs behave the same whether or not the sqlite3 command is installed.
    "sql": Recipe("Python's module sqlite3 for the sandbox's Python", "main.sql", "python .run_sql.py",
        version_args='-c "import sqlite3; print(sqlite3.sqlite_version)"', files={".run_sql.py": _SQL}),
    "bash": Recipe("bash (Debian: apt install bash)", "main.sh", "bash main.sh"),
    "cpp": Recipe("g++ (Debian: apt install g++)", "main.cpp", "./test",
        compile="g++ -std=c++17 main.cpp -o test $libraries", compiled="test", libraries=("crypto", "ssl", "pthread")),
    "rust": Recipe("rustc and a C compiler (https://rustup.rs, or Debian: apt install rustc)", "main.rs", "./test",
        compile="rustc main.rs -o test", compiled="test", helpers=("cc",), prefix_args="--print sysroot"),
    "go": Recipe("Go (Debian: apt install golang-go)", "main.go", "./out",
        compile="go build -o out main.go", compiled="out",
        version_args="version", prefix_args="env GOROOT", environment=_GO_ENVIRONMENT, files=_GO_FILES),
    "go_test": Recipe("Go (Debian: apt install golang-go)", "main_test.go", "go test main_test.go",
        version_args="version", prefix_args="env GOROOT", environment=_GO_ENVIRONMENT, files=_GO_FILES),
    "java": Recipe(
        _JDK, "Main.java", f"{_JAVA} -cp $classpath -ea Main", compile=f"{_JAVAC} Main.java", version_args="-version"),
    "junit": Recipe(f"{_JDK}, and put Maven's junit-platform-console-standalone 1.8.2 into /usr/local/share/java",
        "$name.java", f"{_JAVA} -jar $junit --class-path $classpath --scan-class-path", compile=f"{_JAVAC} $sources",
        version_args="-version",  # the name must be short enough for a file
        name_pattern=r"\bpublic\s+(?:abstract\s+|final\s+)?class\s+((?a:\w{1,200})|\w{1,60})\b",
        required_files={"junit": "junit-platform-console-standalone*.jar"}),
    "nodejs": Recipe("Node.js (Debian: apt install nodejs)", "main.js", "node main.js", environment=_NODE_ENVIRONMENT),
    "typescript": Recipe("Node.js, then: npm install -g tsx", "main.ts", "tsx main.ts", environment=_NODE_ENVIRONMENT),
    "jest": Recipe("Node.js, then: npm install -g jest @babel/preset-env @babel/preset-typescript",
        "main.test.ts", "jest --watchman=false --maxWorkers=2",
        required_files={"env": "@babel/preset-env", "typescript": "@babel/preset-typescript"},
        environment={**_NODE_ENVIRONMENT, "FORCE_COLOR": "0"},
        files={"babel.config.js": _BABEL, "package.json": "{}\n"}),
    "php": Recipe("PHP (Debian: apt install php-cli)", "main.php", "php -f main.php", code_prefix="<?php"),
    "perl": Recipe("Perl (Debian: apt install perl)", "main.pl", "perl main.pl"),
    "ruby": Recipe("Ruby (Debian: apt install ruby)", "main.rb", "ruby main.rb"),
    "lua": Recipe("Lua (Debian: apt install lua5.4)", "main.lua", "lua|lua5.4|lua5.3 main.lua", version_args="-v"),
    "R": Recipe("R (Debian: apt install r-base-core)", "main.R", "Rscript main.R"),
    "D_ut": Recipe("dmd (https://dlang.org/download.html) or ldc (Debian: apt install ldc gcc)", "main.d", "./test",
        compile="dmd|ldmd2 main.d -unittest -of=test", compiled="test", helpers=("cc",)),
    "verilog": Recipe("Icarus Verilog (Debian: apt install iverilog)", "main.sv", "vvp -n test.vvp", version_args="-V",
        compile="iverilog -Wall -Winfloop -Wno-timescale -g2012 -s tb -o test.vvp main.sv", compiled="test.vvp"),
    "racket": Recipe("Racket (Debian: apt install racket)", "main.rkt", "racket main.rkt"),
    "julia": Recipe("Julia (https://julialang.org/downloads)", "main.jl", "julia main.jl",
        prefix_args='-e "print(dirname(Sys.BINDIR))"'),
    "scala": Recipe(
        "scala and scalac: 2.13, or 3 up to 3.4 (https://www.scala-lang.org/download)", "main.scala", "scala $name",
        compile="scalac main.scala", version_args="-version", name_pattern=r"\bobject\s+(\w+)",
        environment=_JVM_ENVIRONMENT),
    "kotlin_script": Recipe(
        "Kotlin's command line (https://kotlinlang.org/docs/command-line.html)", "main.kts", "kotlin main.kts",
        version_args="-version", environment=_JVM_ENVIRONMENT),
    "swift": Recipe(
        "Swift (https://www.swift.org/install)", "main.swift", "./test.out", compile="swiftc main.swift -o test.out",
        compiled="test.out"),
    # Theorems are checked while the file is read. Packages such as Mathlib are not available without a project.
    "lean": Recipe(
        "Lean 4 (https://lean-lang.org/install)", "Main.lean", "lean Main.lean", prefix_args="--print-prefix"),
    "csharp": Recipe("the .NET SDK, 6 or later (https://dotnet.microsoft.com/download)", "Program.cs",
        "dotnet run --project main.csproj", environment=_NET_ENVIRONMENT, files={"main.csproj": _CSPROJ}),
}  # fmt: skip
_NO_GPU = MissingToolchain(
    "install SandboxFusion on a machine with a GPU and send this language there (programs have no access to GPUs here)"
)

_NEEDS_COMPILER = MissingToolchain("start a sandbox server on Linux, which can also run languages with a compiler")


def find_all(
    search_path: str, python: str, *, with_compilers: bool = True
) -> dict[Language, Toolchain | MissingToolchain]:
    """Search the toolchain of every language. Takes at most a few times QUERY_TIMEOUT_S and never raises.

    Args:
        search_path: PATH of the programs.
        python: Python interpreter of the programs.
        with_compilers: Whether to search languages that need a compiler.

    Returns:
        The toolchain of each language, or what to install.
    """
    languages: tuple[Language, ...] = get_args(Language)
    searched = [name for name in languages if with_compilers or name not in RECIPES or not RECIPES[name].compile]
    with ThreadPoolExecutor(len(languages)) as pool:
        toolchains = pool.map(lambda language: _find_toolchain(language, search_path, python), searched)
        return dict.fromkeys(languages, _NEEDS_COMPILER) | dict(zip(searched, toolchains, strict=True))


def prepare(
    toolchain: Toolchain, code: str, files: Iterable[str], *, memory_bytes: int, timeouts_s: tuple[float, float]
) -> ProgramSpec:
    """Return the files and commands that run a program. Files of the request take precedence and are not included.

    Args:
        toolchain: Toolchain of the program's language.
        code: Source of the program.
        files: Paths of the request's files. Jars are added to the class path of a Java program.
        memory_bytes: Memory limit of the program.
        timeouts_s: Timeout of the compiler and timeout of the program.
    """
    recipe, request_files = toolchain.recipe, list(files)
    variables = {**toolchain.variables, **_program_variables(toolchain, code, memory_bytes, request_files)}
    needs_code = "$sources" not in recipe.compile
    filename = _substitute(recipe.filename, variables) if code or needs_code else ""
    sources = dict.fromkeys([filename, *(path for path in request_files if path.endswith(".java"))])
    words = {
        **{name: shlex.quote(value) for name, value in variables.items()},
        "libraries": shlex.join(toolchain.libraries),
        "sources": shlex.join(filter(None, sources)),
    }
    texts = {path: _substitute(text, variables) for path, text in recipe.files.items() if path not in request_files}
    commands = zip((recipe.compile, recipe.run), timeouts_s, strict=True)
    return {
        "filename": filename,
        "code": _add_prefix(code, recipe.code_prefix) if recipe.code_prefix else code,
        "files": {path: b64encode(text.encode()).decode() for path, text in texts.items()},
        "stages": [
            {"argv": _argv(command, words, toolchain.programs), "timeout": timeout_s}
            for command, timeout_s in commands
            if command
        ],
        "environment": {name: _substitute(value, variables) for name, value in recipe.environment.items()},
    }


def _program_variables(toolchain: Toolchain, code: str, memory_bytes: int, files: list[str]) -> dict[str, str]:
    name_pattern = toolchain.recipe.name_pattern
    match = re.search(name_pattern, code) if name_pattern else None
    jars = [toolchain.variables.get("junit"), toolchain.variables.get("javatuples")]
    jars += [path for path in files if path.endswith(".jar")]
    return {
        "heap": str(max(MIN_HEAP_MB, memory_bytes * 3 // 4 >> 20)),
        "name": match[1] if match else "Main",
        "classpath": ":".join([".", *filter(None, jars)]),
    }


def _substitute(text: str, variables: Mapping[str, str]) -> str:
    return Template(text).safe_substitute(variables)


def _argv(command: str, quoted_variables: Mapping[str, str], programs: Mapping[str, str]) -> list[str]:
    program, *arguments = shlex.split(_substitute(command, quoted_variables))
    return [programs.get(program, program), *arguments]


def _add_prefix(code: str, prefix: str) -> str:
    code = code.lstrip()  # PHP would print it
    return code if code.startswith(prefix) else f"{prefix}\n{code}"


def _find_toolchain(language: Language, search_path: str, python: str) -> Toolchain | MissingToolchain:
    recipe = RECIPES.get(language)
    if recipe is None:
        return _NO_GPU
    commands = [command.split()[0] for command in (recipe.compile, recipe.run) if command and command[0] != "."]
    programs = {name: _which(name, search_path) for name in (*commands, *recipe.helpers) if name != "python"}
    if not all(programs.values()):
        return MissingToolchain(f"install {recipe.install}")
    try:
        return _inspect(recipe, programs or {"python": python}, {**os.environ, "PATH": search_path})
    except (OSError, subprocess.SubprocessError) as error:
        return MissingToolchain(f"install {recipe.install} (tried: {error})")


def _inspect(recipe: Recipe, programs: dict[str, str], environment: Mapping[str, str]) -> Toolchain:
    """Return the toolchain that consists of these programs. Raises an exception if they do not work."""
    name, program = next(iter(programs.items()))
    if recipe.prefix_args:
        prefix = _output_of(program, recipe.prefix_args, environment).rpartition("\n")[2]
        program = programs[name] = f"{prefix}/bin/{name}"
    match = re.search(r"\d+(?:\.\d+)+", _output_of(program, recipe.version_args, environment))
    version = match[0] if match else ""
    variables = _find_files(recipe, [str(Path(path).parent.parent) for path in programs.values()])
    if missing := [pattern for variable, pattern in recipe.required_files.items() if not variables[variable]]:
        raise FileNotFoundError(f"{', '.join(missing)} not found")
    return Toolchain(
        recipe=recipe,
        version=version,
        programs=programs,
        variables={**variables, "release": ".".join(version.split(".")[:2])},
        libraries=tuple(f"-l{library}" for library in recipe.libraries if _has_library(program, library, environment)),
        readable=tuple(path for name in programs if name != "python" for path in _installation_paths(programs[name])),
    )


def _which(names: str, search_path: str) -> str:
    found = filter(None, (shutil.which(name, path=search_path or os.devnull) for name in names.split("|")))
    return next((str(Path(path).absolute()) for path in found), "")


def _output_of(program: str, arguments: str, environment: Mapping[str, str]) -> str:
    with subprocess.Popen(
        [program, *shlex.split(arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=QUERY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the program may be a script whose children hold the pipe open
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, program)
    return output.decode(errors="replace").strip()


def _has_library(compiler: str, library: str, environment: Mapping[str, str]) -> bool:
    """Return True if the compiler finds a library. It prints the path of a file that it finds, otherwise its name."""
    names = (f"lib{library}.so", f"lib{library}.a")
    return any("/" in _output_of(compiler, f"-print-file-name={name}", environment) for name in names)


def _find_files(recipe: Recipe, prefixes: Iterable[str]) -> dict[str, str]:
    """Return the paths of the jars and modules that a recipe can use, by variable. Empty for a file that is missing."""
    prefixes = dict.fromkeys([*prefixes, "/usr/local", "/usr"])
    directories = [Path(prefix, shared) for prefix in prefixes for shared in _SHARED_DIRECTORIES]
    paths = {
        variable: next((str(path) for directory in directories for path in directory.glob(pattern)), "")
        for variable, pattern in {**recipe.required_files, "javatuples": "javatuples*.jar"}.items()
    }
    modules = [str(directory) for directory in directories if directory.name == "node_modules" and directory.is_dir()]
    return {**paths, "modules": ":".join(modules)}


def _installation_paths(program: str) -> list[str]:
    """Return the paths that must be readable to run a program outside of the system's directories.

    This is the whole installation of the program, but never a home directory.
    """
    paths = []
    for path in dict.fromkeys([Path(program), Path(program).resolve()]):
        if any(path.is_relative_to(directory) for directory in SYSTEM_DIRECTORIES):
            continue
        prefix, home = path.parent.parent, Path(os.environ.get("HOME", "/root"))
        if "node_modules" in path.parts:
            path = Path(*path.parts[: path.parts.index("node_modules") + 1])
        elif path.parent.name == "bin" and not home.is_relative_to(prefix) and prefix != home / ".local":
            path = prefix
        paths.append(str(path))
    return paths
