"""The error of the average after exchanges, from traces of one rank and of several."""

from dataclasses import replace

import numpy as np
import pytest

import gtrace
from gtrace.cli import main
from gtrace.report.analysis.details import exchanges_of
from gtrace.report.sections.checks import exchange_sentence, exchange_table
from gtrace.sweep.store import ResultStore
from gtrace.training.averages import COPIES, NOISY, RECORDED, ExchangePlan, RankGradients, measure_averages

SIZE = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Traces of three consecutive steps, of one step, and of two ranks."""
    place = tmp_path_factory.mktemp("averages")
    rng = np.random.default_rng(0)
    mean = rng.normal(size=SIZE)
    for name, steps, ranks in (("noisy", 3, 1), ("single", 1, 1), ("ranks", 1, 2)):
        with gtrace.create_trace(place / f"{name}.zarr") as trace:
            for step in range(steps):
                for rank in range(ranks):
                    noisy = (mean + rng.normal(size=SIZE)).astype(np.float32)
                    trace.append(step, "w", noisy, rank=rank)
                    trace.commit(step, rank=rank)
    return place


def measured(path, *names, ranks=(4,), codecs=("none", "qsgdinf:bits=4"), **options):
    plan = ExchangePlan(tuple(map(gtrace.codec, codecs)), names, ranks)
    with gtrace.open_trace(path) as trace:
        return list(measure_averages(trace, plan, **options))


@pytest.mark.parametrize(
    ("name", "ranks", "source"), [("noisy", 4, NOISY), ("single", 4, COPIES), ("ranks", 2, RECORDED)]
)
def test_where_gradients_come_from(folder, name, ranks, source):
    with gtrace.open_trace(folder / f"{name}.zarr") as trace:
        step = 1 if name == "noisy" else 0
        given = RankGradients(trace, trace.tensors[0], step, 0)
        values = given.of(ranks)
        first = trace.read("w", step, rank=0)
        spread = np.var(values, axis=0, ddof=1).mean()
    assert given.source(ranks) == source
    assert len(values) == ranks
    if name == "noisy":
        # One rank's noise has the variance 1, whatever the mean.
        assert spread == pytest.approx(1, rel=0.15)
        assert np.allclose(np.mean(given.of(256), axis=0), first, atol=0.6)
    elif name == "single":
        assert all(np.array_equal(one, first) for one in values)


def test_an_average_without_a_codec_is_exact_and_others_are_as_their_draws(folder):
    found = {what: value for _, _, what, value in measured(folder / "noisy.zarr", "allgather", "ring", ranks=(2, 8))}
    assert len(found) == 8
    assert all(value["error"] < 1e-9 * value["energy"] for what, value in found.items() if what.endswith("none"))
    alone, many = (found[f"exchange allgather {ranks} qsgdinf:bits=4"] for ranks in (2, 8))
    assert alone["error"] / many["error"] == pytest.approx(4, rel=0.3)
    assert found["exchange ring 8 qsgdinf:bits=4"]["error"] > 2 * many["error"]
    again = measured(folder / "noisy.zarr", "allgather", "ring", ranks=(2, 8))
    assert {what: value for _, _, what, value in again} == found
    left = measured(folder / "noisy.zarr", "allgather", "ring", ranks=(2, 8), done={("w", 1, what) for what in found})
    assert left == []


def test_bytes_between_nodes_are_told_apart(folder):
    ((*_, value),) = measured(folder / "single.zarr", "hierarchical:2", codecs=("fp16",))
    # Within a node half of the values go over; then a quarter crosses; then each rank sends its quarter to all.
    assert 0 < value["across"] < value["sent"] < 2 * 2 * SIZE


def test_a_sweep_keeps_exchanges_and_a_report_shows_them(folder, tmp_path, capsys):
    path = tmp_path / "out.db"
    command = ["sweep", str(folder / "noisy.zarr"), "--methods", "fp:mxfp8,alq", "--bits", "3", "--exchange"]

    def called(*words):
        with pytest.raises(SystemExit) as end:
            main(list(map(str, words)))
        return end.value.code, "".join(capsys.readouterr())

    for _ in range(2):
        code, said = called(*command, "allgather,ring,shared-scale", "--ranks", "32", "-o", path)
        assert code == 0
        assert "Where sums happen" in said
    found = exchanges_of(ResultStore.load(path))
    pairs = [(codec, way) for codec in ("alq:bits=3", "fp:mxfp8") for way in ("allgather", "ring")]
    assert [(one.codec, one.exchange) for one in found] == pairs
    (said,) = exchange_sentence(found)
    assert said.startswith(("Between 32 ranks fp:mxfp8 loses", "Between 32 ranks alq:bits=3 loses"))
    # What loses nothing in an all-gather has no multiple of that.
    assert exchange_sentence([one if one.exchange == "ring" else replace(one, error=0.0) for one in found]) == []
    table = exchange_table(found)
    assert [column.heading for column in table.columns] == ["codec", "ranks", "allgather", "ring"]
    assert called(*command, "tree", "-o", tmp_path / "other.db")[0] == 2
    assert not (tmp_path / "other.db").exists()
    assert "Where sums happen" in called("report", path, "--full")[1]
    command[3] = "alq,ef:alq,powersgd"
    said = called(*command, "hierarchical:5", "--ranks", "8", "-o", tmp_path / "none.db")[1]
    said = " ".join(said.split())
    assert "--exchange: without ef:alq:bits=3, powersgd: memories, " in said
    assert "No codec fits: sums need codes that add up (shared-scale), and ranks that are whole nodes" in said
