"""Runs a user's training program in this process, as Python itself would run it.

``sys.argv``, ``sys.path``, ``__main__``, ``__file__``, relative imports, pickling, spawned workers and exit
codes are those of ``python SCRIPT``, ``python -m MODULE`` and ``python -c CODE``, or those of an installed console
command; tracebacks show the program's frames alone.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import sys
import threading
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from gtrace.errors import EXIT_INTERRUPTED, UsageError
from gtrace.torch_hooks.processes import threads_ended

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


#: how much of a command's file says what runs it: its first line, or the second one for a long path
_HEAD = 1024
#: how files end that gtrace writes: Python would run their text as a program
_NOT_PROGRAMS = (".zarr", ".h5", ".hdf5", ".db", ".jsonl", ".toml", ".html")


@dataclass(frozen=True)
class Program:
    """What to run: a script (a file, or a folder or zip file with a ``__main__``), an installed console command, a
    module, or code; its arguments.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    is_code: bool = False

    @property
    def argv(self) -> list[str]:
        """The arguments after ``python`` on a command line that runs it; a command begins with its name."""
        return [*self._flag, self.target, *self.args]

    @property
    def called(self) -> str:
        """The program's name in messages."""
        return "-c" if self.is_code else " ".join((*self._flag, self.target))

    @property
    def _flag(self) -> list[str]:
        return ["-m"] if self.is_module else ["-c"] if self.is_code else []

    @property
    def stem(self) -> str:
        """A short name for files made from this program: ``train`` of ``runs/train.py`` or ``pkg.train``."""
        if self.is_code:
            return "run"
        if self.is_module:
            return self.target.removesuffix(".__main__").rpartition(".")[2]
        path = os.path.abspath(self.target)
        return os.path.splitext(os.path.basename(path))[0]

    @property
    def folder(self) -> str:
        """The program's folder (for a module, a command or code, the current folder)."""
        if self.is_module or self.is_code or self.file != self.target:
            return os.getcwd()
        return os.path.dirname(os.path.abspath(self.target))

    @functools.cached_property
    def file(self) -> str:
        """The script: the target itself, or the file of the command that a shell would find; UsageError without."""
        if os.path.isfile(self.target) or os.path.exists(os.path.join(self.target, "__main__.py")):
            return self.target
        place = None if os.sep in self.target else shutil.which(self.target)
        if place is not None:
            _check_command(self.target, place)
            return place
        if os.path.exists(self.target):
            return self.target
        hint = ""
        if not self.target.endswith(".py") and os.path.exists(self.target + ".py"):
            hint = f"; did you mean {self.target}.py?"
        elif "." in self.target and os.path.exists(self.target.replace(".", os.sep) + ".py"):
            hint = f"; for a module write -m {self.target}"
        raise UsageError(f"{self.target}: no such script{hint}")

    def check(self) -> None:
        """UsageError, before anything runs, if there is no such script or command, or this Python does not run it."""
        if self.is_module or self.is_code:
            return
        if self.file.endswith(_NOT_PROGRAMS):
            raise UsageError(f"{self.target}: is not a Python script; write the script that trains")
        if os.path.isdir(self.file) and not os.path.exists(os.path.join(self.file, "__main__.py")):
            raise UsageError(f"{self.target}: is a folder without a __main__.py; write the script that trains")


def _check_command(name: str, place: str) -> None:
    """Raise UsageError for a command that is not a script of this Python, or of another one with the same packages."""
    runs_with = _interpreter(place)
    if runs_with is None or not re.fullmatch(r"(python|pypy)[\d.]*", os.path.basename(runs_with)):
        if re.fullmatch(r"python[\d.]*", name):
            raise UsageError(f"{name}: leave {name} out; write the script, -m MODULE or -c CODE")
        raise UsageError(f"{name}: {place} is not a Python script; write the script or -m MODULE that it starts")
    # Not the file behind links: every virtual environment links the same one.
    prefix = os.path.dirname(os.path.realpath(os.path.dirname(runs_with)))
    if prefix not in (os.path.realpath(sys.prefix), os.path.dirname(os.path.realpath(os.path.dirname(sys.executable)))):
        raise UsageError(
            f"{name}: {place} runs with {runs_with}, and gtrace with {sys.executable}; install both in one environment"
        )


