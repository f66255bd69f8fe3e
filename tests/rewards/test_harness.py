"""A solution passes only if its function returns the expected value or its asserts hold."""

import ast
import re
import subprocess
import sys
from typing import Any

import pytest

from toolroll.rewards.cases import AssertCase, CallCase, Case, Cases
from toolroll.rewards.grader import CaseResult, CodeGrader, GraderSettings, Verdict
from toolroll.rewards.harness import Harness

pytestmark = pytest.mark.sandbox


@pytest.fixture
def grader(sandbox_url: str) -> CodeGrader:
    return CodeGrader(GraderSettings(sandbox_fusion_url=sandbox_url, continuous=True, timeout=5))


async def result(grader: CodeGrader, solution: str, case: Case, timeout: float | None = None) -> CaseResult:
    return (await grader.grade(solution, Cases((case,), timeout=timeout))).cases[0]


async def returned(grader: CodeGrader, solution: str, *arguments: Any, expected: Any) -> CaseResult:
    """Return the result of a call of `f`."""
    return await result(grader, solution, CallCase("f", arguments, expected))


async def asserted(grader: CodeGrader, solution: str, asserts: str) -> CaseResult:
    return await result(grader, solution, AssertCase(asserts))


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("def f(a, b): return a + b", 7),
        ("class Solution:\n    def f(self, a, b): return a * b", 12),
        ("class Solution:\n    @staticmethod\n    def f(a, b): return a - b", -1),
        ("f = lambda a, b: [a, (b, None)]", [3, [4, None]]),
        ("def f(a, b): return {b, a, 1}", [1, 3, 4]),
        ("def f(a, b): return {a: {'x': 1.5}, True: 'é'}", {"3": {"x": 1.5}, "true": "é"}),
        ("def f(a, b): return float('inf')", float("inf")),
        ("def f(a, b): return '\\ud800'", "\ud800"),
        ("def f(a, b): pass", None),
        ("from __future__ import annotations\ndef f(a: Nothing, b) -> Nowhere: return a", 3),
        ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: 'int'\ndef f(a, b): return P(a).x", 3),
        ("def f(a, b): return 1\nif __name__ == '__main__':\n    raise ValueError(input())", 1),
        ("import pickle\nclass P: pass\ndef f(a, b): return bool(pickle.loads(pickle.dumps(P())))", True),
    ],
)
async def test_return_value_is_compared(grader: CodeGrader, solution: str, expected: Any) -> None:
    assert (await returned(grader, solution, 3, 4, expected=expected)).verdict is Verdict.PASSED


async def test_arguments_are_passed_unchanged(grader: CodeGrader) -> None:
    arguments = [1, 2.5, None, True, "é\n\"'\\", [[1], {"a": []}], 10**30, "\ud800"]
    solution = "def f(*arguments): return arguments"
    assert (await returned(grader, solution, *arguments, expected=arguments)).verdict is Verdict.PASSED


async def test_printed_output_does_not_matter(grader: CodeGrader) -> None:
    solution = """
import os, sys, subprocess
print("at the top")
def f():
    print("[1]"); sys.stdout.write("2"); os.write(1, b"3\\n"); subprocess.run(["echo", "4"])
    sys.stdout = None
    return 5
"""
    assert (await returned(grader, solution, expected=5)).verdict is Verdict.PASSED


async def test_common_names_are_imported(grader: CodeGrader) -> None:
    solution = """
class Solution:
    @lru_cache(None)
    def twice(self, x: Optional[int]) -> int:
        return 2 * x

    def f(self, nums: List[int]) -> Dict[str, int]:
        counts, queue = defaultdict(int), deque(nums)
        while queue:
            counts[heapq.nlargest(1, [queue.popleft()])[0]] += 1
        at = bisect.bisect_left(nums, 2) + bisect_left(nums, 2)
        return [math.inf > 3, -inf < 0, pow(2, 5, 7), at, self.twice(4), counts, copy.deepcopy(nums), gcd(4, 6)]
"""
    expected = [True, True, 4, 2, 8, {"1": 1, "2": 1}, [1, 2], 2]
    found = await returned(grader, solution, [1, 2], expected=expected)
    assert found.verdict is Verdict.PASSED, found.detail


