"""A few inputs for every fuzzing target, and all inputs that once were findings."""

from contextlib import suppress
from pathlib import Path

import pytest
from fuzz.mutations import HOWS, PIECES, Edit, edited
from fuzz.targets import MAKERS, target
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace.errors import GtraceError

FINDINGS = sorted((Path(__file__).parent / "findings").glob("*.bin"))
EDITS = st.builds(
    Edit,
    st.integers(0, HOWS - 1),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 10),
    st.sampled_from(PIECES) | st.binary(min_size=1, max_size=4),
)


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
    @settings(max_examples=12, database=None)
    @given(st.sampled_from(target(name).seeds), st.lists(EDITS, min_size=1, max_size=4))
    def check(seed, edits):
        attempt(name, edited(seed, edits))

    check()


@pytest.mark.parametrize("file", FINDINGS, ids=lambda file: file.stem)
def test_what_was_found_once(file):
    attempt(file.stem.rpartition("-")[0], file.read_bytes())
