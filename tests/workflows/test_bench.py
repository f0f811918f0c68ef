"""A codec against the built-in ones: the protocol, the numbers, the tables, and what is kept."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gtrace.cli import gtrace as program
from gtrace.codecs import Codec, codec_names, plugins, spec
from gtrace.codecs.plugins import load_plugin
from gtrace.errors import UsageError
from gtrace.workflows import bench
from gtrace.workflows.bench import FULL, QUICK, Protocol, bench_json, bench_lines, bench_tables, duel, run_bench

DITHER = Path(__file__).resolve().parents[2] / "samples" / "my_codec" / "dither.py"
BUILT_IN = ("qsgdinf", "topk", "terngrad", "none")


class Small(Protocol):
    """The quick protocol with few built-in codecs."""

    def built_in(self) -> list[Codec]:
        return [item for name in BUILT_IN for item in self.configurations(name)]


SMALL = Small("small", QUICK.models, {"early": range(1, 3), "late": range(5, 7)}, ranges=QUICK.ranges)


def small(*specs, **options):
    """The result of the small protocol."""
    return run_bench(specs, SMALL, **{"jobs": 1} | options)


@pytest.fixture(autouse=True)
def _forget_plugins():
    """A plugin's codecs are known to the whole process."""
    before = set(codec_names())
    yield
    for name in set(codec_names()) - before:
        spec.unregister(name)
    plugins._LOADED.clear()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What a first run leaves in its cache: two traces, and the rows of the built-in codecs on them."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        small("topk")
    return folder / "gtrace" / "bench"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gtrace" / "bench"


@pytest.fixture
def warm(cache, kept):
    """A cache after a first run."""
    shutil.copytree(kept, cache)
    return cache


@pytest.fixture
def dither():
    load_plugin(DITHER)


def rows_of(table):
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def test_what_a_spec_leaves_open_runs_over_the_ranges_that_it_takes(dither):
    for text, specs in {
        "dither": [f"dither:bits={b}" for b in (2, 3, 4, 5, 6, 8)],
        "dither:bits=3": ["dither:bits=3"],
        "ef:topk": [f"ef:topk{r}" for r in ("", ":ratio=0.03", ":ratio=0.1", ":ratio=0.3")],
        "terngrad": ["terngrad"],
        "alqg": [f"alqg:bits={b}" for b in (2, 3, 4)],
    }.items():
        assert [str(item) for item in FULL.configurations(text)] == specs
    with pytest.raises(UsageError, match="did you mean dither"):
        FULL.configurations("dihter")


CURVE = st.lists(
    st.tuples(st.floats(0.5, 16), st.floats(1e-6, 10)), min_size=1, max_size=6, unique_by=lambda point: point[0]
)


@given(CURVE, CURVE)
def test_a_duel_seen_from_the_other_side_is_its_inverse(one, other):
    here, there = duel(one, other), duel(other, one)
    if np.isnan(here.error):
        assert np.isnan(there.error)
    else:
        assert here.error == pytest.approx(1 / there.error, rel=1e-6)
        assert (here.low, here.high) == (there.low, there.high)


@given(CURVE, st.floats(0.01, 100))
def test_a_duel_finds_the_factor_between_two_curves(curve, factor):
    assert duel([(b, v * factor) for b, v in curve], curve).error == pytest.approx(factor, rel=1e-6)


def test_a_duel_is_held_where_both_are_and_nowhere_else():
    curve = [(2.0, 0.8), (4.0, 0.2)]
    assert duel([(3.0, 0.1)], curve)[:3] == (pytest.approx(0.25), 3.0, 3.0)
    for elsewhere in ([(5.0, 0.1)], [], [(4.5, 0.1), (6.0, 0.01)]):
        assert np.isnan(duel(elsewhere, curve).error)
    # Half the rate at every error.
    base = [(float(b), 0.5**b) for b in (2, 3, 4, 6)]
    assert duel([(b / 2, v) for b, v in base], base).rate == pytest.approx(0.5)