def _interpreter(place: str) -> str | None:
    """The program that runs a script, by its first line; None for a file without such a line."""
    try:
        with open(place, "rb") as file:
            lines = file.read(_HEAD).decode(errors="replace").splitlines()
        words = shlex.split(lines[0].removeprefix("#!")) if lines and lines[0].startswith("#!") else []
        if len(lines) > 1 and lines[1].startswith("'''exec' "):
            # Installers write this where a path is too long, or has blanks, for the first line.
            words = shlex.split(lines[1])[1:]
    except (OSError, ValueError):
        return None
    if words and os.path.basename(words[0]) == "env":
        named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return shutil.which(named[0]) if named else None
    return words[0] if words else None


@dataclass(frozen=True)
class Outcome:
    """How a program ended: its exit code as a shell sees it (0 to 255), and whether a KeyboardInterrupt ended it."""

    exit_code: int = 0
    interrupted: bool = False


def run_program(program: Program) -> Outcome:
    """Run a program and its threads to the end, errors printed as Python does; UsageError without such a program."""
    program.check()
    others = threading.enumerate()
    with _as_main_program(program):
        outcome = _run(program)
        return outcome if threads_ended(others) else Outcome(EXIT_INTERRUPTED, interrupted=True)


def _run(program: Program) -> Outcome:
    try:
        if program.is_module:
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        elif program.is_code:
            _execute(program.target, "<string>", BuiltinImporter)
        elif pkgutil.get_importer(program.file) is not None:
            runpy.run_path(os.path.abspath(program.file), run_name="__main__")
        else:
            # Not runpy.run_path: that would make either sys.argv[0] absolute or __file__ relative, and the
            # interpreter does neither.
            full = os.path.join(os.getcwd(), program.file)  # not normalized: as the interpreter does it
            with io.open_code(full) as file:
                source = file.read()
            _execute(source, full, SourceFileLoader("__main__", full), __file__=full, __cached__=None)
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


def _execute(source: str | bytes, name: str, loader: object, **attributes: object) -> None:
    module = ModuleType("__main__")
    vars(module).update(__builtins__=sys.modules["builtins"], __loader__=loader, **attributes)
    sys.modules["__main__"] = module
    exec(compile(source, name, "exec", dont_inherit=True), vars(module))  # noqa: S102


@contextlib.contextmanager
def _as_main_program(program: Program) -> Iterator[None]:
    argv, path, main = sys.argv, sys.path, sys.modules["__main__"]
    first = program.target if program.is_module else "-c" if program.is_code else program.file
    sys.argv = [first, *program.args]
    sys.path = list(path)
    if not sys.flags.safe_path:
        # The first entry is ours (the folder of the command gtrace); the program expects its own there.
        if program.is_module:
            sys.path[0] = os.getcwd()
        elif program.is_code:
            sys.path[0] = ""
        elif pkgutil.get_importer(program.file) is None:
            sys.path[0] = os.path.dirname(os.path.realpath(program.file))
        else:
            del sys.path[0]  # runpy puts the folder or zip file there
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
        sys.modules["__main__"] = main


def _exit_code(request: SystemExit) -> int:
    code = request.code
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
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
        frames, traceback = [], one.__traceback__
        while traceback is not None:
            name = traceback.tb_frame.f_globals.get("__name__") or ""
            if not any(name == ours or name.startswith(ours + ".") for ours in _MACHINERY):
                frames.append(traceback)
            traceback = traceback.tb_next
        one.__traceback__ = None
        for entry in reversed(frames):
            one.__traceback__ = TracebackType(one.__traceback__, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
