"""A few inputs for every fuzzing target, and all inputs that once were findings."""

import random
from contextlib import suppress
from pathlib import Path

import pytest
from fuzz.mutations import edited, random_edits
from fuzz.targets import MAKERS, target

from gtrace.errors import GtraceError

FINDINGS = sorted((Path(__file__).parent / "findings").glob("*.bin"))


def attempt(name, data):
    """Answered or refused: everything else is raised."""
    with suppress(GtraceError, *((UnicodeDecodeError,) if target(name).text else ())):
        target(name).run(data)


@pytest.mark.parametrize("name", MAKERS)
def test_the_seeds_are_answered(name):
    """Most are; a few texts are there to be refused."""
    answered = 0
    for seed in target(name).seeds:
        with suppress(GtraceError):
            target(name).run(seed)
            answered += 1
    assert answered


@pytest.mark.parametrize("name", MAKERS)
def test_a_few_inputs(name):
    rng = random.Random(name)
    for _ in range(8):
        attempt(name, edited(rng.choice(target(name).seeds), random_edits(rng)))


@pytest.mark.parametrize("file", FINDINGS, ids=lambda file: file.stem)
def test_what_was_found_once(file):
    attempt(file.stem.rpartition("-")[0], file.read_bytes())
