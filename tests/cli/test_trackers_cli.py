"""``--to`` of capture, train and report, with a stand-in for TensorBoard's package that writes lines of text."""

import json
import sys

import pytest
from helpers_capture import write_script

MODULES = {
    "compat/proto/event_pb2": """
        from types import SimpleNamespace as Event
        """,
    "compat/proto/summary_pb2": """
        from types import SimpleNamespace

        class Summary(SimpleNamespace):
            Value = SimpleNamespace
        """,
    "summary/writer/event_file_writer": """
        import json
        from pathlib import Path

        class EventFileWriter:
            def __init__(self, folder):
                Path(folder).mkdir(exist_ok=True)
                self.file = (Path(folder) / "said.jsonl").open("a")

            def add_event(self, event):
                for one in event.summary.value:
                    self.file.write(json.dumps([one.tag, one.simple_value, event.step]) + "\\n")

            def close(self):
                self.file.close()
        """,
}
SCRIPT = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    """


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        place = tmp_path / "site" / "tensorboard" / f"{name}.py"
        write_script(place, text)
        for above in place.relative_to(tmp_path / "site").parents[:-1]:
            # A package of its own, so that an installed one is not taken for it.
            (tmp_path / "site" / above / "__init__.py").touch()
    # Before installed packages, but not first: a script that runs has its own folder there.
    monkeypatch.setattr(sys, "path", [sys.path[0], str(tmp_path / "site"), *sys.path[1:]])
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path / "train.py", SCRIPT)
    yield tmp_path
    for name in loaded():
        del sys.modules[name]


def loaded():
    return [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]


def said(folder):
    lines = [json.loads(line) for line in (folder / "runs" / "said.jsonl").read_text().splitlines()]
    (folder / "runs" / "said.jsonl").unlink()
    assert len({(name, step) for name, _, step in lines}) == len(lines)
    return {(name, step): value for name, value, step in lines}


def test_numbers_while_it_runs_are_those_of_the_results(call, folder):
    assert call("capture", "--to", "tensorboard", "-o", "run.zarr", "train.py")[0] == 0
    live = said(folder)
    assert {step for _, step in live} == {0, 1, 2}
    assert live["gtrace/capture/loss", 0] > 0
    assert live["gtrace/capture/energy_share/bias", 0] + live["gtrace/capture/energy_share/weight", 0] == pytest.approx(
        1
    )
    code, out, _ = call("report", "run.zarr", "--to", "tensorboard:runs")
    assert (code, out) == (0, "run.zarr: 3 sets of numbers sent to tensorboard:runs\n")
    assert said(folder) == live

    assert (
        call("train", "--codec", "qsgdinf", "--bits", "3", "--to", "tensorboard", "-o", "a.jsonl", "train.py")[0] == 0
    )
    live = said(folder)
    start = "gtrace/train/qsgdinf:bits=3"
    assert 0 < live[f"{start}/error", 2] < 1
    assert live[f"{start}/norm", 2] > 0
    call("report", "a.jsonl", "--to", "tensorboard")
    assert said(folder) == {place: value for place, value in live.items() if not place[0].endswith("/norm")}


def test_a_task_and_what_cannot_be_sent(call, folder):
    small = ["--task", "digits-mlp", "--steps", "2", "--batch-size", "2", "--workers", "2"]
    assert call("train", "--codec", "qsgd", "--bits", "3", *small, "--to", "tensorboard", "-o", "b.jsonl")[0] == 0
    assert said(folder)["gtrace/train/none/bits_per_value", 1] == 32
    (folder / "plan.toml").write_text('format = "gtrace-plan"\n')
    code, _, err = call("report", "b.jsonl", "plan.toml", "--to", "tensorboard")
    assert (code, err) == (2, "gtrace: plan.toml: a plan has no steps to send; name a trace, a sweep or a run log\n")
    assert not (folder / "runs" / "said.jsonl").exists()
    for command in (["capture"], ["train", "--codec", "qsgd"]):
        code, _, err = call(*command, "--to", "tensorbord", "train.py")
        assert (code, err) == (2, "gtrace: --to tensorbord: unknown tracker 'tensorbord'; did you mean tensorboard?\n")
