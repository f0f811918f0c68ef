"""Copies through a device's own stream, with a stand-in for the device that does its work as late as it may."""

import resource
import sys
import threading

import pytest
import torch
from helpers_capture import Captured
from torch import nn

from gtrace.capture import layout
from gtrace.capture.buffers import BufferPool, Staging

CPU = torch.device("cpu")
SHAPES = [(2, 3), (4,)]


class LateStream:
    """Work that is done when somebody waits for it; the training's own stream has none that waits."""

    def __init__(self):
        self.work, self._done, self._lock = [], 0, threading.Lock()

    def wait_event(self, event):
        event.stream.finish(event.after)

    def finish(self, count):
        with self._lock:
            while self._done < count:
                self.work[self._done]()
                self._done += 1


class LateEvent:
    def __init__(self, staging):
        self._staging = staging

    def record(self, stream):
        self.stream, self.after = stream, len(stream.work)

    def synchronize(self):
        self._staging.waits += 1
        self.stream.finish(self.after)


class LateStaging(Staging):
    def __init__(self, shapes):
        self.waits = 0
        self._computing, self.copying = LateStream(), LateStream()
        super().__init__(CPU, shapes)

    def block(self, elements, *, locked=False):
        return torch.full((elements,), torch.nan)

    def event(self):
        return LateEvent(self)

    def computing(self):
        return self._computing

    def send(self, target, block):
        self.copying.work.append(lambda: target.copy_(block))


def row(value):
    return [torch.full(shape, value + place) for place, shape in enumerate(SHAPES)]


def holds(buffer, expected):
    return all(torch.equal(one, other) for one, other in zip(buffer.targets, expected, strict=True))


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
    one.release()
    assert pool.acquire(wait=False) is None
    other.release()
    assert [pool.acquire(wait=False) for _ in range(3)] == [one, other, None]


def test_a_whole_capture_by_way_of_a_device(path, monkeypatch):
    """With room for one row, which is used again; one step lacks a gradient."""
    made = []
    monkeypatch.setattr(layout, "staging_for", lambda _devices, shapes: made.append(LateStaging(shapes)) or made[-1])
    with Captured(path, queue_bytes=1) as run:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        optimizer = run.sgd(model)
        for step in range(6):
            model(torch.randn(7, 5)).square().mean().backward()
            if step == 3:
                model[1].bias.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # in place, and at once
    run.check([name for name, _ in model.named_parameters()])
    assert sum(staging.waits for staging in made) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives memory ahead of its use")
def test_rows_that_follow_find_their_memory_there():
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
