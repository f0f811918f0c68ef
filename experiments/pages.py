"""Write the pages of the stored results again: docs/reproduction.md, and a page and figures for each paper.

After `gtrace reproduce all -o DIRECTORY`, copy its JSON files to docs/reproduction, adapt reasons.py, and run this.
"""

from __future__ import annotations

from pathlib import Path

from gtrace_experiments.reproduce import experiment_names, load_experiment
from gtrace_experiments.reproduce.page import write_page
from gtrace_experiments.reproduce.runner import read_result

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main() -> None:
    """Each experiment, and after it the one at the paper's size, if that is stored."""
    stored = DOCS / "reproduction"
    paths = [stored / f"{name}{size}.json" for name in experiment_names() for size in ("", "-full")]
    results = [read_result(path) for path in paths if path.exists()]
    write_page(DOCS / "reproduction.md", [(load_experiment(one.name), one) for one in results], stored)


if __name__ == "__main__":
    main()
