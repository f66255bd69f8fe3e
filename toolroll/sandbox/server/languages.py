"""Which languages this machine can run, and by which commands.

`find_all` looks once, when the server starts: every language is there, as a Toolchain or as Missing, which says what to
install. `prepare` turns a program into files and commands; it touches nothing and asks nobody. File names, commands
and their flags are SandboxFusion's: a program finds here what it finds there, but for the packages of its image.

    toolchain = find_all(os.environ["PATH"], sys.executable)["cpp"]
    prepare(toolchain, "int main() {}", memory=1 << 30, compile_timeout=10, run_timeout=10).stages

Commands run in the program's directory, without a shell. None of their words depends on where that is or on HOME, as
both differ with how programs are isolated.
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
from toolroll.sandbox.server.spec import Stage

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
"""What every program may read. A toolchain that is elsewhere names its own directories: `Toolchain.readable`."""
ANSWER_WITHIN = 10.0
"""Seconds that a program has to say its version."""
_SHARED = ("share/java", "lib/node_modules", "share/nodejs")
"""Where jars and modules are, below the directory that a toolchain is installed in."""


@dataclass(frozen=True)
class Recipe:
    """How a language is run, on any machine.

    The first word of a command names a program that must be there; `lua|lua5.4` is the first of them that is. `$word`
    stands for what is found on the machine, in the request or in the code, or for `$heap`: the megabytes that a runtime
    with a heap of its own may use for it. Such a runtime would ask the kernel, and the jail's limit isn't seen there.
    """

    install: str
    filename: str
    run: str
    _: KW_ONLY
    compile: str = ""
    also: tuple[str, ...] = ()
    """Programs that those of the commands start."""
    version: str = "--version"
    """What to ask the first program, for an answer with its version in it."""
    prefix: str = ""
    """What to ask the first program, for the directory that it is really in: some programs only find another."""
    name: str = ""
    """A pattern: its group, where it first matches the code, is `$name`, which else is Main."""
    opening: str = ""
    """What the code has to begin with."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """`$word` → the pattern of a jar or module that must be there."""
    libraries: tuple[str, ...] = ()
    """To be linked, where the compiler has them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → text, beside the code."""


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """What a language is run by on this machine."""

    recipe: Recipe
    version: str
    programs: Mapping[str, str]
    """First word of a command → the program's path."""
    words: Mapping[str, str]
    """`$word` → what it stands for."""
    libraries: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    """What programs must be able to read beside SYSTEM and the directories of the sandbox's Python."""


@dataclass(frozen=True)
class Missing:
    """A language that this machine can't run."""

    install: str
    """What to do about it: "install g++ (Debian: apt install g++)"."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A program, ready for a Spec."""

    filename: str
    """Empty where there is no code, and the request's files are the program."""
    code: str
    files: dict[str, str]
    """Path → content in base64; not those that the request has itself."""
    stages: list[Stage]
    """A compiler if the language has one, then the program."""
    environment: dict[str, str]


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
for piece in re.split("(?<=;)", open("main.sql").read()):
    statement += piece
    if sqlite3.complete_statement(statement):
        run(statement)
        statement = ""
run(statement)
"""
_BABEL = """\
module.exports = {presets: [["$env", {targets: {node: "current"}}], "$typescript"]};
"""
_PROJECT = """\
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
# A compiler is done before the JVM's slow, thorough compilation pays; a program may not be.
_JAVAC = "javac -J-Xmx${heap}m -J-XX:+UseSerialGC -J-XX:TieredStopAtLevel=1 -encoding UTF-8 -cp $classpath"
_JAVA = "java -Xmx${heap}m -XX:+UseSerialGC"
_JDK = "a Java development kit (Debian: apt install default-jdk-headless)"

