"""``--to`` of capture, train and report, with stand-ins for the modules of TensorBoard's package."""

import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def said(script, monkeypatch):
    """What was sent to the folder ``runs`` since the last call: (name, step) -> value."""
    sent = []

    class EventFileWriter:
        def __init__(self, place):
            assert place == "runs"
            self.open = True

        def add_event(self, event):
            assert self.open
            sent.extend(((one.tag, event.step), one.simple_value) for one in event.summary.value)

        def close(self):
            self.open = False

    class Summary(SimpleNamespace):
        Value = SimpleNamespace

    for name, module in {
        "tensorboard": SimpleNamespace(__spec__="installed"),
        "tensorboard.summary.writer.event_file_writer": SimpleNamespace(EventFileWriter=EventFileWriter),
        "tensorboard.compat.proto.event_pb2": SimpleNamespace(Event=SimpleNamespace),
        "tensorboard.compat.proto.summary_pb2": SimpleNamespace(Summary=Summary),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)

    def taken():
        found = dict(sent)
        assert len(found) == len(sent)
        sent.clear()
        return found

    return taken


def test_numbers_while_it_runs_are_those_of_the_results(succeed, said):
    succeed("capture --to tensorboard -o run.zarr train.py")
    live = said()
    assert {step for _, step in live} == {0, 1, 2, 3}
    assert live["gtrace/capture/loss", 0] > 0
    shares = (live[f"gtrace/capture/energy_share/{name}", 0] for name in ("0", "2"))
    assert sum(shares) == pytest.approx(1)
    out, _ = succeed("report run.zarr --to tensorboard:runs")
    assert out == "run.zarr: 4 sets of numbers sent to tensorboard:runs\n"
    assert said() == live

    succeed("train --codec qsgdinf --bits 3 --to tensorboard -o a.jsonl train.py")
    live, start = said(), "gtrace/train/qsgdinf:bits=3"
    assert 0 < live[f"{start}/error", 2] < 1
    assert live[f"{start}/norm", 2] > 0
    succeed("report a.jsonl --to tensorboard")
    assert said() == {place: value for place, value in live.items() if not place[0].endswith("/norm")}


def test_a_task_and_what_cannot_be_sent(succeed, refuse, said, folder):
    small = "--task digits-mlp --steps 2 --batch-size 2 --workers 2"
    succeed(f"train --codec qsgd --bits 3 {small} --to tensorboard -o b.jsonl")
    assert said()["gtrace/train/none/bits_per_value", 1] == 32
    (folder / "plan.toml").write_text('format = "gtrace-plan"\n')
    err = refuse("report b.jsonl plan.toml --to tensorboard")
    assert err == "gtrace: plan.toml: a plan has no steps to send; name a trace, a sweep or a run log\n"
    assert not said()
