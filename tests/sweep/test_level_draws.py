"""Level codecs that draw together give what each gives alone, to the last bit."""

import numpy as np
import pytest

import gtrace
from gtrace.codecs.level_sets import LevelSets, judged_together
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.kernels.compare import add_error
from gtrace.metrics import COMPARED, Reference
from gtrace.sketch import MomentSketch, SketchSet
from gtrace.sweep import level_draws
from gtrace.sweep.level_draws import LevelDraws
from gtrace.types import Key

KEY = Key(0x0123456789ABCDEF, 0xFEDCBA9876543210)
TOGETHER = [name for name in gtrace.codec_names() if judged_together(gtrace.codec(name))]
#: parameters of the scale, which all codecs of a set share
SCALES = ["", "bucket_size=1", "bucket_size=64", "bucket_size=100,tail=exact", "bucket_size=none,clip=1.5"]
#: sets: names of codecs with the same norm, and more parameters
SETS = [
    ["qsgdinf:bits=2", "zipml:bits=5", "qsgdinf:bits=3,zero=false", "zipml:bits=7", "terngrad", "qsgdinf:coder=fixed"],
    [name for name in TOGETHER if gtrace.codec(name).parameters["norm"] == "l2"] + ["alq:bits=8,zero=false"],
]


def values(kind, size):
    rng = np.random.default_rng(size)
    x = rng.standard_t(4, size).astype(np.float32)
    return {"t": x, "zeros": 0 * x, "denormal": (x * 1e-41).astype(np.float32), "gaps": x * (rng.random(size) < 0.3)}[
        kind
    ]


def check(specs, tensors, weights=None):
    """Draw several tensors by several codecs in one call, and each alone."""
    codecs = [gtrace.codec(spec) for spec in specs]
    sets, sizes = LevelSets(codecs), np.array([x.size for x in tensors])
    fitted = sets.fit(SketchSet.of([MomentSketch.from_spec(x, sets.needs) for x in tensors]), sizes)
    references = [Reference(x, weights) for x in tensors]
    keys = [Key(KEY.high + place, KEY.low) for place in range(len(tensors))]
    totals, wanted_totals = np.ones((2, len(codecs), sizes.sum()))
    # A codec without a total is drawn like the others.
    found = LevelDraws(codecs).draw(fitted, references, keys, [None, *totals[1:]])
    assert totals[0].tolist() == [1.0] * sizes.sum()
    columns = {name: np.broadcast_to(getattr(found.compared, name), found.body.size) for name in COMPARED}
    for place in range(found.body.size):
        t, c = divmod(place, len(codecs))
        item, x, start = codecs[c], tensors[t], sizes[:t].sum()
        state = item.fit(item.init(x.size), MomentSketch.from_spec(x, item.needs), 0) if x.size else item.init(0)
        sent = item.simulate(state, x, keys[t])
        add_error(x, sent.values, wanted_totals[c, start : start + x.size])
        wanted = references[t].compare(sent.values)
        for name, column in columns.items():
            assert np.array_equal(column[place], getattr(wanted, name), equal_nan=True), (str(item), t, name)
        coded = tuple(column[place] for column in found[1:])
        assert coded == (sent.payload_bytes - ENVELOPE_BYTES, *sent.coded), (str(item), t)
    np.testing.assert_array_equal(totals[1:], wanted_totals[1:])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("specs", [*SETS, ["natural", "natural:coder=fixed"]], ids=["linf", "l2", "none"])
@pytest.mark.parametrize(
    ("kind", "size"), [("t", 0), ("t", 1), ("t", 255), ("gaps", 8192), ("zeros", 257), ("denormal", 999)]
)
def test_every_codec_as_alone(scale, specs, kind, size):
    if specs[0] == "natural":
        scale = scale.split(",")[-1] if "," in scale else ""
    weights = np.random.default_rng(0).exponential(size=size) if "bucket" in scale else None
    specs = [f"{spec}{',' if ':' in spec else ':'}{scale}".rstrip(",:") for spec in specs]
    check(specs, [values(kind, size)], weights)
    check(specs, [values("t", 300), values(kind, size), values("gaps", 70)])


def test_beyond_a_block_of_sums():
    check(["qsgdinf:bits=3", "zipml:bits=6"], [values("t", (1 << 20) + 777)])


def test_pairs_beyond_the_room_are_drawn_in_turns(monkeypatch):
    monkeypatch.setattr(level_draws, "_PAIRS", 100)
    check(SETS[0], [values("t", 5000)])


def test_only_level_codecs_with_one_scale():
    alone = ("topk", "signsgd", "ef:qsgd", "mcgq", "fp", "int8", "qsgd:coder=gamma", "alq:law=truncnorm")
    assert not any(judged_together(gtrace.codec(spec)) for spec in alone)
    for specs in (["qsgd", "qsgdinf"], ["qsgd", "qsgd:bucket_size=64"], ["topk"]):
        with pytest.raises(UsageError, match="codecs that draw together must"):
            LevelDraws([gtrace.codec(spec) for spec in specs])
    item = gtrace.codec("qsgd")
    fitted = LevelSets([item]).fit(MomentSketch.from_spec([1.0, 2.0], item.needs).alone, np.array([2]))
    with pytest.raises(UsageError, match="value 1 is nan"):
        LevelDraws([item]).draw(fitted, [Reference([1.0, np.nan])], [KEY], [None])