RECIPES: Mapping[Language, Recipe] = {
    # Python is run by the server's warm interpreters, not by this command; it is here to be listed like the others.
    "python": Recipe("Python 3.11 or later", "main.py", "python main.py"),
    "pytest": Recipe(
        "pytest for the sandbox's Python: pip install pytest", "test_main.py", "python -m pytest test_main.py",
        version="-m pytest --version",
    ),
    # Always by Python, so that a program does the same on a machine that has the sqlite3 command and on one without.
    "sql": Recipe(
        "Python's module sqlite3 for the sandbox's Python", "main.sql", "python .run_sql.py",
        version='-c "import sqlite3; print(sqlite3.sqlite_version)"', files={".run_sql.py": _SQL},
    ),
    "bash": Recipe("bash (Debian: apt install bash)", "main.sh", "bash main.sh"),
    "cpp": Recipe(
        "g++ (Debian: apt install g++)", "main.cpp", "./test",
        compile="g++ -std=c++17 main.cpp -o test $libraries", libraries=("crypto", "ssl", "pthread"),
    ),
    "rust": Recipe(
        "rustc and a C compiler (https://rustup.rs, or Debian: apt install rustc)", "main.rs", "./test",
        compile="rustc main.rs -o test", also=("cc",), prefix="--print sysroot",
    ),
    "go": Recipe(
        "Go (Debian: apt install golang-go)", "main.go", "./out", compile="go build -o out main.go",
        version="version", prefix="env GOROOT", environment=_GO_ENVIRONMENT, files=_GO_FILES,
    ),
    "go_test": Recipe(
        "Go (Debian: apt install golang-go)", "main_test.go", "go test main_test.go",
        version="version", prefix="env GOROOT", environment=_GO_ENVIRONMENT, files=_GO_FILES,
    ),
    "java": Recipe(
        _JDK, "Main.java", f"{_JAVA} -cp $classpath -ea Main", compile=f"{_JAVAC} Main.java", version="-version",
    ),
    "junit": Recipe(
        f"{_JDK}, and put Maven's junit-platform-console-standalone 1.8.2 into /usr/local/share/java",
        "$name.java", f"{_JAVA} -jar $junit --class-path $classpath --scan-class-path", compile=f"{_JAVAC} $sources",
        version="-version", name=r"\bpublic\s+(?:abstract\s+|final\s+)?class\s+(\w+)",
        needs={"junit": "junit-platform-console-standalone*.jar"},
    ),
    "nodejs": Recipe(
        "Node.js (Debian: apt install nodejs)", "main.js", "node main.js", environment=_NODE_ENVIRONMENT,
    ),
    "typescript": Recipe(
        "Node.js, then: npm install -g tsx", "main.ts", "tsx main.ts", environment=_NODE_ENVIRONMENT,
    ),
    "jest": Recipe(
        "Node.js, then: npm install -g jest @babel/preset-env @babel/preset-typescript",
        "main.test.ts", "jest --watchman=false --maxWorkers=2",
        needs={"env": "@babel/preset-env", "typescript": "@babel/preset-typescript"},
        environment={**_NODE_ENVIRONMENT, "FORCE_COLOR": "0"},
        files={"babel.config.js": _BABEL, "package.json": "{}\n"},
    ),
    "php": Recipe("PHP (Debian: apt install php-cli)", "main.php", "php -f main.php", opening="<?php"),
    "perl": Recipe("Perl (Debian: apt install perl)", "main.pl", "perl main.pl"),
    "ruby": Recipe("Ruby (Debian: apt install ruby)", "main.rb", "ruby main.rb"),
    "lua": Recipe("Lua (Debian: apt install lua5.4)", "main.lua", "lua|lua5.4|lua5.3 main.lua", version="-v"),
    "R": Recipe("R (Debian: apt install r-base-core)", "main.R", "Rscript main.R"),
    "D_ut": Recipe(
        "dmd (https://dlang.org/download.html) or ldc (Debian: apt install ldc gcc)", "main.d", "./test",
        compile="dmd|ldmd2 main.d -unittest -of=test", also=("cc",),
    ),
    "verilog": Recipe(
        "Icarus Verilog (Debian: apt install iverilog)", "main.sv", "vvp -n test.vvp", version="-V",
        compile="iverilog -Wall -Winfloop -Wno-timescale -g2012 -s tb -o test.vvp main.sv",
    ),
    "racket": Recipe("Racket (Debian: apt install racket)", "main.rkt", "racket main.rkt"),
    "julia": Recipe(
        "Julia (https://julialang.org/downloads)", "main.jl", "julia main.jl",
        prefix='-e "print(dirname(Sys.BINDIR))"',
    ),
    "scala": Recipe(
        "scala and scalac: 2.13, or 3 up to 3.4 (https://www.scala-lang.org/download)", "main.scala", "scala $name",
        compile="scalac main.scala", version="-version", name=r"\bobject\s+(\w+)", environment=_JVM_ENVIRONMENT,
    ),
    "kotlin_script": Recipe(
        "Kotlin's command line (https://kotlinlang.org/docs/command-line.html)", "main.kts", "kotlin main.kts",
        version="-version", environment=_JVM_ENVIRONMENT,
    ),
    "swift": Recipe(
        "Swift (https://www.swift.org/install)", "main.swift", "./test.out", compile="swiftc main.swift -o test.out",
    ),
    # Theorems are proved as the file is read. Without a project there are no packages, so no Mathlib.
    "lean": Recipe("Lean 4 (https://lean-lang.org/install)", "Main.lean", "lean Main.lean", prefix="--print-prefix"),
    "csharp": Recipe(
        "the .NET SDK, 6 or later (https://dotnet.microsoft.com/download)", "Program.cs",
        "dotnet run --project main.csproj", environment=_NET_ENVIRONMENT, files={"main.csproj": _PROJECT},
    ),
}  # fmt: skip
_NO_GPU = Missing("install SandboxFusion on a machine with a GPU, and send this language there: programs see none here")


