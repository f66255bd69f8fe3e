"""Create an IPython shell without files, threads, colours and a terminal, whose output goes to the notebook kernel.

IPython is imported only in zygotes that run cells. Its internals differ between versions; the names used here exist in
8.20 and in all of 9.
"""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from codecs import getincrementaldecoder
from collections.abc import Coroutine
from typing import Any, NoReturn, Protocol

from toolroll.sandbox.server.interpreter import script_runner
from toolroll.sandbox.server.isolation import memory_headroom

_MAY_BE_IPYTHON_SYNTAX = re.compile(r"[%!?]|^\s*[,;/]")


class ShellOwner(Protocol):
    """The notebook kernel, as the shell needs it."""

    interrupted: bool
    """True if SIGINT arrived while code of IPython ran. The cell is then interrupted as soon as its code runs."""

    def display(self, data: object) -> None:
        """Add an output of the cell: MIME type → content."""

    def show_exception(self, error: BaseException | None) -> None:
        """Handle an exception that IPython would print."""

    def run_coroutine(self, cell: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell that awaits."""


def create_shell(kernel: ShellOwner) -> Any:
    """Return a shell that sends its output to `kernel`."""
    import asyncio  # noqa: F401 (used by cells that await)

    from IPython.core import interactiveshell, page
    from IPython.core.autocall import ExitAutocall
    from IPython.core.profiledir import ProfileDir
    from traitlets.config import Config

    class CellExiter(ExitAutocall):
        def __call__(self, code: object = None) -> NoReturn:
            raise SystemExit(code)

    vars(interactiveshell)["PickleShareDB"] = lambda _: {}  # before 9.10, the shell creates a directory for it
    interactiveshell.InteractiveShell.clear_instance()
    shell = _shell_class(kernel).instance(
        config=Config({"HistoryManager": {"enabled": False, "hist_file": ":memory:"}}),
        ipython_dir="",
        profile_dir=ProfileDir(),
        colors="nocolor",
        loop_runner=kernel.run_coroutine,
        exiter=CellExiter(),  # type: ignore[no-untyped-call]
    )
    shell.db = {}
    _skip_needless_tokenizing(shell.input_transformer_manager)
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 99)  # type: ignore[no-untyped-call]
    return shell


def _skip_needless_tokenizing(manager: Any) -> None:
    """Tokenize only cells that may contain syntax of IPython: with `%`, `!`, `?`, or a line that starts with `,;/`."""
    transform, transformers = manager.do_token_transforms, list(manager.token_transformers)

    def transform_if_needed(lines: list[str]) -> Any:
        is_plain = not any(_MAY_BE_IPYTHON_SYNTAX.search(line) for line in lines)
        return lines if is_plain and manager.token_transformers == transformers else transform(lines)

    manager.do_token_transforms = transform_if_needed


def _silence_write_call(module: ast.Module) -> None:
    """Prevent the value of a last `….write(…)` from being displayed."""
    if module.body and script_runner.is_write_call(last := module.body[-1]):
        assert isinstance(last, ast.Expr)
        assignment = ast.Assign([ast.Name("_", ast.Store())], last.value)
        module.body[-1] = ast.fix_missing_locations(ast.copy_location(assignment, last))


def _shell_class(kernel: ShellOwner) -> Any:
    from IPython.core.interactiveshell import InteractiveShell

    display_hook, display_publisher, compiler = _component_classes(kernel)

    class CellShell(InteractiveShell):
        displayhook_class = display_hook
        display_pub_class = display_publisher
        compiler_class = compiler

        def transform_ast(self, node: Any) -> Any:
            if isinstance(node, ast.Module):
                _silence_write_call(node)
            return super().transform_ast(node)  # type: ignore[no-untyped-call]

        def should_run_async(self, raw_cell: str, *, transformed_cell: str | None = None, **options: Any) -> bool:
            code = raw_cell if transformed_cell is None else transformed_cell
            if "await" not in code and "async" not in code:  # saves compiling it
                return False
            with contextlib.suppress(Exception):  # invalid code is reported when it is compiled
                return bool(super().should_run_async(raw_cell, transformed_cell=transformed_cell, **options))
            return False

        async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
            is_outermost = memory_headroom.reserve()  # False for a cell that is run by code of a cell
            try:
                if kernel.interrupted:
                    raise KeyboardInterrupt
                if async_:
                    await eval(code_obj, self.user_global_ns, self.user_ns)  # noqa: S307
                else:
                    exec(code_obj, self.user_global_ns, self.user_ns)  # noqa: S102
            except BaseException as error:  # any exception ends the cell
                if is_outermost:
                    memory_headroom.release()
                sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
                if result is not None:
                    result.error_in_exec = error
                return True
            if is_outermost:
                memory_headroom.release()
            return False

        def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
            error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
            kernel.show_exception(getattr(sys, "last_value", None) if error is None else error)

        def showsyntaxerror(self, *_: Any, **__: Any) -> None:
            self.showtraceback()

        def system(self, cmd: str) -> None:
            self.user_ns["_exit_code"] = _run_command(self.var_expand(cmd, depth=1))  # type: ignore[no-untyped-call]

        def init_virtualenv(self) -> None: ...  # would change sys.path
        def enable_gui(self, gui: Any = None) -> None: ...

        # Both would keep all output in memory, for the magic %notebook.
        _tee: Any = staticmethod(lambda **_: contextlib.nullcontext())
        _format_exception_for_storage: Any = staticmethod(lambda *_, **__: {})

    return CellShell


def _component_classes(kernel: ShellOwner) -> tuple[Any, Any, Any]:
    from IPython.core.compilerop import CachingCompiler
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher

    class CellDisplayHook(DisplayHook):
        def write_output_prompt(self) -> None: ...
        def log_output(self, format_dict: Any) -> None: ...
        def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
            kernel.display(format_dict)

        def finish_displayhook(self) -> None:
            self._is_active = False

    class CellDisplayPublisher(DisplayPublisher):
        def clear_output(self, wait: bool = False) -> None: ...
        def publish(self, data: Any, *_: Any, update: bool = False, **__: Any) -> None:
            if not update:  # updates of an earlier display are another kind of message in Jupyter
                kernel.display(data)

    class CellCompiler(CachingCompiler):
        def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
            return f"<cell {number}>"

    return CellDisplayHook, CellDisplayPublisher, CellCompiler


def _run_command(command: str) -> int:
    """Run a shell command of a cell. IPython's implementation needs a terminal device, which a jail lacks."""
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
