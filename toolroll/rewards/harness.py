"""The Python program around a solution whose function is called, or behind which asserts are put.

    run = Harness("def add(a, b): return a + b", "add").begin([3, 4])
    execution, _ = await runner.run(run.code, stdin=run.stdin, run_timeout=10)
    run.said(execution.stdout)  # "7": what the function returned, as JSON; None if it never did

What holds for both:

- The solution is a module of its own, called `solution`: its `if __name__ == "__main__":` isn't run, its `from
  __future__` holds, and tracebacks show its own lines by its own numbers.
- What it prints goes to stderr, at the level of descriptors. What counts comes back on stdout, behind a marker that is
  new for each run. It travels in stdin with the arguments or the asserts, and is in no file.
- Whatever ends the solution early is a failure, however it ends: an exception, `sys.exit(0)`, `os._exit(0)`. Only what
  reaches the end of the harness comes behind the marker, and nothing of the solution runs after that, no `atexit`.
- Names that data sets' solutions use without importing them (`List`, `defaultdict`, `heapq`, `inf`, …) are imported, if
  they occur in the source. They are the solution's builtins, not its own names: `gcd` isn't solved by mentioning it.

A call is proof against a program that cheats: what was expected isn't there, neither in the program nor in its memory,
and what leaves is JSON, which is compared outside. To be told right, a program must say the right value.

Asserts are not. They run in the solution's own process and judge its own objects, so a determined program can pass
without doing the work: by an object that is equal to everything, by replacing what the asserts call, by searching the
interpreter's frames for the marker or for the asserts and what they expect. None of that happens by accident, but a
policy may find it. Where the choice exists, use calls or stdin and stdout.

The harness runs on any Python from 3.8 on. It imports `json`, and else only what every interpreter has imported.
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
}
_MODULES = (
    "bisect collections copy datetime decimal functools heapq itertools json math operator random re statistics string "
    "sys time typing"
)
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_MODULE_OF |= dict.fromkeys(_MODULES.split(), "")
"""A name → the module that has it; nothing for one that is a module itself. None of them hides a builtin."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")

# What the solution could put something else in the place of is taken in hand before it runs. Asserts see a copy of its
# names, and builtins as they were; they are compiled as asserts, however the interpreter was started.
_HARNESS = """\
import builtins, json, os, sys


def main(source, imports, function):
    marker, job = json.loads(sys.stdin.buffer.read().decode())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    write, leave, run, build, dumps = os.write, os._exit, exec, compile, json.dumps
    marker, back = marker.encode(), os.dup(1)
    os.dup2(2, 1)
    sources = {"solution.py": source, "asserts.py": job}
    plain = dict(vars(builtins))
    known = dict(plain)
    module = sys.modules["solution"] = type(sys)("solution")
    names = module.__dict__
    names["__builtins__"] = known
    try:
        for home, wanted in imports.items():
            found = __import__(home)
            for name in wanted:
                if name == home or hasattr(found, name):
                    known[name] = found if name == home else getattr(found, name)
        run(build(source, "solution.py", "exec", 0, True, 0), names)
        if function:
            answer = dumps(find(names, function)(*job), default=listed).encode()
        else:
            run(build(job, "asserts.py", "exec", 0, True, 0), dict(names, __builtins__=plain))
            answer = b"true"
    except BaseException as error:
        try:
            report(error, sources)
        except MemoryError:
            write(2, b"\\nMemoryError\\n")
        finally:
            leave(1)
    answer = marker + answer + b"\\n"
    while answer:
        answer = answer[write(back, answer):]
    leave(0)


def find(names, function):
    if hasattr(names.get("Solution"), function):
        return getattr(names["Solution"](), function)
    if function in names:
        return names[function]
    raise NameError("there is no function %r, at the top level or in a class Solution" % function)


def listed(value):
    if type(value).__module__ == "numpy":
        return value.tolist()
    if not isinstance(value, (set, frozenset)):
        raise TypeError("it returned a %s, which JSON has no word for" % type(value).__name__)
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
class Run:
    """One run of a harness."""

    code: str
    stdin: str
    marker: str

    def said(self, stdout: str) -> str | None:
        """What came back, as JSON; `true` for asserts. None where the end was never reached."""
        _, found, answer = stdout.rpartition(self.marker)
        return answer[:-1] if found and answer.endswith("\n") else None


class Harness:
    """The program around a solution: for calls of a function of it, or where none is named for asserts."""

    def __init__(self, solution: str, fn_name: str | None = None) -> None:
        imports = _imports(solution)
        self.code = f"{_HARNESS}main({solution!a}, {imports!r}, {fn_name!r})\n"

    def begin(self, job: Any) -> Run:
        """A run with these arguments, in a list, or with this code of asserts."""
        marker = secrets.token_hex(16)
        return Run(self.code, json.dumps([marker, job]), marker)


def _imports(source: str) -> dict[str, list[str]]:
    """Module → the names that are wanted of it; its own name stands for itself."""
    wanted = defaultdict(list)
    for name in sorted(set(_WORD.findall(source)) & _MODULE_OF.keys()):
        wanted[_MODULE_OF[name] or name].append(name)
    return dict(wanted)
