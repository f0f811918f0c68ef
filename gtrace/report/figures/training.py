"""Figures of training runs. Each function takes a run log or a run and returns a matplotlib Figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.report.analysis.families import method_of, short_spec
from gtrace.report.analysis.runs import BASELINE, WINDOW, running_mean, worst_shadows
from gtrace.report.figures.labels import Label, label_curves, make_room
from gtrace.report.figures.style import Look, log_ticks, look, new_figure, say_empty, series, styled
from gtrace.report.figures.sweep import log_values
from gtrace.report.names import literal, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from gtrace.report.analysis.run_logs import RunLogAnalysis
    from gtrace.report.analysis.runs import LoggedRun


_TENSOR_NAME = 24


def weight_gradient_cosines(run: LoggedRun) -> Figure:
    """Cosine of each weight gradient to the exact one over steps: its layer compressed alone, and all layers."""
    chosen = worst_shadows(run)
    looks = series(len(chosen))
    with styled():
        figure = new_figure(9.6, 4.0)
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, part in ((left, "cosine_alone"), (right, "cosine")):
            labels = []
            for curve, own in zip(chosen, looks, strict=True):
                values = getattr(curve, part)
                known = np.isfinite(values)
                if not known.any():
                    continue
                name = shorten(literal(curve.tensor), _TENSOR_NAME)
                x, y = curve.steps[known].astype(np.float64), values[known]
                axes.plot(x, y, **own.curve(), markevery=max(len(x) // 8, 1), markersize=4.0, label=name)
                labels.append(Label(name, own.text, x, y))
            axes.set_xlabel("training step")
            axes.set_title("this layer alone" if part == "cosine_alone" else "all layers")
            if axes is right:
                label_curves(axes, labels, room=True)
        left.set_ylabel("cosine to the exact weight gradient")
        return figure


Against = Literal["steps", "bits", "time"]
_NAME = 30


def bits_over_steps(analysis: RunLogAnalysis) -> Figure:
    """Bits per value that one worker has sent in each step, with the steps at which its codec was fitted anew."""
    with styled():
        figure = new_figure(8.2, 3.8)
        axes = figure.add_subplot()
        labels = []
        for run, own, name, shown in _looks(analysis):
            known = np.isfinite(run.bits) & (run.bits > 0)
            x, y = run.steps[known].astype(np.float64), run.bits[known]
            if not len(x):
                continue
            axes.plot(x, y, color=own.line, linestyle=own.dash, linewidth=1.2, label=name)
            fitted = np.isin(run.steps[known], run.updates)
            axes.plot(x[fitted], y[fitted], "|", color=own.line, markersize=12, mew=1.6, label=f"updates of {name}")
            labels += [Label(shown, own.text, x, y)] if shown else []
        axes.set_xlabel(analysis.step_name)
        what = "encoded" if analysis.neural else "sent up"
        axes.set_ylabel(f"bits per value, {what}")
        if labels:
            log_values(axes)
            label_curves(axes, labels, room=True)
        else:
            say_empty(axes)
        return figure


def averaged_gradient_error(analysis: RunLogAnalysis) -> Figure:
    """Relative variance of the workers' averaged gradient, or of the neural gradients, over training."""
    with styled():
        figure = new_figure(8.2, 3.8)
        axes = figure.add_subplot()
        labels = []
        for run, own, name, shown in _looks(analysis):
            values = np.where(run.relative_variance > 0, run.relative_variance, np.nan)
            if np.isfinite(values).any():
                x, smooth = _curve(axes, run.steps.astype(np.float64), values, own, name, logarithmic=True)
                labels += [Label(shown, own.text, x, smooth)] if shown else []
        axes.set_xlabel(analysis.step_name)
        what = "neural gradients" if analysis.neural else "averaged gradient"
        axes.set_ylabel(f"relative variance of the {what}")
        if labels:
            axes.set_yscale("log")
            log_ticks(axes.yaxis)
            label_curves(axes, labels, room=True)
        else:
            say_empty(axes)
        return figure


