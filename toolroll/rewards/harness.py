"""The Python program around a solution whose function is called, or to which asserts are appended.

    run = Harness("def add(a, b): return a + b", "add").prepare([3, 4])
    execution, *_ = await sandbox.run(run.code, stdin=run.stdin, run_timeout=10)
    run.result(execution.stdout)  # "7": the return value as JSON, or None if the function did not return

Properties of both kinds:

- The solution is a separate module, `solution`: its `if __name__ == "__main__":` block does not run, its `from
  __future__` imports apply, and tracebacks show its own lines and line numbers.
- Output of the solution goes to stderr, by redirecting the descriptors. The result is written to stdout after a marker
  that is random for each run. The marker is part of stdin, together with the arguments or asserts, and is in no file.
- A solution that ends early fails, however it ends: an exception, `sys.exit(0)`, `os._exit(0)`. The marker is written
  only at the end of the harness, and no code of the solution runs after that, not even `atexit` functions.
- Names that solutions in data sets use without importing them (`List`, `defaultdict`, `heapq`, `inf`, …) are imported
  if they occur in the source. They become builtins of the solution and not its own names, so that mentioning `gcd` does
  not solve a problem whose function is `gcd`.

Invariant: a program cannot forge the result of a call. The expected value is neither in the program nor in its memory,
and the return value is compared as JSON outside the sandbox. To pass, a program must return the correct value.

Asserts are weaker. They run in the solution's process on the solution's objects, so a program can pass without solving
the problem: with an object that equals everything, by replacing functions that the asserts call, or by searching the
interpreter's frames for the marker or the asserts. This does not happen by accident, but a policy may learn it. Prefer
calls, or stdin and stdout.

The harness runs on Python 3.8 and later. Besides `json`, it imports only modules that every interpreter has loaded.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

_NAMES_OF = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping "
    "NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile groupby "
    "islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "math": "atan atan2 ceil comb cos dist exp factorial floor fsum gcd hypot inf isclose isqrt lcm log log10 log2 "
    "nan perm pi prod sin sqrt tan",
    "operator": "attrgetter itemgetter mul xor",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "copy": "deepcopy",
    "dataclasses": "dataclass",
    "enum": "Enum IntEnum",
    "abc": "ABC abstractmethod",
    "random": "randint randrange shuffle",
    "datetime": "timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "": "bisect collections copy datetime decimal functools heapq itertools json math operator random re statistics "
    "string sys time typing",
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
"""Name → module that defines it, or "" if the name is a module itself. None of the names hides a builtin."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")

# Functions that the solution could replace are bound to local names before it runs. Asserts see a copy of its names and
# the original builtins, and are compiled with asserts enabled even if the interpreter was started with -O.
_HARNESS = """\
import builtins, json, os, sys


def main(source, imports, function):
    marker, payload = json.loads(sys.stdin.buffer.read().decode())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    write, exit_now, run, build, dumps = os.write, os._exit, exec, compile, json.dumps
    marker, result_fd = marker.encode(), os.dup(1)
    os.dup2(2, 1)
    sources = {"solution.py": source, "asserts.py": payload}
    original_builtins = dict(vars(builtins))
    solution_builtins = dict(original_builtins)
    module = sys.modules["solution"] = type(sys)("solution")
    names = module.__dict__
    names["__builtins__"] = solution_builtins
    try:
        for home, wanted in imports.items():
            found = __import__(home)
            for name in wanted:
                if name == home or hasattr(found, name):
                    solution_builtins[name] = found if name == home else getattr(found, name)
        run(build(source, "solution.py", "exec", 0, True, 0), names)
        if function:
            result = dumps(find(names, function)(*payload), default=to_list).encode()
        else:
            run(build(payload, "asserts.py", "exec", 0, True, 0), dict(names, __builtins__=original_builtins))
            result = b"true"
    except BaseException as error:
        try:
            report(error, sources)
        except MemoryError:
            write(2, b"\\nMemoryError\\n")
        finally:
            exit_now(1)
    result = marker + result + b"\\n"
    while result:
        result = result[write(result_fd, result):]
    exit_now(0)


def find(names, function):
    if hasattr(names.get("Solution"), function):
        return getattr(names["Solution"](), function)
    if function in names:
        return names[function]
    raise NameError("function %r is not defined, neither at the top level nor in a class Solution" % function)


def to_list(value):
    if type(value).__module__ == "numpy":
        return value.tolist()
    if not isinstance(value, (set, frozenset)):
        raise TypeError("the function returned a value of type %s, which is not JSON" % type(value).__name__)
    try:
        return sorted(value)
    except TypeError:
        return list(value)


def report(error, sources):
    import linecache, traceback

    for name, text in sources.items():
        if isinstance(text, str):
            linecache.cache[name] = len(text), None, [line + "\\n" for line in text.split("\\n")], name
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename not in sources:
        trace = trace.tb_next
    sys.stdout.flush()
    traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()


"""


@dataclass(frozen=True)
class HarnessRun:
    """The program for one test case, and its input."""

    code: str
    stdin: str
    marker: str
    """Text that precedes the result in stdout; empty for a program without a harness."""

    def result(self, stdout: str) -> str | None:
        """Return the result as JSON, `true` for asserts; None if the program did not reach its end."""
        _, found, result = stdout.rpartition(self.marker)
        return result[:-1] if found and result.endswith("\n") else None


class Harness:
    """The program around a solution.

    Args:
        solution: Source code of the solution.
        fn_name: Function to call, or None to run asserts.
    """

    def __init__(self, solution: str, fn_name: str | None = None) -> None:
        self.code = f"{_HARNESS}main({solution!a}, {_imports(solution)!r}, {fn_name!r})\n"

    def prepare(self, payload: Any) -> HarnessRun:
        """Return a run with a new marker.

        Args:
            payload: List of arguments of the function, or code with asserts.
        """
        marker = secrets.token_hex(16)
        return HarnessRun(self.code, json.dumps([marker, payload]), marker)


def _imports(source: str) -> dict[str, list[str]]:
    """Return module → names to import from it. The module's own name stands for the module itself."""
    wanted = defaultdict(list)
    for name in sorted(set(_IDENTIFIER.findall(source)) & _MODULE_BY_NAME.keys()):
        wanted[_MODULE_BY_NAME[name] or name].append(name)
    return dict(wanted)
