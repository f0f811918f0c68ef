"""``gtrace advise`` and ``gtrace demo``: the whole way to a decision in one go, on your script or a shipped sample."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

import gtrace.report
from gtrace.cli.console import echo, print_results, wide_console
from gtrace.cli.options import ClusterSettings, Command, HorizonSettings, arguments, options, pick, print_json
from gtrace.errors import GtraceError, UsageError, check_folder
from gtrace.report.names import duration, energy_share, number
from gtrace.settings import nested, option
from gtrace.training.tasks import sample_file
from gtrace.units import parse_bandwidth, rate_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gtrace.workflows.advise import Advice


#: columns of the lines below a verdict
_WIDTH = 80
_RANGE = re.compile(r"(?P<low>[0-9.]+)\s*-\s*(?P<high>[0-9.]+)\s*(?P<unit>[kMGT]?(?:bit|B)/s)")


@dataclass(frozen=True)
class _AdviseOptions:
    cluster: ClusterSettings = nested(ClusterSettings)
    bandwidth: str | None = option(
        None, metavar="RANGE", help="With --cluster: link speeds to compare, e.g. 1-100Gbit/s."
    )
    noise: HorizonSettings = nested(HorizonSettings)
    seconds: float = option(40.0, metavar="SECONDS", help="Stop the script after so much training.")
    is_module: bool = option(False, help="TARGET is the name of a module, like python -m.")
    output: Path | None = option(None, help="Folder for all results.  [default: NAME.advice]")
    force: bool = option(False, help="Use a folder that holds something else, too; that stays.")
    as_json: bool = option(False, help="Print JSON instead of text.")


@click.command("advise", cls=Command, context_settings={"allow_interspersed_args": False})
@options(_AdviseOptions)
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(settings: _AdviseOptions, target: str, args: tuple[str, ...]) -> None:
    """Say whether TARGET should compress its gradients, with what, and what that saves and costs.

    TARGET is a training script with its ARGS, or a trace. A script runs until a few dozen of its steps are recorded,
    and is then stopped; its output is shown only if it fails. A sweep of a few codecs, a plan for every tensor and the
    verdict follow, with the lines to paste. Options come before TARGET.

    \b
    Examples:
      gtrace advise train.py --epochs 3
      gtrace advise --cluster 8x25Gbit/s train.py
      gtrace advise --cluster 8x25Gbit/s --bandwidth 1-100Gbit/s train.zarr
    """
    from gtrace.workflows.advise import advise

    cluster = settings.cluster.chosen()
    if settings.bandwidth is not None and cluster is None:
        raise UsageError("--bandwidth: needs the number of ranks, e.g. --cluster 8x25Gbit/s.")
    if not settings.seconds > 0:
        raise UsageError(f"--seconds: {settings.seconds:g} must be more than 0.")
    advice = advise(
        [target, *args],
        asked=gtrace.report.Asked(cluster=cluster, **arguments(settings.noise, "report")),
        speeds=None if settings.bandwidth is None else _speeds(settings.bandwidth),
        folder=settings.output,
        say=lambda text: echo(f"gtrace: {text}", err=True),
        **pick(settings, "is_module", "seconds", "force"),
    )
    if settings.as_json:
        print_json({**advice.as_dict(), "paste": paste(advice)})
        return
    from gtrace.report.text import print_verdict

    print_verdict(advice.verdict, wide_console())
    found = advice.options
    errors = [energy_share(one.error, 3) for one in found]
    columns = {"": [one.name for one in found], "bits": [number(one.bits) for one in found], "error": errors}
    if advice.cluster is not None:
        columns["step"] = [duration(one.seconds) for one in found]
    echo("")
    print_results(columns, width=0)
    program = shlex.join([*(["-m"] if settings.is_module else []), target, *args])
    for line in _lines(advice, program):
        echo(line)


def _speeds(text: str) -> tuple[float, float]:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--bandwidth: '{text}' needs two speeds and a unit, e.g. 1-100Gbit/s.")
    low, high = (parse_bandwidth(match[end] + match["unit"], "--bandwidth") for end in ("low", "high"))
    if not low < high:
        raise UsageError(f"--bandwidth: '{text}' must rise, e.g. 1-100Gbit/s.")
    return low, high


def _lines(advice: Advice, program: str) -> list[str]:
    lines = []
    if advice.speeds:
        *slower, last = advice.speeds
        ends = {rate_text(one.high, digits=2): one.recommendation for one in reversed(slower)}
        said = [f"{name} up to {speed}" for speed, name in reversed(ends.items())]
        said.append(f"{last.recommendation} {'above' if said else 'everywhere'}")
        lines += textwrap.wrap(f"By link speed: {', '.join(said)}", _WIDTH, subsequent_indent=" " * 15)
    if advice.step is not None:
        backward = "" if advice.backward is None else f", backward {duration(advice.backward)}"
        lines.append(f"A step takes {duration(advice.step)}{backward} here.")
    if advice.cluster is None:
        lines.append("For step times add the network: --cluster 8x25Gbit/s")
    lines += [f"Note: {text}" for text in advice.notes]
    taken = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in advice.seconds.items())
    lines += [f"{shlex.quote(str(advice.page))} ({taken})", ""]
    pasted = paste(advice)
    if pasted:
        lines += ["Paste after ddp_model = DistributedDataParallel(model):", *(f"  {line}" for line in pasted), ""]
    chosen = advice.options[2].name if len(advice.options) > 2 else None
    if chosen is not None and not program.endswith((".zarr", ".h5", ".hdf5", ".zip")):
        lines.append(f"Compare losses: gtrace train --codec {chosen} --baseline {program}")
    return lines


def paste(advice: Advice) -> list[str]:
    """Lines of Python that make a DistributedDataParallel called ``ddp_model`` do what is advised; none for float32."""
    verdict = advice.verdict
    if verdict.answer == "compress":
        plan = advice.plan
        if plan is not None and plan.worth and advice.plan_file is not None:
            return [
                "from gtrace.planning import load_plan",
                "from gtrace.training import State, ddp_comm_hook",
                f"plan = load_plan({str(advice.plan_file)!r}).table",
                "ddp_model.register_comm_hook(State(plan, model=ddp_model.module), ddp_comm_hook)",
            ]
        return [
            "from gtrace.training import State, ddp_comm_hook",
            f"ddp_model.register_comm_hook(State({verdict.codec!r}), ddp_comm_hook)",
        ]
    if verdict.bits == 16:  # bf16
        return [
            "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook",
            "ddp_model.register_comm_hook(None, bf16_compress_hook)  # needs NCCL or XCCL",
        ]
    return []


#: early, two in the middle, late: bursts of consecutive steps, so that codecs with memory can be replayed on it too
STEPS = "0+7,90+7,180+7,260+7"
SCRIPT = "digits_cnn.py"
#: what a demo writes into its folder
TRACE, SWEEP, RUN, PAGE = "digits_cnn.zarr", "digits_cnn.sweep.db", "digits_cnn.jsonl", "report.html"


def run_demo(folder: Path, *, force: bool, say: Callable[[str], None]) -> Path:
    """Run the demo in ``folder``, which is made if it is missing, and return the path of the page.

    ``say`` is called with each command line before it runs, and with the answer of the report.
    """
    check_folder(folder, force=force)
    folder.mkdir(parents=True, exist_ok=True)
    printed = ""
    # The last one is the report.
    for command, *others in (
        ["capture", "--steps", STEPS, str(sample_file(SCRIPT))],
        ["sweep", TRACE],
        ["train", "--codec", "qsgdinf", "--bits", "3", "--task", "digits-cnn", "--steps", "100", "-o", RUN],
        ["report", SWEEP, RUN, "-o", PAGE],
    ):
        say(f"$ gtrace {shlex.join([command, *others])}")
        printed = _run([command, "--force", *others], folder)
    # The verdict and its table; the page's path is said by the caller.
    say("\n" + "\n\n".join(printed.split("\n\n")[:2]))
    return folder / PAGE


def _run(words: Sequence[str], folder: Path) -> str:
    """Run one command in the folder; what it prints is returned, and shown if it fails."""
    command = [sys.executable, "-m", "gtrace", *words]
    # One thread per library: the sample's tensors are too small for pools to pay.
    width = str(shutil.get_terminal_size().columns)
    environment = {"OMP_NUM_THREADS": "1", "COLUMNS": width, **os.environ}
    if sys.path[0]:
        # A checkout that is run from its own folder is found from the demo's folder, too.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, env=environment, check=False, cwd=folder, text=True, stdout=pipe, stderr=out)
    if done.returncode:
        sys.stderr.write(done.stdout)
        failure = GtraceError(f"demo: 'gtrace {words[0]}' ended with exit code {done.returncode}")
        failure.exit_code = done.returncode
        raise failure
    return done.stdout


@dataclass(frozen=True)
class _DemoSettings:
    output: Path = option(Path("demo"), help="Folder to fill.")
    force: bool = option(False, help="Replace what an earlier demo wrote there.")


@click.command("demo", cls=Command)
@options(_DemoSettings)
def demo(settings: _DemoSettings) -> None:
    """Capture, sweep, train and report on a shipped sample; ends with the path of the report.

    A small network learns handwritten digits while its gradients are recorded; codecs are then measured on them, and
    one of them is used in training. Each step is shown as the command that does it, in the folder of the demo.

    \b
    Example:
      gtrace demo -o demo
    """
    page = run_demo(
        settings.output, force=settings.force, say=lambda line: click.secho(line, bold=line.startswith("$"))
    )
    echo(f"\nreport: {page.resolve()}")