async def test_function_must_be_defined_by_the_solution(grader: CodeGrader) -> None:
    assert (await result(grader, "# gcd", CallCase("gcd", (4, 6), 2))).verdict is Verdict.FAILED
    own = "class Solution:\n    def gcd(self, a, b): return 'own'"
    assert (await result(grader, own, CallCase("gcd", (4, 6), "own"))).verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        ("def f():\n    raise ValueError('no')", "ValueError: no"),
        ("def f(): return g()", "NameError: name 'g' is not defined"),
        ("def g(): return None", "function 'f' is not defined"),
        ("f = None", "'NoneType' object is not callable"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("def f(): return object()", "returned a value of type object, which is not JSON"),
        ("def f(): return {(1, 2): 3}", "keys must be str, int, float, bool or None, not tuple"),
        ("def f(): return f()", "RecursionError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("def f(): raise SystemExit", "SystemExit"),
        ("def f(): raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os\ndef f(): os._exit(0)", "the program ended before f had returned"),
        ("import os, signal\ndef f(): os.kill(os.getpid(), signal.SIGKILL)", "return code -9"),
        ("x = '\ud800'", "surrogates not allowed"),
        ("x = '\0'", "null bytes"),
    ],
)
async def test_function_that_does_not_return_fails(grader: CodeGrader, solution: str, message: str) -> None:
    """Regression: a raising function passed if null was expected, because it printed nothing."""
    found = await returned(grader, solution, expected=None)
    assert found.verdict is Verdict.FAILED
    assert message in found.detail


async def test_endless_loop_times_out(grader: CodeGrader) -> None:
    found = await result(grader, "def f():\n    while True: pass", CallCase("f", (), None), timeout=0.5)
    assert found.verdict is Verdict.TIMEOUT
    found = await result(grader, "while True: pass", AssertCase("assert True"), timeout=0.5)
    assert found.verdict is Verdict.TIMEOUT


async def test_endless_recursion_without_a_limit_fails(grader: CodeGrader) -> None:
    found = await returned(grader, "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()", expected=None)
    # Python takes long to unwind millions of frames without memory.
    assert found.verdict in (Verdict.FAILED, Verdict.OUT_OF_MEMORY, Verdict.TIMEOUT)


async def test_tracebacks_show_lines_of_the_solution(grader: CodeGrader) -> None:
    found = await returned(grader, "import math\n\ndef f():\n    return math.nothing", expected=1)
    assert 'File "solution.py", line 4, in f\n    return math.nothing' in found.detail
    assert "main.py" not in found.detail


