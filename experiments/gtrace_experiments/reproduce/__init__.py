"""The papers' experiments in miniature, by name. An experiment's module is imported when it is run or shown."""

from __future__ import annotations

import fnmatch
import importlib
from typing import TYPE_CHECKING

from gtrace.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace_experiments.reproduce.experiment import Experiment

#: in the order of the page; ``a-b`` lives in the module ``a_b``
_NAMES: tuple[str, ...] = (
    "alq-fig1",
    "alq-fig5",
    "alq-fig6",
    "alq-fig7",
    "alq-fig8",
    "alq-fig14",
    "alq-table1",
    "alq-table2",
    "alq-tables5-7",
    "lognormal-table1",
    "lognormal-table2",
    "lognormal-table3",
    "lognormal-table4",
    "lognormal-fig3",
    "lognormal-fig5",
    "mcgq-fig1",
    "mcgq-fig2",
    "mcgq-fig3",
    "mcgq-tables1-2",
    "mcgq-ptb",
    "mcgq-shakespeare",
    "mqgrad-fig4",
    "mqgrad-tables1-3",
    "zipml-fig4",
    "zipml-fig6",
    "zipml-fig7a",
    "zipml-fig7b",
    "zipml-fig8",
    "zipml-fig9",
    "zipml-fig12",
)


def experiment_names() -> tuple[str, ...]:
    """All experiments."""
    return _NAMES


def choose_experiments(patterns: Sequence[str]) -> list[str]:
    """The experiments that names or patterns as ``zipml-*`` mean, in the order of the page; ``all`` means every one.

    Raises:
        UsageError: one that fits none.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = _NAMES if pattern == "all" else fnmatch.filter(_NAMES, pattern)
        if not found:
            raise UsageError(f"no experiment '{pattern}'; {suggest(pattern, [*_NAMES, 'all'])}")
        chosen.update(found)
    return [name for name in _NAMES if name in chosen]


def load_experiment(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        UsageError: there is none; near names are suggested.
    """
    if name not in _NAMES:
        raise UsageError(f"no experiment '{name}'; {suggest(name, _NAMES)}")
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    experiment: Experiment = module.EXPERIMENT
    return experiment
