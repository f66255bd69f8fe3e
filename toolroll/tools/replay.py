"""A program that has the variables which earlier programs left: they are run again, unheard, before it.

This is how an interpreter seems to remember on a server that keeps none, such as SandboxFusion. The price is the time
of all earlier programs, and what was random or read from the clock comes out anew. The text is for Python 3.8 and
newer.
"""

from __future__ import annotations

from collections.abc import Sequence

_PROGRAM = """
def _replay(earlier, code, name="main.py"):
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
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    try:
        tree = ast.parse(code, name)
    except (SyntaxError, ValueError) as error:
        traceback.print_exception(type(error), error, None)
        sys.exit(1)
    shown = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    try:
        exec(compile(tree, name, "exec"), main.__dict__)
        if shown:
            exec(compile(ast.Interactive(shown), name, "single"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__.tb_next)
        sys.exit(1)


_replay({earlier!r}, {code!r})
"""


def replaying(earlier: Sequence[str], code: str) -> str:
    """The program `code` after the programs `earlier`."""
    return _PROGRAM.format(earlier=list(earlier), code=code)