CHEATS = {
    "prints it": "print('7')\nprint('[7]')\ndef f(): return 0",
    "prints it after a forged marker": "print('0' * 32 + '7')\ndef f(): return 0",
    "writes it to every descriptor": """
import os
def f():
    for fd in range(20):
        try: os.write(fd, b'7\\n' + b'0123456789abcdef' * 2 + b'7\\n')
        except OSError: pass
    return 0
""",
    "is equal to everything": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def f(): return Equal(0)
""",
    "overrides json": "import json\njson.dumps = lambda *a, **k: '0'\njson.loads = None\ndef f(): return 0",
    "overrides builtins": """
import builtins
for name in ("print", "len", "isinstance", "exec", "compile", "hasattr", "getattr", "sorted", "str", "bytes"):
    setattr(builtins, name, lambda *a, **k: 7)
def f(): return 0
""",
    "reads its own source": """
import re, sys, glob
seen = "".join(open(name).read() for name in glob.glob("*") + [sys.argv[0]])
def f(): return max(map(int, re.findall("[0-9]+", seen)), default=0)
""",
    "looks for it in memory": """
import gc, sys
def f():
    frame, seen = sys._getframe(), []
    while frame:
        seen += list(frame.f_locals.values()) + list(frame.f_globals.values())
        frame = frame.f_back
    return [x for x in seen + gc.get_objects() if type(x) is int and x == 123454321] or 0
""",
    "registers atexit": "import atexit, os\natexit.register(lambda: (print(7), os._exit(0)))\ndef f(): return 0",
    "exits": "import sys\nprint(7)\nsys.exit(0)",
    "exits at once": "import os\nos.write(1, b'7\\n')\nos._exit(0)",
    "reads stdin": "import sys\nseen = sys.stdin.read()\ndef f(): return seen",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_program_cannot_forge_a_value(grader: CodeGrader, cheat: str) -> None:
    expected = 123454321 if "memory" in cheat else 7
    found = await returned(grader, CHEATS[cheat], expected=expected)
    assert found.verdict in (Verdict.WRONG, Verdict.FAILED), found


async def test_expected_value_is_not_sent_to_the_sandbox(grader: CodeGrader, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    run = grader.sandbox.run

    async def recorded(code: str, *arguments: Any, **options: Any) -> Any:
        sent.append(f"{code} {arguments} {options}")
        return await run(code, *arguments, **options)

    monkeypatch.setattr(grader.sandbox, "run", recorded)
    found = await returned(grader, "def f(a): return 'guess'", 1, expected="the secret value")
    assert found.verdict is Verdict.WRONG
    assert len(sent) == 1
    assert "secret" not in sent[0]


async def test_asserts_pass_or_fail(grader: CodeGrader) -> None:
    solution = "def f(x): return x * 2"
    assert (await asserted(grader, solution, "assert f(2) == 4\nassert f('a') == 'aa'")).verdict is Verdict.PASSED
    found = await asserted(grader, solution, "assert f(2) == 4\nassert f(2) == 5, 'not five'")
    assert found.verdict is Verdict.FAILED
    assert 'File "asserts.py", line 2' in found.detail
    assert "AssertionError: not five" in found.detail


async def test_asserts_do_not_see_imports_of_the_harness(grader: CodeGrader) -> None:
    counted = "def f(x): return Counter(x)['a']"
    assert (await asserted(grader, counted, "assert f('aab') == 2")).verdict is Verdict.PASSED
    assert (await asserted(grader, "# factorial", "assert factorial(3) == 6")).verdict is Verdict.FAILED
    patched = "import builtins\nbuiltins.abs = lambda x: 0\ndef f(): return 9"
    assert (await asserted(grader, patched, "assert abs(f() - 1) < 1e-6")).verdict is Verdict.FAILED


@pytest.mark.parametrize(
    "solution",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "print('true')\nraise SystemExit(0)",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import atexit, os\natexit.register(print, 'true')\nos.write(1, b'true\\n')",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None",
        "import builtins\nbuiltins.AssertionError = None",
        "import os, json\nos.write = os._exit = json.dumps = lambda *a, **k: 0",
        "import sys\nsys.excepthook = lambda *a: None\nsys.stdin = sys.stdout = sys.stderr = None",
        "def f():\n    import os\n    os._exit(0)",
        "class Equal(AssertionError): pass\nAssertionError = Equal",
    ],
)
async def test_solution_that_ends_before_asserts_fails(grader: CodeGrader, solution: str) -> None:
    assert (await asserted(grader, solution, "f()\nassert False")).verdict is Verdict.FAILED
    assert (await asserted(grader, solution, "assert False")).verdict is Verdict.FAILED


@pytest.mark.process
async def test_asserts_run_in_an_optimizing_interpreter() -> None:
    run = Harness("def f(): return 1").prepare("assert f() == 2")
    done = subprocess.run([sys.executable, "-OO", "-c", run.code], input=run.stdin, capture_output=True, text=True)
    assert run.result(done.stdout) is None
    assert done.returncode == 1


def test_truncated_output_has_no_result() -> None:
    run = Harness("def f(): return 1", "f").prepare([])
    assert run.result("") is None
    assert run.result(f"{run.marker}12") is None
    assert run.result(f"{run.marker}12\n") == "12"
    assert run.marker not in run.code
    assert run.marker != Harness("def f(): return 1", "f").prepare([]).marker


def test_harness_is_valid_python_3_8() -> None:
    code = Harness("def f(x: List[int]): return pairwise(x)", "f").code
    ast.parse(code, feature_version=(3, 8))
    imported = re.findall(r"^\s*import (.*)$", code, re.MULTILINE)
    assert imported == ["builtins, json, os, sys", "linecache, traceback"]


@pytest.mark.process
def test_name_missing_in_this_python_is_skipped() -> None:
    run = Harness("def f(x): return [x, 'nothing' in globals()]", "f").prepare([1])
    code = run.code.replace("{}, 'f'", "{'math': ['nothing', 'math']}, 'f'")
    assert code != run.code
    done = subprocess.run([sys.executable, "-c", code], input=run.stdin, capture_output=True, text=True)
    assert run.result(done.stdout) == "[1, false]"


async def test_stdin_cannot_be_read_twice(grader: CodeGrader) -> None:
    cheat = (
        "import os\nos.lseek(0, 0, 0)\ntext = os.read(0, 10_000).decode()\n"
        "mark = text.split('\"')[1] if '\"' in text else ''\n"
        "for fd in range(3, 20):\n    try: os.write(fd, (mark + 'true\\n').encode())\n    except OSError: pass\n"
        "os._exit(0)"
    )
    assert (await asserted(grader, cheat, "assert f() == 1")).verdict == "failed"


async def test_method_takes_precedence_over_imported_name(grader: CodeGrader) -> None:
    solution = "from math import *\nclass Solution:\n    def f(self, n): return n + 4\nf = factorial"
    assert (await returned(grader, solution, 3, expected=7)).verdict == "passed"


async def test_numpy_values_are_converted(grader: CodeGrader) -> None:
    solution = "import numpy as np\ndef f(): return [np.int64(7), np.float64(0.5), np.bool_(True), np.array([1, 2])]"
    assert (await returned(grader, solution, expected=[7, 0.5, True, [1, 2]])).verdict == "passed"