def training_curves(analysis: RunLogAnalysis, against: Against) -> Figure:
    """Training loss and test accuracy (test loss where the task has none).

    Args:
        analysis: of a run log.
        against: training steps, the bytes that one worker has sent, or simulated seconds.
    """
    with styled():
        tested = any(np.isfinite(run.accuracy).any() or np.isfinite(run.eval_loss).any() for run in analysis.runs)
        figure = new_figure(9.6 if tested else 8.2, 4.0)
        # A program of one's own logs no tests: its loss takes the whole width.
        left, right = figure.subplots(1, 2) if tested else (figure.add_subplot(), None)
        has_accuracy = any(np.isfinite(run.accuracy).any() for run in analysis.runs)
        losses, tests = [], []
        for run, own, name, shown in _looks(analysis):
            x, eval_x = _progress(run, against)
            there = np.isfinite(x)
            if there.any():
                at, smooth = _curve(left, x[there], run.loss[there], own, name, logarithmic=True)
                losses += [Label(shown, own.text, at, smooth)] if shown else []
            y = 100 * run.accuracy if has_accuracy else run.eval_loss
            known = np.isfinite(y) & np.isfinite(eval_x) & (eval_x > 0 if against != "steps" else True)
            if right is not None and known.any():
                right.plot(eval_x[known], y[known], **own.curve(), label=name)
                tests += [Label(shown, own.text, eval_x[known], y[known])] if shown else []
        left.set_ylabel("training loss (thick: running mean)")
        panels = [(left, losses)]
        if right is not None:
            right.set_ylabel("test accuracy (%)" if has_accuracy else "test loss")
            panels.append((right, tests))
        for axes, labels in panels:
            axes.set_xlabel(_progress_name(analysis, against))
            if not labels:
                say_empty(axes)
                continue
            if axes is left and all((label.y > 0).all() for label in labels):
                axes.set_yscale("log")
                log_ticks(axes.yaxis)
            if against == "bits":
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(_bytes)
            make_room(axes, labels)
        for axes, labels in panels:
            label_curves(axes, labels)
        return figure


def _progress(run: LoggedRun, against: Against) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where the steps of a run, and its tests, lie on the horizontal axis."""
    if against == "bits":
        return run.sent / 8, run.eval_sent / 8
    if against == "time":
        return run.sim_seconds, run.eval_sim_seconds
    return run.steps.astype(np.float64), run.eval_steps.astype(np.float64)


def _progress_name(analysis: RunLogAnalysis, against: Against) -> str:
    if against == "bits":
        return "encoded by one worker" if analysis.neural else "sent up by one worker"
    return "simulated time (s)" if against == "time" else analysis.step_name


def _curve(
    axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], own: Look, name: str, *, logarithmic: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw every step faintly and its running mean on top; the points of the latter."""
    known = np.isfinite(y) & (y > 0 if logarithmic and (y > 0).any() else True)
    x, y = x[known], y[known]
    smooth = running_mean(y, max(int(len(y) * WINDOW), 1))
    axes.plot(x, y, color=own.line, linewidth=0.7, alpha=0.35, label=f"every step of {name}")
    axes.plot(x, smooth, **own.curve(), markevery=max(len(x) // 8, 1), markersize=4.0, label=name)
    return x, smooth


def _looks(analysis: RunLogAnalysis) -> list[tuple[LoggedRun, Look, str, str]]:
    """Each run with its look, its name, and what is written beside its curve: seeds of one codec are named once.

    Runs of one method and different settings are told apart.
    """
    seen: dict[str, dict[str, int]] = {}
    names = _names(list(dict.fromkeys(run.spec for run in analysis.runs)))
    seeds: dict[str, list[int]] = {}
    for run in analysis.runs:
        seeds.setdefault(run.spec, []).append(run.seed)
    several = len({run.seed for run in analysis.runs}) > 1
    found = []
    for run in analysis.runs:
        method = method_of(run.spec)
        variants = seen.setdefault(method, {})
        variant = variants.setdefault(run.spec, len(variants))
        name = shorten(literal(names[run.spec]), _NAME)
        own = seeds[run.spec]
        shown = "" if run.seed != own[0] else f"{name}, {len(own)} seeds" if len(own) > 1 else name
        found.append((run, look(method, variant), f"{name}, seed {run.seed}" if several else name, shown))
    return found


def _names(specs: list[str]) -> dict[str, str]:
    """A short name for each spec, where it stays unique."""
    short = {spec: "uncompressed" if spec == BASELINE else short_spec(spec) for spec in specs}
    return {spec: name if list(short.values()).count(name) == 1 else spec for spec, name in short.items()}


def _bytes(value: float, _position: float | None = None) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:g} {unit}"
        value /= 1000
    return f"{value:g} TB"
