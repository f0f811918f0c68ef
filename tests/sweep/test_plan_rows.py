"""Law: every property of a codec holds inside a plan. Rows of a plan are those of its tensors' codecs."""

import numpy as np
import pytest
from helpers_variants import VARIANTS

import gtrace
from gtrace.codecs.assignment import CodecTable
from gtrace.errors import UsageError
from gtrace.trace import Trace

SIZES = {"conv": 700, "fc": 300, "bias": 12}
MIXED = "prune:sparsity=0.8,allocation=heterogeneous"
ALL = [*VARIANTS, MIXED, f"ef:{MIXED}"]
#: which codec a row is of; a plan's rows carry the plan's name instead
NAMING = ("codec", "method", "bits", "params")
_CHUNKED = """
qsgd:bits=4,bucket_size=100  qsgdinf:bits=4,bucket_size=none  terngrad:clip=2.5  natural  alq:bits=3,bucket_size=512
fp:e4m3fn  signsgd  bf16  prune  none  int8:block_size=none  ef:topk
"""
CHUNKED = [*_CHUNKED.split(), MIXED]


def gradient(name, step):
    rng = np.random.default_rng([step, SIZES[name]])
    return (np.exp(rng.normal(0, SIZES[name] / 300, SIZES[name])) * rng.standard_normal(SIZES[name])).astype(np.float32)


def trace(steps=4):
    return Trace.from_arrays({name: {step: gradient(name, step) for step in range(steps)} for name in SIZES})


def plan(spec, tensors=(), default="none"):
    """A plan with this codec for some tensors, or for all."""
    named = {name: gtrace.codec(spec) for name in tensors}
    return CodecTable(gtrace.codec(default if tensors else spec), tensors=named, name="p")


def rows_by_key(result):
    return {
        (r["tensor"], r["step"], r["draw"]): {name: r[name] for name in r if name not in NAMING} for r in result.rows()
    }


def assert_same_rows(plans, own):
    assert plans.keys() == own.keys()
    for key, row in own.items():
        for name, value in row.items():
            found = plans[key][name]
            assert found == value or (found != found and value != value), f"{key}: {name} {found}, alone {value}"


@pytest.fixture(scope="module")
def alone_and_planned():
    """Rows of every codec and of a plan of it alone, by the plan's name, which ends in the codec's number."""
    tables = [CodecTable(gtrace.codec(spec), name=str(k)) for k, spec in enumerate(ALL)]
    named = {str(table.codec): str(table) for table in tables}
    assert len(named) == len(ALL)
    swept = {False: gtrace.run_sweep(trace(3), ALL, jobs=1), True: gtrace.run_sweep(trace(3), tables, jobs=1)}
    found = {str(table): {False: {}, True: {}} for table in tables}
    for planned, result in swept.items():
        for row in result.rows():
            rows = found[row["codec"] if planned else named[row["codec"]]][planned]
            rows[row["tensor"], row["step"], row["draw"]] = {name: row[name] for name in row if name not in NAMING}
    return found


@pytest.mark.parametrize("spec", ALL)
def test_rows_of_a_plan_are_those_of_its_codec(spec, alone_and_planned):
    found = alone_and_planned[f"plan:{ALL.index(spec)}"]
    assert found[True]
    assert_same_rows(found[True], found[False])


@pytest.mark.parametrize("spec", CHUNKED)
def test_rows_of_a_plan_are_those_of_its_codec_on_tensors_of_many_chunks(spec):
    chunk = 512 if "512" in spec else 100
    large = Trace.from_arrays({"w": {s: np.tile(gradient("conv", s), 4) for s in range(2)}})
    ours = gtrace.run_sweep(large, [plan(spec)], jobs=1, chunk=chunk)
    theirs = gtrace.run_sweep(large, [spec], jobs=1, chunk=chunk)
    assert_same_rows(rows_by_key(ours), rows_by_key(theirs))
    assert ours.warnings == theirs.warnings


def test_tensors_of_one_codec_in_a_plan_share_out_among_themselves():
    some = ("conv", "bias")
    rows = rows_by_key(gtrace.run_sweep(trace(), [plan(MIXED, some)], jobs=2))
    alone = rows_by_key(gtrace.run_sweep(trace(), [MIXED], tensors=some, jobs=1))
    assert_same_rows({key: row for key, row in rows.items() if key[0] in some}, alone)
    both = gtrace.run_sweep(trace(), [plan(MIXED, some), MIXED], jobs=2)
    named = {name: [r for r in both.rows() if (r["codec"] == "plan:p") == (name == "plan")] for name in ("plan", "own")}
    shares = {
        name: [r["sparsity_asked"] for r in found if r["tensor"] == "conv" and r["step"] == 2 and r["draw"] == 0]
        for name, found in named.items()
    }
    assert shares["plan"] != shares["own"]
    assert len(named["own"]) == 3 * 4 * 2


def test_a_plan_joins_and_leaves_a_sweep_without_touching_its_codecs(tmp_path):
    out = tmp_path / "s.sweep.db"
    specs = ["qsgdinf:bits=3", "ef:topk:ratio=0.1"]
    mine = CodecTable(gtrace.codec(specs[0]), tensors={"fc": gtrace.codec(specs[1])}, name="p")
    whole = gtrace.run_sweep(trace(), [*specs, mine])
    gtrace.run_sweep(trace(), specs, output=out)
    later = gtrace.run_sweep(trace(), [mine], output=out, draws=2)
    key = ("tensor", "step", "codec", "draw")
    rows = {tuple(r[k] for k in key): r for r in later.rows()}
    for row in whole.rows():
        assert rows[tuple(row[k] for k in key)] == pytest.approx(row, nan_ok=True)
    assert {r["codec"] for r in later.rows() if r["draw"] == 1} == {"plan:p"}


def test_a_codec_over_the_whole_model_leaves_no_tensor_to_another_codec():
    whole = "fp:bits=8,scope=model"
    assert set(gtrace.run_sweep(trace(), [plan(whole)])["tensor"]) == {"*"}
    with pytest.raises(UsageError, match="leaves no tensor to another codec"):
        gtrace.run_sweep(trace(), [plan(whole, ["fc"])])
