"""Copies through a device's own stream, with a stand-in for the device that does its work as late as it may."""

import sys
import threading

import pytest
import torch
from torch import nn

import gtrace
from gtrace.capture import layout
from gtrace.capture.buffers import BufferPool, Staging, staging_for

CPU = torch.device("cpu")


class LateEvent:
    def __init__(self, runtime):
        self._runtime = runtime
        self._after = None

    def record(self, stream):
        self._after = len(stream.work)
        self._stream = stream

    def synchronize(self):
        self._runtime.waits += 1
        self._stream.do(self._after)


class LateStream:
    """Work that is done when somebody waits for it; the training's own stream has none that waits."""

    def __init__(self):
        self.work = []
        self.done = 0
        self._lock = threading.Lock()

    def do(self, until):
        with self._lock:
            while self.done < until:
                self.work[self.done]()
                self.done += 1

    def wait_event(self, event):
        event._stream.do(event._after)


class LateRuntime:
    def __init__(self):
        self.waits = 0
        self._computing, self.copying = LateStream(), LateStream()

    def block(self, elements, *, locked=False):
        return torch.full((elements,), torch.nan)

    def event(self):
        return LateEvent(self)

    def computing(self):
        return self._computing

    def copy(self, target, source):
        self.copying.work.append(lambda: target.copy_(source))


SHAPES = [(2, 3), (4,)]


def row(value):
    return [torch.full(shape, value + place) for place, shape in enumerate(SHAPES)]


@pytest.fixture
def pool():
    return BufferPool(SHAPES, 10**6, Staging(CPU, LateRuntime(), SHAPES))


def values(buffer):
    return [target.clone() for target in buffer.targets]


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_row_is_there_when_it_was_waited_for(pool):
    buffer, gradients = pool.acquire(), row(1.0)
    buffer.fill([0, 1], gradients)
    assert torch.isnan(buffer.targets[0]).all()
    for gradient in gradients:
        gradient.zero_()  # as training does at once
    buffer.wait()
    assert same(values(buffer), row(1.0))


def test_the_next_row_waits_for_the_copy_of_the_one_before(pool):
    one, other = pool.acquire(), pool.acquire()
    one.fill([0, 1], row(1.0))
    other.fill([0, 1], row(5.0))
    other.wait()
    one.wait()
    assert same(values(one), row(1.0))
    assert same(values(other), row(5.0))


def test_a_row_without_some_gradients_and_a_buffer_that_is_used_again():
    pool = BufferPool(SHAPES, 1, Staging(CPU, LateRuntime(), SHAPES))
    buffer = pool.acquire()
    assert pool.acquire(wait=False) is None
    buffer.fill([0, 1], row(1.0))
    buffer.wait()
    buffer.release()
    assert pool.acquire() is buffer
    buffer.fill([1], row(7.0)[1:])
    buffer.wait()
    assert torch.equal(buffer.targets[1], row(7.0)[1])


def test_rows_one_after_the_other_share_memory_until_all_of_them_are_back():
    pool = BufferPool(SHAPES, 8 * 40)  # eight rows in four slabs
    rows = [pool.acquire() for _ in range(8)]
    assert pool.acquire(wait=False) is None
    assert [buffer.last for buffer in rows] == [False, True] * 4
    for number, buffer in enumerate(rows):
        buffer.fill([1], row(number)[1:])
    one, other = rows[2:4]
    assert one.slab is other.slab
    values = one.slab.values([one, other])
    assert values.base is not None
    assert values[:, one.slab.parts[1]].tolist() == [[3.0] * 4, [4.0] * 4]
    assert one.slab.values([other, one])[:, one.slab.parts[1]].tolist() == [[4.0] * 4, [3.0] * 4]
    rows[2].release()
    assert pool.acquire(wait=False) is None
    rows[3].release()
    assert [pool.acquire(wait=False) for _ in range(3)] == [rows[2], rows[3], None]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives memory ahead of its use")
def test_rows_that_follow_find_their_memory_there():
    import resource

    pool = BufferPool([(4096,)], 4 * 64 * 4096 * 4)  # four slabs of 64 rows of four pages
    gradient, first = torch.ones(4096), pool.acquire()
    assert first.ahead is None, "a single row says nothing about others"
    first.fill([0], [gradient])
    rows = [pool.acquire() for _ in range(32)]
    for ahead in [buffer.ahead for buffer in rows]:
        if ahead is not None:
            ahead()
    assert first.targets[0].tolist() == [1.0] * 4096
    rows += [pool.acquire() for _ in range(31 + 8)]
    assert pool.acquire().slab is rows[-1].slab is not first.slab
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for buffer in rows:
        buffer.fill([0], [gradient])
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 64
    assert [buffer.ahead for buffer in rows[:63]] == [None] * 63, "all of the slab is there"


def test_gradients_that_are_elsewhere_are_copied_at_once():
    runtime = LateRuntime()
    buffer = BufferPool(SHAPES, 10**6, Staging(torch.device("meta"), runtime, SHAPES)).acquire()
    buffer.fill([0, 1], row(1.0))
    assert same(values(buffer), row(1.0))
    buffer.wait()
    assert runtime.waits == 0


def test_what_needs_no_staging():
    assert staging_for([CPU, CPU], SHAPES) is None
    assert staging_for([CPU, torch.device("cuda", 0)], SHAPES) is None
    assert staging_for([], SHAPES) is None


def test_a_whole_capture_by_way_of_a_device(tmp_path, monkeypatch):
    runtime = LateRuntime()
    monkeypatch.setattr(layout, "staging_for", lambda _devices, shapes: Staging(CPU, runtime, shapes))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with gtrace.capture.record(model, optimizer, tmp_path / "run.zarr"):
        for _ in range(6):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(7, 5)).square().sum().backward()
            seen.append({name: parameter.grad.clone().numpy() for name, parameter in model.named_parameters()})
            optimizer.step()
    trace = gtrace.open_trace(tmp_path / "run.zarr")
    assert runtime.waits == 6
    for step, gradients in enumerate(seen):
        for name, gradient in gradients.items():
            assert (trace.read(name, step) == gradient.reshape(-1)).all()
