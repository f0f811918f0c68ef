"""A sweep on a Dask cluster gives the rows of one on threads, whatever is lost on the way."""

import os
import pickle
import sqlite3
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from helpers_sweep import PLUGIN, rows_of, write_trace

import gtrace
from gtrace.cli import main
from gtrace.codecs.assignment import CodecTable
from gtrace.errors import TraceError, UsageError
from gtrace.sweep import ResultStore
from gtrace.sweep import cluster as tasks_module
from gtrace.sweep.cluster import _Arrivals, cut

distributed = pytest.importorskip("distributed")
dask = pytest.importorskip("dask")

CODECS = ["none", "qsgdinf:bits=3,bucket_size=512", "alq:bits=3", "ef:topk", "prune:sparsity=0.8", "qsgd:scope=model"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "run.zarr", steps=range(5))


@pytest.fixture(scope="module")
def local(trace):
    return gtrace.run_sweep(trace, CODECS, jobs=1)


@pytest.fixture(scope="module")
def cluster():
    # Whoever asks a worker that was killed for something waits so long.
    patience = dask.config.set({"distributed.comm.timeouts.connect": "5s"})
    with (
        patience,
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit=0, silence_logs=60
        ) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def client(cluster):
    with distributed.Client(cluster, set_as_default=False) as made:
        yield made
        # Closing a cluster that does not know yet that a killed worker came back is a KeyError. Some never do.
        deadline = time.monotonic() + 20
        while len(known := set(cluster.scheduler_info["workers"])) < 2 or known != set(cluster.scheduler.workers):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


@pytest.fixture(autouse=True)
def short_tasks(monkeypatch):
    """Tasks of a few steps, so that a small trace makes many."""
    monkeypatch.setattr("gtrace.sweep.cluster.TASK_SECONDS", 0.01)


def same(one, other):
    return rows_of(one) == rows_of(other) and one.details == other.details and one.warnings == other.warnings


def test_rows_are_those_of_one_two_and_four_threads(trace, local, client):
    for jobs in (2, 4):
        assert same(gtrace.run_sweep(trace, CODECS, jobs=jobs), local)
    seen = []
    found = gtrace.run_sweep(trace, CODECS, scheduler=client, progress=lambda *told: seen.append(told))
    assert same(found, local)
    assert seen == [(count, len(seen)) for count in range(1, len(seen) + 1)]


def test_workers_sweep_a_plan_and_share_out_among_its_tensors(trace, client):
    mixed = gtrace.codec("prune:sparsity=0.8,allocation=heterogeneous")
    tensors = {"conv.weight": mixed, "fc.bias": mixed, "fc.weight": gtrace.codec("ef:topk")}
    given = [CodecTable(gtrace.codec("none"), tensors=tensors, name="p"), mixed, "ef:topk"]
    assert same(gtrace.run_sweep(trace, given, scheduler=client), gtrace.run_sweep(trace, given, jobs=1))


@pytest.mark.parametrize("seconds", [0.01, 1e9])
def test_what_was_done_before_ctrl_c_is_kept_and_not_done_again(trace, local, client, tmp_path, monkeypatch, seconds):
    path = tmp_path / "o.db"
    # Everything in one task: its blocks come while it is at work.
    monkeypatch.setattr("gtrace.sweep.cluster.cut", lambda jobs, _: cut(jobs, seconds))

    def stop(done, _total):
        if done == 5:
            # The one task is not over, so these came while it was at work.
            assert seconds < 1e9 or any(client.processing().values())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gtrace.run_sweep(trace, CODECS, scheduler=client, output=path, progress=stop)
    kept = ResultStore.load(path)
    assert 0 < len(kept) < len(local)
    assert set(rows_of(kept)) <= set(rows_of(local))
    left = {(r["tensor"], r["step"]) for r in local.rows()} - {(r["tensor"], r["step"]) for r in kept.rows()}
    seen = []
    assert same(
        gtrace.run_sweep(trace, CODECS, scheduler=client, output=path, progress=lambda *t: seen.append(t)), local
    )
    assert len(seen) == len(left)
    # Each row was timed once: nothing was computed again.
    with sqlite3.connect(path) as sql:
        timed = sql.execute("SELECT tensor, step, codec, draw FROM times WHERE stage = 'encode'").fetchall()
    sql.close()
    assert len(timed) == len(set(timed))


