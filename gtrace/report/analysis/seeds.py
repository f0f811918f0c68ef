"""Training runs of the same codec over seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.report.statistics import UNKNOWN, Interval, holm, t_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.report.analysis.runs import LoggedRun


Metric = Literal["test accuracy", "test loss", "training loss"]
#: Spec of the uncompressed run.
BASELINE = "none"

_VALUES: dict[Metric, str] = {
    "test accuracy": "final_accuracy",
    "test loss": "final_eval_loss",
    "training loss": "final_loss",
}


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """The finished runs of one codec.

    Attributes:
        spec: codec; ``none`` for the uncompressed runs.
        metric: what is averaged.
        seeds: of the runs, ascending.
        values: of the metric, one per seed.
        mean: of the values.
        deviation: standard deviation over seeds, NaN for one.
        interval: of the mean, by Student's t; unknown for fewer than 5 seeds.
        difference: of ``values`` less those of the uncompressed run with the same seed, likewise.
        p_holm: p-value of the difference corrected for all codecs of the group, NaN where there is none.
        ratio: mean over seeds of float32 bits over bits sent.
    """

    spec: str
    metric: Metric
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float
    deviation: float
    interval: Interval
    difference: Interval
    p_holm: float
    ratio: float


def seed_groups(runs: Sequence[LoggedRun]) -> tuple[SeedGroup, ...]:
    """Finished runs by codec, the uncompressed one first. Codecs without a finished run are left out.

    Of several runs with the same codec and seed the first counts: a run that is repeated is no second sample.
    """
    finished: dict[str, dict[int, LoggedRun]] = {}
    for run in sorted(runs, key=lambda run: run.spec != BASELINE):
        if run.finished:
            finished.setdefault(run.spec, {}).setdefault(run.seed, run)
    if not finished:
        return ()
    every = [run for found in finished.values() for run in found.values()]
    metric: Metric = next(
        (name for name, field in _VALUES.items() if any(math.isfinite(getattr(run, field)) for run in every)),
        "training loss",
    )

    def values(found: dict[int, LoggedRun]) -> dict[int, float]:
        return {seed: float(getattr(found[seed], _VALUES[metric])) for seed in sorted(found)}

    exact = values(finished.get(BASELINE, {}))
    groups = []
    for spec, found in finished.items():
        own = values(found)
        numbers = np.array(list(own.values()))
        known = numbers[np.isfinite(numbers)]
        paired = [value - exact[seed] for seed, value in own.items() if seed in exact]
        ratios = np.array([run.ratio for run in found.values() if math.isfinite(run.ratio)])
        groups.append(
            SeedGroup(
                spec=spec,
                metric=metric,
                seeds=tuple(own),
                values=tuple(own.values()),
                mean=float(known.mean()) if len(known) else math.nan,
                deviation=float(known.std(ddof=1)) if len(known) > 1 else math.nan,
                interval=t_interval(numbers),
                difference=UNKNOWN if spec == BASELINE else t_interval(paired),
                p_holm=math.nan,
                ratio=float(ratios.mean()) if len(ratios) else math.nan,
            )
        )
    corrected = holm([group.difference.p for group in groups])
    return tuple(replace(group, p_holm=float(p)) for group, p in zip(groups, corrected, strict=True))
