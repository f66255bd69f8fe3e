"""IPython's shell for cells: without files, threads, colours and a terminal; what it shows goes to the cells' answer.

IPython is imported only where cells are run. Its names differ from version to version; those used here are in 8.20
and in all of 9.
"""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
from codecs import getincrementaldecoder
from typing import TYPE_CHECKING, Any, NoReturn

from toolroll.sandbox.server import program, reserve

if TYPE_CHECKING:
    from toolroll.sandbox.server.cells import Cells


def new_shell(cells: Cells) -> Any:
    """IPython's shell, without files, threads and colours, and with `cells` for what it shows."""
    import asyncio  # noqa: F401 (for cells that await)

    from IPython.core import interactiveshell, page
    from IPython.core.autocall import ExitAutocall
    from IPython.core.profiledir import ProfileDir
    from traitlets.config import Config

    class Exit(ExitAutocall):
        def __call__(self, code: object = None) -> NoReturn:
            raise SystemExit(code)

    vars(interactiveshell)["PickleShareDB"] = lambda _: {}  # before 9.10 it is made at once, and is a directory
    interactiveshell.InteractiveShell.clear_instance()
    shell = _shell_class(cells).instance(
        config=Config({"HistoryManager": {"enabled": False, "hist_file": ":memory:"}}),
        ipython_dir="",
        profile_dir=ProfileDir(),
        colors="nocolor",
        loop_runner=cells.run_coroutine,
        exiter=Exit(),  # type: ignore[no-untyped-call]
    )
    shell.db = {}
    shell.ast_transformers.append(_Unshown())
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 99)  # type: ignore[no-untyped-call]
    return shell


class _Unshown(ast.NodeTransformer):
    """Keeps the value of a last `….write(…)` from being shown."""

    def visit_Module(self, module: ast.Module) -> ast.Module:
        if module.body and program.writes(last := module.body[-1]):
            assert isinstance(last, ast.Expr)
            unshown = ast.Assign([ast.Name("_", ast.Store())], last.value)
            module.body[-1] = ast.fix_missing_locations(ast.copy_location(unshown, last))
        return module


def _shell_class(cells: Cells) -> Any:
    """The class of that shell. Made here, since its bases are imported late."""
    from IPython.core.interactiveshell import InteractiveShell

    hook, publisher, compiler = _part_classes(cells)

    class Shell(InteractiveShell):
        displayhook_class = hook
        display_pub_class = publisher
        compiler_class = compiler

        def should_run_async(self, *arguments: Any, **options: Any) -> bool:
            with contextlib.suppress(Exception):  # code that can't be compiled, which will be reported in its place
                return bool(super().should_run_async(*arguments, **options))
            return False

        async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
            kept = reserve.keep()
            try:
                if cells.interrupted:
                    raise KeyboardInterrupt
                if async_:
                    await eval(code_obj, self.user_global_ns, self.user_ns)  # noqa: S307
                else:
                    exec(code_obj, self.user_global_ns, self.user_ns)  # noqa: S102
            except BaseException as error:  # whatever it is, it ends the cell
                if kept:  # else this is a cell within a cell
                    reserve.use()
                sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
                if result is not None:
                    result.error_in_exec = error
                return True
            if kept:
                reserve.use()
            return False

        def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
            error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
            cells.show(getattr(sys, "last_value", None) if error is None else error)

        def showsyntaxerror(self, *_: Any, **__: Any) -> None:
            self.showtraceback()

        def system(self, cmd: str) -> None:
            self.user_ns["_exit_code"] = _system(self.var_expand(cmd, depth=1))  # type: ignore[no-untyped-call]

        def init_virtualenv(self) -> None: ...  # would change sys.path
        def enable_gui(self, gui: Any = None) -> None: ...

        # Both would keep, for the magic %notebook, all that was ever written.
        _tee: Any = staticmethod(lambda **_: contextlib.nullcontext())
        _format_exception_for_storage: Any = staticmethod(lambda *_, **__: {})

    return Shell


def _part_classes(cells: Cells) -> tuple[Any, Any, Any]:
    from IPython.core.compilerop import CachingCompiler
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher

    class Hook(DisplayHook):
        def write_output_prompt(self) -> None: ...
        def log_output(self, format_dict: Any) -> None: ...
        def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
            cells.display(format_dict)

        def finish_displayhook(self) -> None:
            self._is_active = False

    class Publisher(DisplayPublisher):
        def clear_output(self, wait: bool = False) -> None: ...
        def publish(self, data: Any, *_: Any, update: bool = False, **__: Any) -> None:
            if not update:  # of what was displayed before: to a kernel's client that is another kind of message
                cells.display(data)

    class Compiler(CachingCompiler):
        def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
            return f"<cell {number}>"

    return Hook, Publisher, Compiler


def _system(command: str) -> int:
    """Run a command of a cell. IPython itself would need a terminal device for it, and a jail has none."""
    if command.rstrip().endswith("&"):
        raise OSError("Background processes not supported.")
    decoder = getincrementaldecoder("utf-8")("replace")
    try:
        process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # noqa: S602
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 127
    with process:
        try:
            assert process.stdout
            while block := process.stdout.read1():  # type: ignore[attr-defined]
                sys.stdout.write(decoder.decode(block))
        except BaseException:
            process.kill()
            raise
    return process.returncode if process.returncode <= 128 else 128 - process.returncode