def test_a_sweep_that_was_killed_goes_on(trace, local, cluster, client, tmp_path):
    path, address = tmp_path / "o.db", cluster.scheduler_address
    code = (
        "import sys, time, gtrace; from gtrace.sweep import cluster; cluster.TASK_SECONDS = 0.01\n"
        "gtrace.run_sweep(sys.argv[1], sys.argv[4:], scheduler=sys.argv[2], output=sys.argv[3], "
        "progress=lambda done, total: time.sleep(done > 2 and 600))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(trace), address, str(path), *CODECS])
    try:
        while child.poll() is None and not (path.exists() and rows_in(path)):
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    assert 0 < len(ResultStore.load(path)) < len(local)
    assert same(gtrace.run_sweep(trace, CODECS, scheduler=client, output=path), local)


def rows_in(path):
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as sql:
        try:
            return sql.execute("SELECT count(*) FROM rows").fetchone()[0]
        except sqlite3.OperationalError:
            return 0


def test_the_command_takes_a_scheduler_file_and_plugins(trace, cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("scheduler.json").write_text(f'{{"address": "{cluster.scheduler_address}"}}')
    Path("mine.py").write_text(PLUGIN)
    words = ["sweep", str(trace), "--methods", "mine,qsgd", "--bits", "2-3", "--plugin", "mine.py", "--steps", "0-2"]
    for more in (["--scheduler", "scheduler.json", "-o", "there.db"], ["--jobs", "1", "-o", "here.db"]):
        with pytest.raises(SystemExit, match="0"):
            main([*words, *more])
    assert capsys.readouterr().err == ""
    there, here = ResultStore.load(Path("there.db")), ResultStore.load(Path("here.db"))
    assert len(there) == 3 * 3 * (1 + 2 * 2)
    assert same(there, here)


def test_codecs_of_this_process_alone_are_refused(trace, client, monkeypatch):
    own = type(gtrace.codec("none"))
    monkeypatch.setattr(own, "__module__", "__main__")
    with pytest.raises(UsageError, match=r"workers do not know the codec none.*--plugin"):
        gtrace.run_sweep(trace, ["none"], scheduler=client)


def test_a_worker_that_cannot_open_the_trace_is_named(trace, client, tmp_path):
    moved = write_trace(tmp_path / "run.zarr")
    with gtrace.open_trace(moved) as opened:
        assert opened.fingerprint
        # The sweep looks for gradient noise in them before it asks any worker.
        assert all(opened.statistics(info.name) for info in opened.tensors)
        os.rename(moved, tmp_path / "elsewhere.zarr")
        with pytest.raises(TraceError, match=rf"worker tcp://[\d.:]+: cannot open {moved} \(no such trace"):
            gtrace.run_sweep(opened, ["qsgd"], draws=0, scheduler=client)
        write_trace(moved, seed=1)
        with pytest.raises(TraceError, match=r"worker tcp.*run\.zarr: the trace here differs from the sender"):
            gtrace.run_sweep(opened, ["qsgd"], draws=0, scheduler=client)


def test_another_version_on_the_workers_is_refused(trace, client, monkeypatch):
    monkeypatch.setattr(gtrace, "__version__", "9.9")
    with pytest.raises(UsageError, match=r"worker tcp://[\d.:]+: it runs gtrace 0\S* and this is gtrace 9\.9"):
        gtrace.run_sweep(trace, ["none"], scheduler=client)
    monkeypatch.undo()
    monkeypatch.setattr(tasks_module, "build", lambda: f"{gtrace.__version__}+abc")
    with pytest.raises(UsageError, match=r"worker tcp://.*: its gtrace \S+ has different source code"):
        gtrace.run_sweep(trace, ["none"], scheduler=client)


def test_what_cannot_be_sent_or_reached_is_told(trace, tmp_path, client, monkeypatch):
    with pytest.raises(UsageError, match=r"--jobs: sets workers"):
        gtrace.run_sweep(trace, ["none"], scheduler=client, jobs=2)
    with pytest.raises(UsageError, match="a trace in memory cannot be sent"):
        gtrace.run_sweep(gtrace.Trace.from_arrays({"w": [1.0]}), ["none"], scheduler=client)
    monkeypatch.setattr("gtrace.sweep.cluster.CONNECT_SECONDS", 0.2)
    (tmp_path / "other.json").write_text("{}")
    for scheduler, said in (
        ("tcp://127.0.0.1:1", r"no Dask scheduler answers at tcp://127\.0\.0\.1:1 within"),
        (tmp_path / "none.json", r"none\.json: no such file; give tcp://HOST:PORT"),
        (tmp_path / "other.json", "not the file of a Dask scheduler"),
        ("local:0", "local:0: no such file; give"),
    ):
        with pytest.raises(UsageError, match=said):
            gtrace.run_sweep(trace, ["none"], scheduler=scheduler, output=tmp_path / "o.db")
    assert not (tmp_path / "o.db").exists()


def test_without_dask_one_line_says_what_to_install(trace, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install 'gradtrace\[dask\]'"):
        gtrace.run_sweep(trace, ["none"], scheduler="local:2")


@pytest.mark.parametrize("stage", ["task", "open", "fit", "block", "report", "result"])
def test_a_worker_that_is_killed_at_any_stage_loses_nothing(stage, trace, local, cluster, client, tmp_path):
    def doom(stage, dask_worker):
        """A worker dies when it comes to this stage."""
        import os

        from gtrace.sweep import cluster, replay

        def die(*_, **__):
            os.kill(os.getpid(), 9)

        def one(*_):
            yield from (block for block, _ in zip(blocks(*_), range(1), strict=False))
            die()

        cluster._bench.cache_clear()
        blocks = replay.Replay.blocks
        if stage == "block":
            replay.Replay.blocks = one
        elif stage == "report":
            dask_worker.log_event = die
        elif stage == "result":
            dask_worker.handlers["get_data"] = die
        else:
            setattr(cluster, {"task": "_work", "open": "open_trace", "fit": "Allocation"}[stage], die)

    try:
        client.wait_for_workers(2, timeout=20)
    except TimeoutError:
        # Dask's nanny does not always start a worker again on a busy machine.
        cluster.scale(len(cluster.workers) + 1)
        client.wait_for_workers(2, timeout=60)
    pids = client.run(os.getpid)
    client.run(doom, stage, workers=list(pids)[:1])
    found = gtrace.run_sweep(trace, CODECS, scheduler=client, output=tmp_path / "o.db")
    assert same(found, local)
    with pytest.raises(ProcessLookupError):
        os.kill(next(iter(pids.values())), 0)


def test_blocks_are_handed_over_once_whatever_comes_twice_or_not_at_all():
    def said(first, *blocks):
        arrivals.heard((0.0, {"task": "a", "first": first, "blocks": zlib.compress(pickle.dumps(blocks))}))
        arrivals.drain()

    got = []
    arrivals = _Arrivals(got.append)
    arrivals.begin("a")
    said(0, "x", "y")
    said(0, "x", "y", "z")  # again, after its worker was lost
    said(4, "v")  # the one before it was lost
    assert got == ["x", "y", "z"]
    arrivals.end("a", ["x", "y", "z", "u", "v"])
    said(0, "x")  # of a task that is over, or of another sweep
    assert got == ["x", "y", "z", "u", "v"]
