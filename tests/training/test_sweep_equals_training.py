"""Law: a sweep's draw is what training sends for the same key, of every codec, stateless or with memory."""

import numpy as np
import pytest
from helpers_variants import VARIANTS

import gtrace
from gtrace.codecs import codec
from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import Sender
from gtrace.coding import ENVELOPE_BYTES
from gtrace.metrics import Reference
from gtrace.sweep import sources
from gtrace.sweep.level_draws import LevelDraws
from gtrace.trace import Trace
from gtrace.training import Study
from gtrace.training.exchange import Exchange

SHAPES = {"conv": (16, 6, 5, 5), "fc": (20, 30), "bias": (17,)}
STEPS = 4
SEED = 11
MIXED = "prune:sparsity=0.8,allocation=heterogeneous"
#: what fits a codec in a sweep, and the schedule of training that fits it on the same gradients
FITS = {"each": "every", "once": "once"}


def gradient(name, step):
    rng = np.random.default_rng([step, len(name)])
    spread = {"conv": 2.0, "fc": 1.0, "bias": 0.5}[name]
    return (np.exp(rng.normal(0, spread, SHAPES[name])) * rng.standard_normal(SHAPES[name])).astype(np.float32)


BURST = [{name: gradient(name, step) for name in SHAPES} for step in range(STEPS)]


def swept(codec, refit, monkeypatch):
    """(tensor, step) -> what a sweep decodes at draw 0, and the bytes of its payload."""
    seen = []

    class Watched(Reference):
        def compare(self, decoded):
            seen.append((self.values, decoded.copy()))
            return super().compare(decoded)

    def draw(self, fitted, references, keys, totals):
        # Level codecs are compared as they are decoded; what arrived is the gradient and the error that adds up.
        values = np.concatenate([reference.values for reference in references])
        own = [np.zeros(values.size) for _ in totals]
        found = drawn(self, fitted, references, keys, own)
        ends = np.cumsum([reference.size for reference in references])[:-1]
        for total, errors in zip(totals, own, strict=True):
            arrived = (values + errors).astype(np.float32)
            seen.extend(zip(np.split(values, ends), np.split(arrived, ends), strict=True))
            if total is not None:
                total += errors
        return found

    drawn = LevelDraws.draw
    monkeypatch.setattr(LevelDraws, "draw", draw)
    monkeypatch.setattr(sources, "Reference", Watched)
    trace = Trace.from_arrays({name: {step: BURST[step][name] for step in range(STEPS)} for name in SHAPES})
    rows = gtrace.run_sweep(trace, [codec], seed=SEED, refit=refit, jobs=1, optimal=False).rows()
    draws = [row for row in rows if row["draw"] == 0]
    assert len(draws) == len(seen)
    found = {}
    for row in draws:
        names = SHAPES if row["tensor"] == "*" else [row["tensor"]]
        exact = np.concatenate([BURST[row["step"]][name].ravel() for name in names])
        decoded = next(decoded for values, decoded in seen if np.array_equal(values, exact))
        found[row["tensor"], row["step"]] = decoded, round(row["bits_payload"] * row["n"] / 8)
    return found


def trained(codec, refit, monkeypatch):
    """(tensor, step) -> what arrives of the only worker, and the bytes of its payload."""
    found, sent = {}, {}
    send = Sender.send

    def watched(self, values, step):
        message = send(self, values, step)
        sent[self._tensor, step] = len(message.payload) - ENVELOPE_BYTES
        return message

    monkeypatch.setattr(Sender, "send", watched)
    exchange = Exchange(codec, seed=SEED, refit=FITS[refit])
    for step, tensors in enumerate(BURST):

        def arrived(name, exact, decoded, mean, step=step):
            found[name, step] = decoded[0], sent.get((name, step))

        tally = exchange.step(step, [tensors], arrived).tally
        # Codecs whose workers add up in rounds send no messages of their own; what they add up is counted.
        found["bytes", step] = None, tally.payload_bits // 8
    return found


def assert_equal(codec, refit, monkeypatch):
    """The law, of values and of bytes."""
    ours, theirs = swept(codec, refit, monkeypatch), trained(codec, refit, monkeypatch)
    for step in range(STEPS):
        assert theirs.pop(("bytes", step))[1] == sum(size for (_, at), (_, size) in ours.items() if at == step)
    assert ours.keys() == theirs.keys()
    for key, (decoded, size) in ours.items():
        assert np.array_equal(decoded, theirs[key][0]), f"{key}: other values"
        assert theirs[key][1] in (size, None), (
            f"{key}: payload of {size} bytes in a sweep, {theirs[key][1]} in training"
        )


# What is never fitted is the same under every schedule.
@pytest.mark.parametrize(
    ("spec", "refit"),
    [
        (spec, refit)
        for spec in (*VARIANTS, MIXED, f"ef:{MIXED}")
        for refit in FITS
        if refit == "each" or gtrace.codec(spec).needs
    ],
)
def test_a_sweeps_draw_is_what_training_sends(spec, refit, monkeypatch):
    assert_equal(spec, refit, monkeypatch)


@pytest.mark.parametrize("refit", FITS)
def test_a_sweeps_draw_is_what_training_sends_with_a_plan(refit, monkeypatch):
    codecs = {"conv": gtrace.codec(MIXED), "bias": gtrace.codec(MIXED), "fc": gtrace.codec("ef:alq:bits=3")}
    assert_equal(CodecTable(gtrace.codec("none"), tensors=codecs, name="p"), refit, monkeypatch)


SPECS = {"fc1.weight": "qsgdinf:bits=3", "fc1.bias": "none", "fc2.weight": "alq:bits=2", "gone": "none"}
TABLE = CodecTable(
    codec("qsgdinf:bits=4"), tensors={n: codec(s) for n, s in SPECS.items()}, name="mine", source="dir/p l.toml"
)


class Plan:
    """What ``gtrace.load_plan`` returns, as far as training looks at it."""

    table = TABLE


def test_a_study_trains_with_a_plan_beside_a_codec():
    study = Study("digits-mlp", ["qsgdinf:bits=4", Plan()], steps=2, workers=2, eval_every=2)
    study.run()
    runs = {result.run: result for result in study.results}
    assert list(runs) == ["none", "qsgdinf:bits=4", "plan:mine"]
    assert 0 < runs["plan:mine"].tally.bits < runs["qsgdinf:bits=4"].tally.bits
    assert runs["plan:mine"].relative_variance > 0
    assert any("1 of its 4 tensors are not in this model, gone" in text for text in study.warnings)
    assert study.describe()["plans"] == [TABLE.describe()]
    assert "qsgdinf:bits=4 --plan 'dir/p l.toml' --task digits-mlp" in study.command
    assert "--codec" not in Study("digits-mlp", [TABLE], steps=1).command
