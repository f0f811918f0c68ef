"""``gtrace trace import``: make a trace of arrays that other programs stored."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gtrace.cli.console import echo, step_progress
from gtrace.cli.options import JSON, STEPS, TENSORS, Command, arguments, options, pick, print_json
from gtrace.settings import KIND, option

if TYPE_CHECKING:
    from collections.abc import Callable

    from gtrace.trace.io.importing import Imported


#: By name: torch takes seconds to load, and only the process that reads such files needs it.
STATE_DICTS = dict.fromkeys((".pt", ".pth"), "gtrace.torch_hooks.statedicts:StateDictFile")


@dataclass(frozen=True)
class ImportSettings:
    """The options of ``gtrace trace import``."""

    output: Path = option(names=("-o", "--output"), help="The trace: .zarr, .h5 or .hdf5.")
    pattern: str | None = option(
        None,
        call=("rules",),
        metavar="TEMPLATE",
        help="What names say, e.g. '{step}/{tensor}.npy'; also {rank}, and * for anything.",
    )
    step_axis: bool = option(False, call=("rules",), help="The first axis of every array counts steps.")
    steps: tuple[int, ...] | None = option(None, call=("rules",), **STEPS)
    tensors: tuple[str, ...] = option((), call=("rules",), **TENSORS)
    kind: str = option("weight", call=("rules",), **KIND | {"help": "What the arrays are."})
    force: bool = option(False, help="Replace a trace that is there.")
    as_json: bool = option(False, **JSON)


@click.command("import", cls=Command)
@click.argument("sources", metavar="SOURCE...", type=click.Path(path_type=Path), nargs=-1, required=True)
@options(ImportSettings)
def command(settings: ImportSettings, sources: tuple[Path, ...]) -> None:
    """Make a trace of the gradients in SOURCE: files or folders of .npy, .npz, .safetensors, .pt and HDF5, Zarr stores.

    The step is the number of a file or folder, e.g. grads/step_000100.safetensors. What was found is printed.

    \b
    Example:
      gtrace trace import grads/ -o run.zarr
      gtrace trace import grads/ -o run.zarr --pattern '{step}/{tensor}.npy'
    """
    from gtrace.trace.io.importing import ImportRules, import_trace

    with step_progress("import", quiet=settings.as_json) as progress:
        rules = ImportRules(readers=STATE_DICTS, **arguments(settings, "rules"))
        made = import_trace(sources, settings.output, rules, force=settings.force, progress=progress)
    if settings.as_json:
        print_json(
            {
                **pick(made, "steps", "tensors", "files", "left_out", "nonfinite"),
                "output": os.fspath(made.output),
                "step_numbers": made.numbering,
                "files_ignored": made.ignored,
            }
        )
    else:
        _show(made)


def _show(made: Imported) -> None:
    from gtrace.report.names import count, literal
    from gtrace.trace.io.importing import STEPS_FROM

    say: Callable[[str], None] = echo
    span = f" ({made.steps[0]} to {made.steps[-1]})" if len(made.steps) > 1 else ""
    found = f"{count(len(made.steps), 'step')}{span}, {count(len(made.tensors), 'tensor')}"
    numbered = ", ".join(STEPS_FROM[how] for how in made.numbering)
    say(f"{found} from {count(made.files, 'file')}; {numbered}")
    if len(made.steps) == 1 and set(made.numbering) <= {"sorted", "none"}:
        say("nothing named a step: if the first axis of the arrays counts steps, pass --step-axis --force")
    if made.left_out:
        shown = ", ".join(literal(name) for name in made.left_out[:4]) + (", ..." if len(made.left_out) > 4 else "")
        say(f"left out as no gradients (integers, or no axis of steps): {shown}")
    if made.ignored:
        say(f"left out: {count(made.ignored, 'other file')}")
    if made.nonfinite:
        say(f"{count(made.nonfinite, 'value')} not finite: gtrace info says where")
    place = os.fspath(made.output)
    say(f"{literal(place)}\nnext: gtrace sweep {literal(shlex.quote(place))}")
