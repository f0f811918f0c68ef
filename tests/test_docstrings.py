"""The examples in docstrings are right."""

import doctest
import importlib
from pathlib import Path

import pytest

import gtrace
import gtrace_experiments

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
