"""Which kinds of training capture was tried with: runs the marked tests and writes ``docs/capture-matrix.md``.

Run ``python tests/matrix.py``, where the packages of all cases are installed.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "capture-matrix.md"
HEAD = """# What capture was tried with

Made by `python tests/matrix.py` from the outcome of the tests: each case has at least one that compares the recorded
gradients with those that a hand-written hook or another run sees, or the final weights with and without capture.

| case | tried with | tests | result |
|---|---|---|---|
"""


class Outcomes:
    """A pytest plugin that gathers the outcomes of the marked tests, by case."""

    def __init__(self):
        self.cases = {}
        self.outcomes = {}

    def pytest_collection_modifyitems(self, config, items):
        marked = [item for item in items if item.get_closest_marker("capture_case")]
        config.hook.pytest_deselected(items=[item for item in items if item not in marked])
        items[:] = marked
        for item in items:
            for mark in item.iter_markers("capture_case"):
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
            tried = ", ".join(f"{package} {version(package)}" for package in packages)
            yield f"| {name} | {tried} | {len(tests)} | {result} |"


def main(arguments):
    """Run the tests and write the page."""
    outcomes = Outcomes()  # sees the tests of this process alone, so no -n
    folders = [
        str(PAGE.parent.parent / "tests" / name) for name in ("capture", "torch_hooks", "frameworks", "cli", "samples")
    ]
    code = pytest.main(["-q", "-p", "no:xdist", *arguments, *folders], plugins=[outcomes])
    PAGE.write_text(HEAD + "".join(row + "\n" for row in outcomes.rows()))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