def test_a_result_and_its_tables(warm, dither):
    result = small("dither")
    assert (result.mine, set(result.others)) == (("dither",), {"qsgdinf", "topk", "terngrad", "none"})
    assert [trace.name for trace in result.traces] == ["CNN early", "CNN late"]
    first, against = bench_tables(result)
    assert first.title == "Error at 3 measured bits per coordinate"
    found = {c.spec: c for c in result.analyses[0].configurations}
    low, high = found["dither:bits=2"], found["dither:bits=3"]
    part = (3 - low.bits) / (high.bits - low.bits)
    expected = low.relative_variance ** (1 - part) * high.relative_variance**part
    assert float(rows_of(first)["dither"][0]) == pytest.approx(expected, rel=0.01)
    # dither takes two bits and more, terngrad fewer: there is nothing to compare.
    assert np.isnan(result.duels["dither", "terngrad"][0].error)
    assert re.search("No bits that both reach: (none, terngrad|terngrad, none)[.]", " ".join(against.notes))
    families = ("dither", "topk")
    ours, others = ([(c.bits, c.relative_variance) for c in found.values() if c.family == f] for f in families)
    assert result.duels["dither", "topk"][0] == duel(ours, others)
    assert result.traces[0].fingerprint[:12] in " ".join(bench_lines(result))


def test_a_second_run_trains_nothing_and_says_the_same(warm, dither, monkeypatch):
    first, names = bench_json(small("dither")), sorted(warm.iterdir())
    assert len(names) == 4

    def fail(*arguments, **more):
        raise AssertionError("trained again")

    monkeypatch.setattr("gtrace.training.plain.record_task", fail)
    lines = []
    assert json.dumps(bench_json(small("dither", jobs=2, say=lines.append))) == json.dumps(first)
    assert not any("training" in line for line in lines)
    assert sorted(warm.iterdir()) == names


def test_what_is_damaged_in_the_cache_is_made_again(warm):
    first = bench_json(small("topk"))
    store = next(warm.glob("*.sweep.db"))
    store.write_bytes(store.read_bytes()[:5000])
    (warm / store.name.replace("+", "-").replace(".sweep.db", "-of-another-version.sweep.db")).write_bytes(b"")
    trace = next(warm.glob("digits-cnn-late-*.zarr"))
    chunk = max((file for file in trace.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    chunk.write_bytes(chunk.read_bytes()[:-100] + bytes(100))
    lines = []
    assert json.dumps(bench_json(small("topk", say=lines.append))) == json.dumps(first)
    assert "CNN: training for its gradients" in lines
    assert len(list(warm.iterdir())) == 4


def test_an_edited_codec_is_measured_again(warm, tmp_path):
    duels = []
    for part in ("- 0.5", "- 0.25"):
        (tmp_path / "dither.py").write_text(DITHER.read_text().replace("- 0.5", part))
        load_plugin(tmp_path / "dither.py")
        duels.append(small("dither").duels["dither", "topk"])
    assert duels[0] != duels[1]


def test_without_torch_gradients_are_made_by_formulas(cache, monkeypatch, tmp_path):
    real = bench.util.find_spec
    monkeypatch.setattr(bench.util, "find_spec", lambda name: None if name == "torch" else real(name))
    result = small("qsgdinf:bits=4")
    assert "formulas" in " ".join(bench_lines(result))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    again = small("qsgdinf:bits=4")
    assert [t.fingerprint for t in again.traces] == [t.fingerprint for t in result.traces]
    assert len({t.fingerprint for t in result.traces}) == 2


def test_the_command_prints_and_writes_tables(warm, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "QUICK", replace(SMALL, name="small-quick"))
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"COLUMNS": "100"})
    done = runner.invoke(program, ["bench", "dither", "--plugin", str(DITHER), "--quick", "-o", "a.md", "-o", "a.tex"])
    assert done.exit_code == 0, done.output
    assert "dither against the built-in codecs" in done.output
    assert "These numbers belong in no paper." in " ".join(done.output.split())
    assert "| **dither** |" in Path("a.md").read_text()
    latex = Path("a.tex").read_text()
    assert r"\textbf{dither}" in latex
    for heads, body in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", latex, re.DOTALL):
        lines = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert {line.count(" & ") + 1 for line in lines} == {len(heads)}
    said = json.loads(runner.invoke(program, ["bench", str(DITHER), "--quick", "--json"]).stdout)
    assert said["protocol"]["name"] == "small-quick"
    assert {row["codec"] for row in said["against"]} == {"dither"}
