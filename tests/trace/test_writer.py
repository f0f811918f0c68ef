"""The rules of writing: order of steps, what is refused, overwriting, closing."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers_trace import STEPS, check_gradients, gradient, write_arrays, write_trace

from gtrace.errors import OutputExistsError, UsageError
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace


def test_steps_are_visible_as_soon_as_they_are_committed(path):
    with create_trace(path) as writer:
        for step in range(3):
            writer.append(step, "w", [step])
            with open_trace(path) as trace:
                assert trace.scalars()["step"].tolist() == list(range(step))
            writer.commit(step)
            with open_trace(path) as trace:
                assert trace.steps("w").tolist() == list(range(step + 1))
                assert trace.read("w", step).tolist() == [step]
                assert trace.status == "interrupted"
    assert open_trace(path).status == "complete"


def test_close_commits_what_is_pending_and_so_does_a_later_step(path):
    writer = create_trace(path)
    writer.append(0, "w", [1.0])
    writer.append(3, "w", [2.0])
    with open_trace(path) as trace:
        assert trace.steps("w").tolist() == [0]
    writer.close()
    writer.close()
    with open_trace(path) as trace:
        assert trace.steps("w").tolist() == [0, 3]
    for call in (lambda: writer.append(4, "w", [1.0]), lambda: writer.commit(4), lambda: trace.read("w", 0)):
        with pytest.raises(UsageError, match="closed"):
            call()


@pytest.mark.parametrize("empty", [3, 600])
def test_steps_without_gradients_also_before_the_first_tensor(path, empty):
    with create_trace(path) as writer:
        for step in range(empty):
            writer.commit(step, loss=step)
    with open_trace(path) as trace:
        assert (trace.tensors, trace.scalars()["loss"].tolist()) == ((), list(range(empty)))
    assert check_trace(path).clean
    late = path.with_stem("late")
    with create_trace(late) as writer:
        for step in range(empty):
            writer.commit(step)
        writer.append(empty, "w", [1.0])
    assert check_trace(late).clean
    assert open_trace(late).steps("w").tolist() == [empty]


def test_an_exception_leaves_out_the_step_that_was_not_committed(path):
    def run():
        with create_trace(path) as writer:
            writer.append(0, "w", [1.0])
            writer.commit(0)
            writer.append(1, "w", [2.0])
            writer.append(1, "new", [2.0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    with open_trace(path) as trace:
        assert trace.status == "interrupted"
        assert [(info.name, trace.steps(info.name).tolist()) for info in trace.tensors] == [("w", [0])]
    assert os.listdir(path.parent) == [path.name]


REFUSED = [
    (lambda w: w.append(2, "w", [1.0]), "step 3 came before"),
    (lambda w: w.append(-1, "w", [1.0]), "steps must be whole numbers that ascend from 0"),
    (lambda w: w.append(3.5, "w", [1.0]), "step 3.5: steps must be whole numbers"),
    (lambda w: w.commit(2), "came before|gradients were appended to 3"),
    (lambda w: w.append(3, "w", [1.0]), "appended twice"),
    (lambda w: w.commit(4), "commit of step 4, but gradients were appended to 3"),
    (lambda w: w.append(3, "x", [1j]), "complex128 values"),
    (lambda w: w.append(3, "x", [1.0], kind="wait"), "did you mean weight"),
    (lambda w: w.append(3, "x", [1.0], shape=(2,)), "1 elements of a tensor of shape"),
    (lambda w: w.append(3, "x", [1.0], index=3), "'index' is set by the trace"),
    (lambda w: w.append(3, "x", [1.0], note=float("nan")), "'note' cannot be stored"),
    (lambda w: w.append(3, "x", [1.0], kind="neural", n_total=0), "n_total is 0, but 1 elements were given"),
    (lambda w: w.append(3, "x", [1.0], kind="neural", capacity=0), "capacity cannot be 0 elements"),
    (lambda w: w.append(3, "x", [1.0], capacity=3), "n_total and capacity are for kind 'neural'"),
    (
        lambda w: w.append(3, "x", [1.0], numbers={"second_momemt": 1}),
        "unknown number 'second_momemt'",
    ),
    (lambda w: w.commit(3, los=1.0), "did you mean loss"),
    (lambda w: w.set_attrs(status="fine"), "'status' is set by the trace"),
    (lambda w: w.set_attrs(**{"a\n": 1}), "not printable text"),
    (lambda w: w.append(3, "v", [1.0, 2.0]), "2 elements, but earlier steps have 1"),
    (lambda w: w.append(3, "v", [1.0], numbers={"replicas": 2}), "first step of its stream had no 'replicas'"),
]


def test_what_is_refused_changes_nothing(path):
    with create_trace(path) as writer:
        writer.append(2, "w", [1.0])
        writer.append(2, "v", [1.0])
        writer.commit(2)
        writer.append(3, "w", [1.0])
        for call, message in REFUSED:
            with pytest.raises(UsageError, match=message) as error:
                call(writer)
            assert "\n" not in str(error.value)
    with open_trace(path) as trace:
        assert [info.name for info in trace.tensors] == ["w", "v"]
        assert trace.scalars()["step"].tolist() == [2, 3]


def test_an_existing_trace_is_replaced_only_by_force(path):
    write_trace(path)
    before = {file: file.stat().st_mtime_ns for file in path.parent.rglob("*")}
    with pytest.raises(OutputExistsError, match="already exists") as error:
        create_trace(path)
    assert error.value.exit_code == 4
    assert before == {file: file.stat().st_mtime_ns for file in path.parent.rglob("*")}
    create_trace(path, force=True).close()
    assert open_trace(path).tensors == ()
    # Damaged ones too.
    if path.suffix == ".zarr":
        (path / "rank00000").mkdir(exist_ok=True)
        (path / "rank00000" / "zarr.json").write_text("{")
    else:
        path.write_bytes(path.read_bytes()[:1000])
    write_trace(path, force=True)
    check_gradients(path, STEPS)
    assert os.listdir(path.parent) == [path.name]


def test_of_two_writers_that_start_at_the_same_moment_one_gets_the_place(path, monkeypatch):
    """The second finds nothing there, and the first moves in before it does."""
    monkeypatch.setattr("gtrace.trace.files.check_place", lambda *_, **__: write_trace_once(path))

    def write_trace_once(place):
        monkeypatch.undo()
        write_trace(place)

    with pytest.raises(OutputExistsError, match="appeared meanwhile"):
        create_trace(path)
    assert os.listdir(path.parent) == [path.name]
    check_gradients(path, STEPS)


@pytest.mark.parametrize("content", ["notes.txt", "zarr.json"])
def test_force_never_deletes_a_folder_that_is_no_trace(content, path):
    path.mkdir()
    (path / content).write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(OutputExistsError, match="not a gtrace trace"):
        create_trace(path, force=True)
    assert [entry.name for entry in path.iterdir()] == [content]
    assert os.listdir(path.parent) == [path.name]


def test_a_full_disk_is_one_line_and_loses_no_committed_step(path, tmp_path):
    """A limit on the size of files stands in for the disk; it holds for a process of its own."""
    program = textwrap.dedent("""
        import resource, signal, sys
        import numpy as np
        from gtrace.errors import TraceError
        from gtrace.trace import create_trace

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = create_trace(sys.argv[1])
        for step in range(3):
            writer.append(step, "w", np.full(5_000, step, np.float32))
            writer.commit(step)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        noise = np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32).view(np.float32)
        for action in (lambda: (writer.append(3, "x", noise), writer.commit(3)), writer.close):
            try:
                action()
            except TraceError as error:
                print(error)
    """)
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        assert line.startswith(f"{path}: cannot be written (File too large)")
    with open_trace(path) as trace:
        assert trace.scalars()["step"].tolist()[:3] == [0, 1, 2]
        assert trace.status == "interrupted"
        for step in range(3):
            assert set(trace.read("w", step)) == {step}


def test_threads_take_turns(path):
    with create_trace(path) as writer:

        def write(optimizer):
            for step in range(40):
                for k in range(3):
                    writer.append(step, f"w{k}", np.full(50, step + k + optimizer), optimizer=optimizer)
                writer.commit(step, optimizer=optimizer)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(write, range(3)))
    with open_trace(path) as trace:
        for optimizer in range(3):
            for step in range(40):
                assert set(trace.read("w1", step, optimizer=optimizer)) == {step + 1 + optimizer}


def test_a_forked_child_leaves_the_trace_alone(path, monkeypatch):
    with create_trace(path) as writer:
        writer.append(0, "w", [1.0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            with pytest.raises(UsageError, match="forked"):
                writer.append(0, "x", [1.0])
            writer.close()
        writer.append(0, "x", [2.0])
        writer.commit(0)
    trace = open_trace(path)
    assert (trace.read("x", 0).tolist(), trace.status) == ([2.0], "complete")


def test_memory_of_open_chunks_is_bounded(path, monkeypatch):
    """Past the bound tensors get chunks of one row, which are written at once."""
    monkeypatch.setattr("gtrace.trace.writer._OPEN_CHUNK_BYTES", 600 * 1024)
    arrays = {f"w{k}": gradient("w", k, 1024) for k in range(5)}
    write_arrays(path, {name: {step: array + step for step in range(3)} for name, array in arrays.items()})
    with open_trace(path) as trace:
        assert [spec.chunk_rows for spec in trace._specs.values()] == [64, 64, 1, 1, 1]
        for name, array in arrays.items():
            np.testing.assert_array_equal(trace.read(name, 2), array + 2)


def test_the_last_steps_go_into_chunk_files_at_once_and_others_may_follow(path):
    """Whether they end at a multiple of 64 rows or not, and whether the next ones come together or alone."""
    arrays = {name: np.random.default_rng(0).standard_normal((307, len(name)), np.float32) for name in ("a", "bias")}
    with create_trace(path) as writer:

        def alone(step):
            for name, values in arrays.items():
                writer.append(step, name, values[step])
            writer.commit(step)

        def together(first, stop, last):
            while first < stop:
                part = {name: values[first:stop] for name, values in arrays.items()}
                first += writer.extend(range(first, stop), part, {}, {}, last=last)

        def check(stop):
            with open_trace(path) as trace:
                for name, values in arrays.items():
                    assert trace.steps(name).tolist() == list(range(stop))
                    np.testing.assert_array_equal([trace.read(name, step) for step in range(stop)], values[:stop])

        alone(0)
        together(1, 100, last=True)
        check(100)
        alone(100)
        check(101)
        together(101, 150, last=True)
        together(150, 300, last=False)
        check(300)
        together(300, 307, last=True)
        check(307)
    check(307)
