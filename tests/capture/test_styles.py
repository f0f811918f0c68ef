"""Training loops of many styles, captured with everything on: the bits, the names, the gradients and the losses."""

import re

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from helpers_styles import STYLES


class HandWritten:
    """What each optimizer saw, noted by a wrapper around its ``step``."""

    def __init__(self):
        self.steps, self.losses, self._numbers, self._kept = {}, {}, {}, []

    def __call__(self, optimizer, *models):
        self._kept.append((optimizer, models))
        step = optimizer.step

        def noted(closure=None):
            if closure is None:
                self._note(optimizer, models)
                return step()
            return step(lambda: (closure(), self._note(optimizer, models))[0])

        optimizer.step = noted
        return optimizer

    def loss(self, optimizer, value):
        self.losses.setdefault(id(optimizer), []).append(float(value))

    def _note(self, optimizer, models):
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        names = {id(p): name for model in models for name, p in reversed(list(model.named_parameters()))}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        row = {names[id(p)]: p.grad.detach().float().clone() for p in parameters if p.grad is not None}
        self.steps.setdefault(number, []).append(row)

    def numbered_losses(self):
        return {self._numbers[key]: losses for key, losses in self.losses.items()}


def bits(trained):
    tensors = [t for one in trained for t in (one.state_dict().values() if hasattr(one, "state_dict") else [one])]
    return [tensor.numpy(force=True).tobytes() for tensor in tensors]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.capture_case(name)) for name in STYLES], ids=lambda name: name[:20]
)
def test_a_style(name, tmp_path):
    torch.manual_seed(0)
    plain = bits(STYLES[name](HandWritten()))
    torch.manual_seed(0)
    seen = HandWritten()
    with Captured(tmp_path / "run.zarr", kind="both", noise=True, optimizer_state=True) as run:
        trained = STYLES[name](seen)
    assert bits(trained) == plain
    assert [line for line in run.said if "note:" not in line] == []
    trace = run.trace
    assert trace.attrs["capture"]["errors"] == 0
    for number, rows in seen.steps.items():
        # As the program spells them: the number of a later optimizer and the class of a further model are in front.
        shown = {
            re.sub(r"^(opt\d+/)?([A-Z]\w*\.)?", "", info.name): info.name
            for info in trace.tensors
            if info.kind == "weight" and info.optimizer == number
        }
        assert shown.keys() == {name for row in rows for name in row}
        for name in shown:
            steps = [step for step, row in enumerate(rows) if name in row]
            assert trace.steps(shown[name], optimizer=number).tolist() == steps
            for step in steps:
                gradient = trace.read(shown[name], step, optimizer=number)
                assert gradient.tobytes() == rows[step][name].reshape(-1).numpy().tobytes()
    names = [(info.kind, info.name) for info in trace.tensors]
    assert len(set(names)) == len(names)
    for number, losses in seen.numbered_losses().items():
        assert np.allclose(trace.scalars(optimizer=number)["loss"], losses, rtol=1e-6)
    assert not [info.name for info in trace.tensors if "unnamed" in info.name or "~" in info.name]
