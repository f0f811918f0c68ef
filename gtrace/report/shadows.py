"""Figure of shadow passes: how the weight gradients fare under compressed neural gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.labels import Label, label_curves, make_room
from gtrace.report.names import literal, shorten
from gtrace.report.runs import known_mean
from gtrace.report.style import new_figure, series, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gtrace.report.runs import Run, ShadowCurve

#: More curves than this cannot be told apart.
MOST = 8
_NAME = 24


def weight_gradient_cosines(run: Run) -> Figure:
    """Cosine of each weight gradient to the exact one over steps: its layer compressed alone, and all layers."""
    chosen = _worst(run)
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
                name = shorten(literal(curve.tensor), _NAME)
                x, y = curve.steps[known].astype(np.float64), values[known]
                axes.plot(x, y, **own.curve(), markevery=max(len(x) // 8, 1), markersize=4.0, label=name)
                labels.append(Label(name, own.text, x, y))
            axes.set_xlabel("training step")
            axes.set_title("this layer alone" if part == "cosine_alone" else "all layers")
            if axes is right and labels:
                make_room(axes, labels)
                label_curves(axes, labels)
        left.set_ylabel("cosine to the exact weight gradient")
        return figure


def left_out(run: Run) -> str:
    """What a caption says where some weight gradients are not drawn."""
    return f" The {MOST} with the lowest mean of {len(run.shadow)}." if len(run.shadow) > MOST else ""


def _worst(run: Run) -> list[ShadowCurve]:
    """The curves with the lowest mean cosine, in the order of the model; those that have none come last."""

    def order(curve: ShadowCurve) -> float:
        mean = known_mean(curve.cosine)
        return mean if np.isfinite(mean) else 2.0

    kept = {curve.tensor for curve in sorted(run.shadow, key=order)[:MOST]}
    return [curve for curve in run.shadow if curve.tensor in kept]