def find_all(search_path: str, python: str) -> dict[Language, Toolchain | Missing]:
    """What there is for each language of the protocol. Takes no longer than a few of ANSWER_WITHIN, and never raises.

    Args:
        search_path: Where to look for programs: the PATH that programs will have.
        python: The interpreter of the sandbox.
    """
    languages: tuple[Language, ...] = get_args(Language)
    with ThreadPoolExecutor(len(languages)) as pool:
        return dict(zip(languages, pool.map(lambda each: _find(each, search_path, python), languages), strict=True))


def prepare(
    tools: Toolchain, code: str, *, memory: int, compile_timeout: float, run_timeout: float, files: Iterable[str] = ()
) -> Prepared:
    """The files and commands that run a program.

    Args:
        memory: Bytes that the program may use.
        files: The paths of the request's files. Jars among them are on a Java program's class path.
    """
    recipe, files = tools.recipe, list(files)
    found = re.search(recipe.name, code) if recipe.name else None
    jars = [*map(tools.words.get, ("junit", "javatuples")), *(path for path in files if path.endswith(".jar"))]
    words = {
        **tools.words,
        "heap": str(max(16, memory * 3 // 4 >> 20)),
        "name": found[1] if found else "Main",
        "classpath": ":".join([".", *filter(None, jars)]),
    }

    def fill(text: str) -> str:
        return Template(text).safe_substitute(words)

    filename = fill(recipe.filename) if code or "$sources" not in recipe.compile else ""
    sources = dict.fromkeys([filename, *(path for path in files if path.endswith(".java"))])
    lists = {"$libraries": tools.libraries, "$sources": [path for path in sources if path]}

    def stage(command: str, timeout: float) -> Stage:
        program, *rest = shlex.split(command)
        argv = [tools.programs.get(program, program)]
        for word in rest:
            argv += lists[word] if word in lists else [fill(word)]
        return {"argv": argv, "timeout": timeout}

    commands = [(recipe.compile, compile_timeout), (recipe.run, run_timeout)]
    return Prepared(
        filename=filename,
        code=_opened(code, recipe.opening) if recipe.opening else code,
        files={
            path: b64encode(fill(recipe.files[path]).encode()).decode() for path in recipe.files if path not in files
        },
        stages=[stage(command, timeout) for command, timeout in commands if command],
        environment={name: fill(value) for name, value in recipe.environment.items()},
    )


def _opened(code: str, opening: str) -> str:
    code = code.lstrip()  # what comes before the opening would be printed
    return code if code.startswith(opening) else f"{opening}\n{code}"


def _find(language: Language, search_path: str, python: str) -> Toolchain | Missing:
    recipe = RECIPES.get(language)
    if recipe is None:
        return _NO_GPU
    commands = [command.split()[0] for command in (recipe.compile, recipe.run) if command and command[0] != "."]
    programs = {name: _which(name, search_path) for name in (*commands, *recipe.also) if name != "python"}
    if not all(programs.values()):
        return Missing(f"install {recipe.install}")
    try:
        return _inspect(recipe, programs or {"python": python}, {**os.environ, "PATH": search_path})
    except (OSError, subprocess.SubprocessError) as error:
        return Missing(f"install {recipe.install} (tried: {error})")


def _inspect(recipe: Recipe, programs: dict[str, str], environment: Mapping[str, str]) -> Toolchain:
    name, program = next(iter(programs.items()))
    if recipe.prefix:
        prefix = _ask(program, recipe.prefix, environment).rpartition("\n")[2]
        program = programs[name] = f"{prefix}/bin/{name}"
    found = re.search(r"\d+(?:\.\d+)+", _ask(program, recipe.version, environment))
    version = found[0] if found else ""
    words = _locate(recipe, [str(Path(path).parent.parent) for path in programs.values()])
    if lacking := [recipe.needs[word] for word in recipe.needs if not words[word]]:
        raise FileNotFoundError(f"{', '.join(lacking)} isn't there")
    return Toolchain(
        recipe=recipe,
        version=version,
        programs=programs,
        words={**words, "release": ".".join(version.split(".")[:2])},
        libraries=tuple(f"-l{one}" for one in recipe.libraries if _links(program, one, environment)),
        readable=tuple(place for each in programs if each != "python" for place in _outside(programs[each])),
    )


def _which(names: str, search_path: str) -> str:
    found = filter(None, (shutil.which(name, path=search_path or os.devnull) for name in names.split("|")))
    return next((str(Path(path).absolute()) for path in found), "")


def _ask(program: str, arguments: str, environment: Mapping[str, str]) -> str:
    """What a program prints. It may be a script: then those whom it started hold the pipe, and must end with it."""
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
            output, _ = process.communicate(timeout=ANSWER_WITHIN)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, program)
    return output.decode(errors="replace").strip()


def _links(compiler: str, library: str, environment: Mapping[str, str]) -> bool:
    """Whether the compiler has a library. It says the whole path of a file that it finds, else the name again."""
    names = (f"lib{library}.so", f"lib{library}.a")
    return any("/" in _ask(compiler, f"-print-file-name={name}", environment) for name in names)


def _locate(recipe: Recipe, prefixes: Iterable[str]) -> dict[str, str]:
    """Where the jars and modules are that a recipe needs, or could use; empty where they are not."""
    prefixes = dict.fromkeys([*prefixes, "/usr/local", "/usr"])
    places = [Path(prefix, shared) for prefix in prefixes for shared in _SHARED]
    wanted = {**recipe.needs, "javatuples": "javatuples*.jar"}
    found = {word: [path for place in places for path in place.glob(wanted[word])] for word in wanted}
    modules = ":".join(str(place) for place in places if place.name == "node_modules" and place.is_dir())
    return {**{word: str(next(iter(paths), "")) for word, paths in found.items()}, "modules": modules}


def _outside(program: str) -> list[str]:
    """What must be readable for a program to run, where it isn't in the system's directories: all of its installation,
    and not more of a home directory than that."""
    places = []
    for path in dict.fromkeys([Path(program), Path(program).resolve()]):
        if any(path.is_relative_to(directory) for directory in SYSTEM):
            continue
        prefix, home = path.parent.parent, Path(os.environ.get("HOME", "/root"))
        if "node_modules" in path.parts:
            path = Path(*path.parts[: path.parts.index("node_modules") + 1])
        elif path.parent.name == "bin" and not home.is_relative_to(prefix) and prefix != home / ".local":
            path = prefix
        places.append(str(path))
    return places
