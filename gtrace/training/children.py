"""A codec in the Python processes that a program launches: torchrun, mp.spawn, accelerate, subprocess."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.codecs.plugin import load_plugin
from gtrace.torch_hooks.processes import before_abrupt_exit, before_shutdown
from gtrace.training.script import ScriptOptions, ScriptTraining

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def training(told: Mapping[str, Any], on_record: Callable[[dict[str, Any]], None] | None = None) -> ScriptTraining:
    """The hooks for what the command line said, as JSON values.

    Raises:
        UsageError: a codec that cannot be had here.
    """
    known = {item.name for item in fields(ScriptOptions)}
    options = ScriptOptions(**{name: _plain(value) for name, value in told.items() if name in known})
    return ScriptTraining(options, _say, on_record)


def start(told: Mapping[str, Any]) -> None:
    """Train with the codec in this process until it ends; called when it has imported torch."""
    for file in told["plugins"]:
        load_plugin(Path(file))
    child = training(told)
    child.start()

    def end() -> None:
        child.finish()

    def leave(exit_code: int) -> int:
        end()
        return exit_code

    # Held open until the process ends.
    _open.append(before_abrupt_exit(leave))
    _open[-1].__enter__()
    before_shutdown(end)


_open: list[Any] = []


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list) else value


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
