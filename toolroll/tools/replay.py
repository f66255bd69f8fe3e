"""Replay: a program that has the variables which earlier programs left. They are run again, unheard, before it.

This is how an interpreter seems to remember on a server that keeps none, such as SandboxFusion. The price is the time
of all earlier programs, and what was random or read from the clock comes out anew. The text is for Python 3.8 and
newer.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

_PROGRAM = """
def _replay(earlier, code, mark, name="main.py"):
    import ast, linecache, os, sys, traceback, types

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    kept, nowhere = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    for source in earlier:
        try:
            exec(compile(source, name, "exec"), main.__dict__)
        except BaseException:
            pass
    sys.stdout.flush(), sys.stderr.flush()
    os.dup2(kept[0], 1), os.dup2(kept[1], 2)
    os.write(1, mark.encode())
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    try:
        tree = ast.parse(code, name)
    except (SyntaxError, ValueError) as error:
        traceback.print_exception(type(error), error, None)
        sys.exit(1)
    last = tree.body[-1] if tree.body else None
    shown = []
    if isinstance(last, ast.Expr) and getattr(getattr(last.value, "func", None), "attr", "") != "write":
        line = code.encode().splitlines()[last.end_lineno - 1]
        if not line[last.end_col_offset:].lstrip().startswith(b";"):
            shown = [tree.body.pop()]
    try:
        exec(compile(tree, name, "exec"), main.__dict__)
        if shown:
            exec(compile(ast.Interactive(shown), name, "single"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__.tb_next)
        sys.exit(1)


_replay({earlier!a}, {code!a}, {mark!r})
"""


@dataclass(frozen=True)
class Replay:
    """The program `code` after the programs `earlier`."""

    earlier: Sequence[str]
    code: str
    mark: str = field(default_factory=lambda: f"<{secrets.token_hex(16)}>")
    """Written before anything of `code` is."""

    @property
    def program(self) -> str:
        """What to run."""
        return _PROGRAM.format(earlier=list(self.earlier), code=self.code, mark=self.mark)

    def said(self, stdout: str) -> str | None:
        """What `code` wrote; None if it was never reached, as one of those before it ended everything."""
        before, found, after = stdout.partition(self.mark)
        return before + after if found else None
