"""What gtrace was tried with: runs the marked tests and writes ``docs/capture-matrix.md`` and ``docs/frameworks.md``.

Run ``python tests/matrix.py`` where the packages of all cases are installed, or with the name of one page.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


CAPTURE = """# What capture was tried with

Made by `python tests/matrix.py` from the outcome of the tests: each case has at least one that compares the recorded
gradients with those that a hand-written hook or another run sees, or the final weights with and without capture.

| case | tried with | tests | result |
|---|---|---|---|
"""
FRAMEWORKS = """# Frameworks and trackers

Made by `python tests/matrix.py frameworks` from the outcome of the tests. [Trainers](how-to/lightning.md),
[Trackers](how-to/trackers.md), [Notebooks](how-to/notebooks.md) and
[Other packages' methods](how-to/peers.md) show the lines to write.

- The test of a trainer runs its smallest program. The trace holds the exact gradients, the optimizer gets what the
  codec makes of them, the logger gets the error between the two, and a sweep of the trace predicts that error.
- The tests of `DistributedDataParallel` and `fully_shard` start two to four processes over gloo. Averages are equal to
  the bit to those of simulated ranks, except `powersgd`'s, and the bytes that are counted to those at
  the collectives. [Their page](how-to/ddp.md) has the lines.
- The test of a tracker reads back what the package stored in its local mode.
- torchtitan needs triton, which torch's CPU builds lack. Its case is a loop with the names that its trainer has:
  `model_parts`, `optimizers`, and a logger with `log(metrics, step)`.

| case | tried with | tests | result |
|---|---|---|---|
"""
_FRAMEWORK_TESTS = ("frameworks", "training", "test_trackers.py", "test_tabular.py", "codecs/test_peers.py")
#: page -> its marker, its tests, and what is above its table
PAGES = {
    "capture-matrix": ("capture_case", ("capture", "torch_hooks", "frameworks", "cli", "samples"), CAPTURE),
    "frameworks": ("framework_case", _FRAMEWORK_TESTS, FRAMEWORKS),
}


class Outcomes:
    """A pytest plugin that gathers the outcomes of the marked tests, by case."""

    def __init__(self, marker):
        self.marker = marker
        self.cases = {}
        self.outcomes = {}

    def pytest_collection_modifyitems(self, config, items):
        marked = [item for item in items if item.get_closest_marker(self.marker)]
        config.hook.pytest_deselected(items=[item for item in items if item not in marked])
        items[:] = marked
        for item in items:
            for mark in item.iter_markers(self.marker):
                packages = ("torch", *mark.kwargs.get("packages", ()))
                self.cases.setdefault((mark.args[0], packages), []).append(item.nodeid)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def rows(self):
        """One line of the table for each case, sorted by its name."""
        for (name, packages), tests in sorted(self.cases.items()):
            outcomes = {self.outcomes.get(test, "not run") for test in tests}
            result = "works" if outcomes == {"passed"} else ", ".join(sorted(outcomes))
            tried = ", ".join(filter(None, map(named, packages)))
            yield f"| {name} | {tried} | {len(tests)} | {result} |\n"


def named(package):
    """The package and its version; empty if it is not installed, then its tests are skipped."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def write(name, arguments):
    """Run the tests of a page and write it; returns pytest's exit code."""
    marker, tests, head = PAGES[name]
    outcomes = Outcomes(marker)  # sees the tests of this process alone, so no -n
    code = pytest.main(
        ["-q", "-p", "no:xdist", *arguments, *(str(ROOT / "tests" / one) for one in tests)], plugins=[outcomes]
    )
    (ROOT / "docs" / f"{name}.md").write_text(head + "".join(outcomes.rows()))
    return code


if __name__ == "__main__":
    chosen = [name for name in PAGES if name in sys.argv[1:]] or list(PAGES)
    # Other arguments are pytest's.
    sys.exit(max(write(name, [one for one in sys.argv[1:] if one not in PAGES]) for name in chosen))
