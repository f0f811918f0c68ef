"""Codecs that are judged together, on tensors that go together, give the rows that each gives alone."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from helpers_sweep import rows_of

import gtrace
from gtrace.codecs import expecting
from gtrace.codecs.level_sets import judged_together
from gtrace.sweep import engine, replay
from gtrace.sweep.gradients import Gradients
from gtrace.sweep.jobs import Job, Settings
from gtrace.sweep.replay import Replay, batches
from gtrace.trace import Trace

_SPECS = """
qsgd:bits=2  qsgd:bits=8  qsgd:bits=3,zero=False  qsgd:bits=3,coder=fixed  qsgd:bits=3,coder=elias
qsgd:bits=3,bucket_size=none  qsgd:bits=3,bucket_size=7,tail=exact  qsgdinf:bits=5,zero=False,bucket_size=1
nuqsgd:bits=8,p=0.1  nuqsgd:bits=4,p=0.9,zero=False  terngrad:clip=2.5  natural
alq:bits=3  amq:bits=2  amq:bits=5  zipml:bits=3  zipml:bits=3,zero=False  alq:bits=3,law=truncnorm
"""
VARIANTS = _SPECS.split()


@pytest.fixture(scope="module")
def trace():
    rng = np.random.default_rng(0)
    t = {k: (rng.standard_t(3, 5000) * 10.0 ** (-k)).astype(np.float32) for k in range(4)}
    steps = {name: {} for name in ("t", "empty of news", "one", "tiny", "huge", "infinite")}
    for k in range(4):
        steps["t"][k] = t[k]
        # The same twice: nothing new is sent at the second step.
        steps["empty of news"][k] = t[k // 2] if k < 3 else np.zeros(5000)
        steps["one"][k] = [float(k)]
        steps["tiny"][k] = t[k][:300] * np.float32(1e-42)
        steps["huge"][k] = np.full(100, 3e38 if k % 2 else -1.0)
        steps["infinite"][k] = np.where(np.arange(100) == k, np.inf, t[k][:100]) if k == 2 else t[k][:100]
    return Trace.from_arrays(steps)


def both_ways(trace, specs, monkeypatch, **options):
    """Rows of codecs that are judged alone on tensors that go alone, and those of the same codecs together."""
    with monkeypatch.context() as patch:
        patch.setattr(replay, "judged_together", lambda _codec: False)
        patch.setattr(replay, "_SMALL", -1)
        alone = rows_of(gtrace.run_sweep(trace, specs, jobs=1, **options))
    return alone, rows_of(gtrace.run_sweep(trace, specs, jobs=1, **options))


@pytest.mark.parametrize("refit", ["pooled", "previous", "each", "once", [1, 3]])
def test_a_table_holds_the_rows_of_its_codecs(trace, monkeypatch, refit):
    options = {"draws": 0, "refit": refit, "nonfinite": "zero" if refit == "each" else "skip"}
    alone, together = both_ways(trace, VARIANTS, monkeypatch, **options)
    assert len(together) == len(VARIANTS) * 6 * 4
    assert together == alone


def test_every_codec_of_the_registry_gives_the_same_rows(trace, monkeypatch):
    codecs = [gtrace.codec(name) for name in gtrace.codec_names()]
    codecs = [item for item in codecs if expecting(item) and not item.stateful]
    assert sum(map(judged_together, codecs)) >= 5
    alone, together = both_ways(trace, codecs, monkeypatch, draws=0, tensors=["t"], steps=[0, 1])
    assert len(together) == len(codecs) * 2
    assert together == alone


def test_draws_are_tables_too(trace, monkeypatch):
    alone, together = both_ways(trace, VARIANTS, monkeypatch, draws=2, tensors=["t", "one", "infinite"])
    assert together == alone


def test_small_tensors_go_together_while_they_want_the_same(trace, tmp_path):
    rng = np.random.default_rng(1)
    late = {step: rng.standard_normal(50) for step in range(2, 4)}
    found = Trace.from_arrays(
        {f"w{k}": {step: rng.standard_normal(40000 if k > 5 else 3) for step in range(4)} for k in range(8)}
        | {"late": late}
    )
    source = Gradients(found, None, None, 1 << 20)
    wanted = ((0, ((gtrace.codec("qsgd"), (-1,)),)),)
    jobs = [Job(info.name, 32, source.steps[info.name], wanted, size=info.size) for info in source.infos]
    together = [[job.tensor for job in batch] for batch in batches(source, [*jobs, replace(jobs[0], tensor="*")], 1)]
    assert together == [["w0", "w1", "w2", "w3", "w4", "w5"], ["late"], ["w6"], ["w7"], ["*"]]
    assert [len(batch) for batch in batches(source, jobs, 2)] == [4, 2, 1, 1, 1]
    asks_more = replace(jobs[1], wanted=((1, wanted[0][1]),))
    assert len(batches(source, [jobs[0], asks_more], 1)) == 2
    # Rows of a sweep that was resumed in pieces, by batches of other tensors.
    path, specs = tmp_path / "a.db", ["alq:bits=3", "ef:qsgd", "topk"]
    gtrace.run_sweep(found, specs[:1], tensors=["w[135]"], steps=[0, 3], output=path, jobs=1)
    assert rows_of(gtrace.run_sweep(found, specs, output=path, jobs=2)) == rows_of(gtrace.run_sweep(found, specs))


@pytest.mark.parametrize("jobs", [1, 2])
def test_before_there_are_workers_one_small_tensor_loads_the_kernels(jobs, monkeypatch):
    seen = []
    spread = engine.spread
    monkeypatch.setattr(engine, "spread", lambda tasks, *rest: (seen.append(list(tasks)), spread(tasks, *rest))[1])
    rng = np.random.default_rng(2)
    found = Trace.from_arrays({f"w{k}": {0: rng.standard_normal(3 if k else 40000)} for k in range(6)})
    gtrace.run_sweep(found, ["qsgd"], jobs=jobs)
    assert [len(batch) for batch in seen[0]] == ([1, 5] if jobs == 1 else [1, 4, 1])


def test_jobs_settings_and_blocks_travel_between_processes(trace):
    wanted = tuple((index, tuple((gtrace.codec(spec), (-1, 0)) for spec in VARIANTS)) for index in range(4))
    job = Job("t", 32, (0, 1, 2, 3), wanted, size=5000)
    sent_job, settings = pickle.loads(pickle.dumps((job, Settings(seed=3, optimal=True))))
    assert sent_job == job
    source = Gradients(trace, None, None, 1 << 20)
    here = list(Replay(source, [job], Settings(seed=3, optimal=True)).blocks())
    there = pickle.loads(pickle.dumps(list(Replay(source, [sent_job], settings).blocks())))
    for a, b in zip(here, there, strict=True):
        assert repr(a.rows) == repr(b.rows)
        assert [repr(table) for table in a.tables] == [repr(table) for table in b.tables]
        assert a.details == b.details
        assert len(a.tables) > 0
