"""Words that readers of English as a second language stumble over never become more, and examples are right."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import gtrace
import gtrace_experiments

ROOT = Path(__file__).parents[1]
SOURCES = ("gtrace/**/*.py", "gtrace/**/*.jinja", "experiments/**/*.py", "docs/**/*.md", "*.md")

#: pattern -> (expression, its number today, what to write instead). Expressions leave out plain English: "there is no
#: N", "is no longer", "as in :func:`encode`", "as in the paper".
WORDS = {
    "'25' is no rate": (
        r"(?<!there )(?<!There )\b(?:is|are|was|were|be) no (?!longer|more|different|worse|better|faster|slower|larger|"
        r"smaller|shorter|one|way)\b",
        3,
        "is not a valid N; needs ...",
    ),
    "where there is": (r"\b[Ww]here (?:there|one|they|it)\b", 44, "if, when"),
    "tell, told": (
        r"(?<!small to )(?<!cannot )\b(?:[Tt]ell|[Tt]ells|[Tt]old|[Tt]elling)\b(?!\(\))",
        16,
        "know, measure, estimate, show",
    ),
    "stands": (r"\b[Ss]tands?\b|\bstood\b", 23, "is, is shown in, means"),
    "Of a tensor ...": (r"(?:help=\(?|\"\"\")\s*\"?Of (?:the|a|an|each|every|all|so) ", 1, "The tensor's ..."),
    "makes an error": (r"makes? an? (?:\w+ )?error", 0, "has an error, loses"),
    "alike": (r"\balike\b", 4, "the same, equally"),
    "so many": (r"\bso many\b", 2, "n, this many"),
    "the fewest": (r"\bthe fewest\b", 11, "at least, the least number of"),
    "in the place of": (r"\bin (?:the )?place of\b", 36, "instead of"),
    "anew": (r"\banew\b", 0, "again"),
    "hangs on": (r"\bhangs? on\b", 0, "depends on"),
    "comes to": (r"\b(?:comes|came|come) to\b", 1, "is, adds up to"),
    "as in schedule:0=2": (r"\bas in (?!:|``|the |an? |\w+'s)", 4, "e.g."),
}


@pytest.mark.parametrize("name", WORDS)
def test_such_words_do_not_come_back(name):
    expression, ceiling, instead = WORDS[name]
    found = []
    for path in sorted({path for glob in SOURCES for path in ROOT.glob(glob)}):
        text = path.read_text()
        for match in re.finditer(expression, text):
            begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {text[begin:end].strip()}")
    listed = "\n".join(found)
    assert len(found) <= ceiling, f"'{name}': write {instead}\n{listed}"


MODULES = [
    ".".join(file.relative_to(root.parent).with_suffix("").parts)
    for root in (Path(gtrace.__file__).parent, Path(gtrace_experiments.__file__).parent)
    for file in sorted(root.rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_is_shown(name):
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted
    assert not outcome.failed
