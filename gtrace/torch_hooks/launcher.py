"""Runs a user's training program in this process, as Python itself would run it.

``sys.argv``, ``sys.path``, ``__main__``, ``__file__``, relative imports, pickling, spawned workers and exit
codes are those of ``python SCRIPT`` and ``python -m MODULE``; tracebacks show the program's frames alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import pkgutil
import runpy
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from gtrace.errors import EXIT_INTERRUPTED, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Frames of these modules are between the interpreter and the program; tracebacks leave them out.
_MACHINERY = (
    "gtrace.torch_hooks",
    "gtrace.capture",
    "gtrace.cli",
    "gtrace.workflows",
    "runpy",
    "importlib._bootstrap",
    "importlib._bootstrap_external",
)


#: commands that people type before a script -> what to type here
_COMMANDS = {
    "python": "leave python out",
    "python3": "leave python3 out",
    "torchrun": "for torchrun write -m torch.distributed.run",
    "accelerate": "for accelerate write -m accelerate.commands.accelerate_cli",
}


@dataclass(frozen=True)
class Program:
    """What to run: a script (a file, or a folder or zip file with a ``__main__``) or a module; its arguments."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def argv(self) -> list[str]:
        """The arguments after ``python`` on a command line that runs it."""
        return ["-m", self.target, *self.args] if self.is_module else [self.target, *self.args]

    @property
    def called(self) -> str:
        """The program's name in messages."""
        return f"-m {self.target}" if self.is_module else self.target

    @property
    def stem(self) -> str:
        """A short name for files made from this program: ``train`` of ``runs/train.py`` or ``pkg.train``."""
        if self.is_module:
            return self.target.removesuffix(".__main__").rpartition(".")[2]
        path = os.path.abspath(self.target)
        return os.path.splitext(os.path.basename(path))[0]

    @property
    def folder(self) -> str:
        """The program's folder (for a module, the current folder)."""
        return os.getcwd() if self.is_module else os.path.dirname(os.path.abspath(self.target))

    def check(self) -> None:
        """Find errors that are visible before running anything.

        Raises:
            UsageError: the script does not exist.
        """
        if self.is_module or os.path.exists(self.target):
            return
        hint = ""
        if not self.target.endswith(".py") and os.path.exists(self.target + ".py"):
            hint = f"; did you mean {self.target}.py?"
        elif "." in self.target and os.path.exists(self.target.replace(".", os.sep) + ".py"):
            hint = f"; for a module write -m {self.target}"
        elif self.target in _COMMANDS:
            hint = f"; {_COMMANDS[self.target]}"
        elif (place := shutil.which(self.target)) is not None and os.sep not in self.target:
            hint = f"; it is a command: if it is written in Python, name its file, {place}"
        raise UsageError(f"{self.target}: no such script{hint}")


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        exit_code: the exit code as a shell sees it (0 to 255).
        interrupted: a KeyboardInterrupt ended the program.
    """

    exit_code: int = 0
    interrupted: bool = False


def run_program(program: Program) -> Outcome:
    """Run a program to its end; an uncaught exception is printed as Python prints it.

    Raises:
        UsageError: the script or module does not exist.
    """
    program.check()
    with _as_main_program(program):
        try:
            if program.is_module:
                runpy.run_module(program.target, run_name="__main__", alter_sys=True)
            elif pkgutil.get_importer(program.target) is not None:
                runpy.run_path(os.path.abspath(program.target), run_name="__main__")
            else:
                _run_script(program.target)
        except SystemExit as request:
            return Outcome(_exit_code(request))
        except KeyboardInterrupt:
            return Outcome(EXIT_INTERRUPTED, interrupted=True)
        except BaseException as error:  # noqa: BLE001 - whatever ends the program is its outcome, not ours
            hide_machinery(error)
            if isinstance(error, ImportError) and error.__traceback__ is None:
                raise UsageError(f"{'-m ' * program.is_module}{program.target}: {error}") from None
            sys.excepthook(type(error), error, error.__traceback__)
            return Outcome(1)
    return Outcome(0)


def _run_script(path: str) -> None:
    # Not runpy.run_path: that would make either sys.argv[0] absolute or __file__ relative, and the
    # interpreter does neither.
    full = os.path.join(os.getcwd(), path)  # not normalized: as the interpreter does it
    with io.open_code(full) as file:
        source = file.read()
    module = ModuleType("__main__")
    module.__file__ = full
    module.__loader__ = SourceFileLoader("__main__", full)
    vars(module).update(__builtins__=sys.modules["builtins"], __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(source, full, "exec", dont_inherit=True), vars(module))  # noqa: S102


@contextlib.contextmanager
def _as_main_program(program: Program) -> Iterator[None]:
    argv, path, main = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv = [program.target, *program.args]
    sys.path = list(path)
    if not sys.flags.safe_path:
        # The first entry is ours (the folder of the command gtrace); the program expects its own there.
        sys.path[:1] = _path_entries(program)
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
        sys.modules["__main__"] = main


def _path_entries(program: Program) -> list[str]:
    if program.is_module:
        return [os.getcwd()]
    if pkgutil.get_importer(program.target) is not None:
        return []  # runpy puts the folder or zip file there
    return [os.path.dirname(os.path.realpath(program.target))]


def _exit_code(request: SystemExit) -> int:
    code = request.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def hide_machinery(error: BaseException) -> None:
    """Drop the frames of the launcher and the hooks from an exception and its chained ones."""
    pending, seen = [error], set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_machinery(one.__traceback__)
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions


def _without_machinery(traceback: TracebackType | None) -> TracebackType | None:
    frames = []
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__") or ""
        if not any(name == ours or name.startswith(ours + ".") for ours in _MACHINERY):
            frames.append(traceback)
        traceback = traceback.tb_next
    clean = None
    for entry in reversed(frames):
        clean = TracebackType(clean, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return clean
