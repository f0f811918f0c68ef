"""``--to`` of capture, train and report, with a tracker that takes the place of a package which is always there."""

import pytest

from gtrace import trackers


@pytest.fixture
def said(script, monkeypatch):
    """What was sent to the tracker ``json`` since the last call: (name, step) -> value."""
    sent = []

    def opened(place):
        assert place == "runs"
        closed = []

        def log(numbers, step):
            assert not closed
            sent.extend(((name, step), value) for name, value in numbers.items())

        return trackers.OpenTracker(log, lambda: closed.append(True))

    def taken():
        found = dict(sent)
        assert len(found) == len(sent)
        sent.clear()
        return found

    monkeypatch.setitem(trackers.KINDS, "json", (opened, "runs"))
    return taken


def test_numbers_while_it_runs_are_those_of_the_results(succeed, said):
    succeed("capture --to json -o run.zarr train.py")
    live = said()
    assert {step for _, step in live} == {0, 1, 2, 3}
    assert live["gtrace/capture/loss", 0] > 0
    shares = (live[f"gtrace/capture/energy_share/{name}", 0] for name in ("0", "2"))
    assert sum(shares) == pytest.approx(1)
    out, _ = succeed("report run.zarr --to json:runs")
    assert out == "run.zarr: 4 sets of numbers sent to json:runs\n"
    assert said() == live

    succeed("train --codec qsgdinf --bits 3 --to json -o a.jsonl train.py")
    live, start = said(), "gtrace/train/qsgdinf:bits=3"
    assert 0 < live[f"{start}/error", 2] < 1
    assert live[f"{start}/norm", 2] > 0
    succeed("report a.jsonl --to json")
    assert said() == {place: value for place, value in live.items() if not place[0].endswith("/norm")}
