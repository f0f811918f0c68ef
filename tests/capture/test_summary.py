"""What the processes of one run recorded together."""

import numpy as np

from gtrace.capture.summary import CaptureSummary, all_parts
from gtrace.trace.shared import join_trace

OUTCOMES = (
    {"steps_seen": 9, "errors": 1, "skipped_steps": 0, "blocked": 0.25, "over_budget": False},
    {"steps_seen": 7, "errors": 2, "skipped_steps": 3, "blocked": 0.125, "over_budget": True},
)


def write(path, rank, rows, kind="weight", names=("w",), outcome=None, optimizer=0):
    writer, number = join_trace(path, run="a", rank=rank, writers=2)
    place = {"kind": kind, "rank": number, "optimizer": optimizer}
    for step in range(rows):
        for name in names:
            writer.append(step, name, np.ones(3), **place)
        writer.commit(step, **place)
    if outcome is not None:
        writer.set_attrs(capture=outcome)
    writer.close()


def test_two_processes(path):
    write(path, 0, 2, outcome=OUTCOMES[0])
    write(path, 1, 5, names=("w", "v"), outcome=OUTCOMES[1])
    # Of this process: it launched the two, and recorded nothing.
    own = CaptureSummary(path, complaints=("its own",), without=("nothing",), backward_passes=1)
    told = all_parts(path, own)
    assert (told.torch_seen, told.ranks, told.rows, told.fewest_rows, told.steps_wanted) == (True, 2, 5, 2, 5)
    assert (told.tensors, told.optimizers, told.neural_rows, told.neural_tensors) == (2, 1, 0, 0)
    assert (told.steps_seen, told.errors, told.skipped_steps) == (9, 3, 3)
    assert (told.blocked, told.over_budget, told.complaints) == (0.25, True, ())
    assert told.bytes == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    # Everything else is this process's own.
    assert (told.path, told.without, told.backward_passes) == (path, ("nothing",), 1)


def test_gradients_of_activations_are_counted_apart(path):
    write(path, 0, 4, "neural", ("a", "b", "c"), OUTCOMES[0])
    write(path, 1, 3, outcome=OUTCOMES[0])
    told = all_parts(path, CaptureSummary(path))
    assert (told.rows, told.fewest_rows, told.ranks) == (4, 3, 2)
    assert (told.tensors, told.neural_rows, told.neural_tensors) == (0, 4, 3)
    assert not told.over_budget


def test_a_killed_process_has_told_nothing(path):
    write(path, 0, 2, optimizer=3)
    told = all_parts(path, CaptureSummary(path))
    assert (told.ranks, told.rows, told.steps_seen, told.errors, told.blocked) == (1, 2, 0, 0, 0.0)
    assert told.optimizers == 1


def test_what_this_process_recorded_alone_is_its_own(path):
    write(path, 0, 2, outcome=OUTCOMES[0])
    own = CaptureSummary(path, rows=2, errors=7)
    assert all_parts(path, own) is own


def test_processes_without_rows(path):
    write(path, 0, 0)
    own = CaptureSummary(path)
    assert all_parts(path, own) is own
    write(path, 1, 3)
    assert (all_parts(path, own).ranks, all_parts(path, own).fewest_rows) == (1, 3)
