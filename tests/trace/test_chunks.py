import numpy as np
import pytest

from gtrace.trace import Trace, create_trace, open_trace

ROWS = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
@pytest.mark.parametrize("closed", [False, True], ids=["being written", "finished"])
@pytest.mark.parametrize("chunk", [64, 999, 1000, 4096])
def test_chunks_are_the_pieces_of_a_gradient(tmp_path, suffix, closed, chunk):
    writer = create_trace(tmp_path / f"run{suffix}")
    for step, row in enumerate(ROWS):
        writer.append(step, "w", row)
        writer.commit(step)
    if closed:
        writer.close()
    with open_trace(tmp_path / f"run{suffix}") as trace:
        for step, row in enumerate(ROWS):
            pieces = list(trace.read_chunks("w", step, chunk))
            assert np.array_equal(np.concatenate(pieces), row)
            assert [piece.size for piece in pieces[:-1]] == [chunk] * (len(pieces) - 1)
    writer.close()


def test_chunks_of_a_trace_in_memory():
    trace = Trace.from_arrays({"w": ROWS[0]})
    assert np.array_equal(np.concatenate(list(trace.read_chunks("w", 0, 300))), ROWS[0])
