"""``gtrace import``: make a trace of arrays that other programs stored."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gtrace.cli.options import patterns, print_json, steps_option
from gtrace.cli.progress import step_progress
from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gtrace.trace.io.foreign import TensorFile
    from gtrace.trace.io.importing import Imported


@click.command("import")
@click.argument("sources", metavar="SOURCE...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The trace: .zarr, .h5 or .hdf5.")
@click.option(
    "--pattern",
    metavar="TEMPLATE",
    help="What names say, as in '{step}/{tensor}.npy'; also {rank}, and * for anything.",
)
@click.option("--step-axis", is_flag=True, help="The first axis of every array counts steps.")
@click.option("--steps", default=None, help="Only these steps, as in 0,10,100-200.")
@click.option("--tensors", multiple=True, metavar="GLOB", callback=patterns, help="Only tensors with such names.")
@click.option(
    "--kind",
    type=click.Choice(["weight", "neural"]),
    default="weight",
    show_default=True,
    help="Gradients of weights or of layer outputs.",
)
@click.option("--force", is_flag=True, help="Replace a trace that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(
    sources: tuple[Path, ...],
    output: Path,
    pattern: str | None,
    step_axis: bool,
    steps: str | None,
    tensors: tuple[str, ...],
    kind: str,
    force: bool,
    as_json: bool,
) -> None:
    """Make a trace of the gradients in SOURCE: files or folders of .npy, .npz, .safetensors and .pt, Zarr stores.

    The step is the number of a file or folder, as in grads/step_000100.safetensors. What was found is printed.

    \b
    Example:
      gtrace import grads/ -o run.zarr
      gtrace import grads/ -o run.zarr --pattern '{step}/{tensor}.npy'
    """
    from gtrace.trace.io.importing import import_trace

    with step_progress("import", quiet=as_json) as progress:
        made = import_trace(
            sources,
            output,
            pattern=pattern,
            step_axis=step_axis,
            steps=steps_option(steps),
            tensors=tensors,
            kind=kind,
            force=force,
            openers={".pt": _open_state_dict, ".pth": _open_state_dict},
            progress=progress,
        )
    if as_json:
        print_json(_document(made))
    else:
        _show(made)


def _open_state_dict(path: Path) -> TensorFile:
    # torch takes seconds to load, and only these files need it.
    try:
        from gtrace.torch_hooks.statedicts import StateDictFile
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(f"{path}: needs PyTorch, which is not installed: pip install 'gtrace[torch]'") from None
    return StateDictFile(path)


def _document(made: Imported) -> dict[str, object]:
    return {
        "output": os.fspath(made.output),
        "steps": made.steps,
        "tensors": made.tensors,
        "files": made.files,
        "step_numbers": made.numbering,
        "left_out": made.left_out,
        "files_ignored": made.ignored,
        "nonfinite": made.nonfinite,
    }


def _show(made: Imported) -> None:
    from gtrace.report.names import count, literal
    from gtrace.trace.io.importing import STEPS_TOLD

    say: Callable[[str], None] = click.echo
    span = f" ({made.steps[0]} to {made.steps[-1]})" if len(made.steps) > 1 else ""
    found = f"{count(len(made.steps), 'step')}{span}, {count(len(made.tensors), 'tensor')}"
    told = ", ".join(STEPS_TOLD[how] for how in made.numbering)
    say(f"{found} from {count(made.files, 'file')}; {told}")
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
