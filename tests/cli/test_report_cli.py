"""``gtrace sweep`` and ``gtrace report``, what a cluster saves, and what both say of files."""

import json
import subprocess
import sys
from pathlib import Path

import helpers_sweep
import numpy as np
import pytest
from helpers_capture import Command
from helpers_report import rows_of, write_runs, write_sweep

import gtrace
from gtrace.sweep import ResultStore
from gtrace.trace import OptimizerFacts


@pytest.fixture
def sweep(folder):
    return write_sweep(folder / "net.sweep.db", rows_of(bits=[2, 3, 4], layers=("w", "v")))


@pytest.fixture
def found(sweep, succeed):
    """Run ``gtrace report net.sweep.db --json`` with more words: the document."""
    return lambda words="", path=sweep: json.loads(succeed(f"report --json {words}", path)[0])


@pytest.mark.usefixtures("sweep")
def test_the_verdict_first_and_the_path_of_the_page_last(succeed, folder):
    out, err = succeed("report net.sweep.db")
    assert err == ""
    assert out.startswith("Recommendation   ")
    assert "At 2 bits per value" not in out
    assert out.endswith("\nnet.report.html\n")
    assert out.count("\n") <= 25
    assert (folder / "net.report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.usefixtures("sweep")
def test_a_page_of_an_earlier_report_is_replaced_and_anything_else_is_not(succeed, refuse, folder):
    page = folder / "net.report.html"
    page.write_text("mine")
    err = refuse("report net.sweep.db", code=4)
    assert err == "gtrace: net.report.html already exists. Use --force to replace it or -o to write elsewhere.\n"
    assert page.read_text() == "mine"
    succeed("report net.sweep.db --force")
    whole = page.read_bytes()
    page.write_bytes(whole[:2000])
    assert succeed("report net.sweep.db")[1] == ""
    assert page.read_bytes() == whole


def test_a_reader_that_goes_away_does_not_cost_the_page(sweep, folder):
    with Command("report", sweep, "--json", "-o", "net.report.html", cwd=folder) as process:
        process.stdout.close()
        assert "Traceback" not in process.end().stderr
    assert (folder / "net.report.html").read_text(encoding="utf-8").endswith("</html>\n")


@pytest.mark.usefixtures("sweep")
def test_json_is_alone_on_stdout_and_writes_nothing_by_itself(succeed, folder):
    out, err = succeed("report net.sweep.db --json")
    assert (json.loads(out)["sweeps"][0]["name"], err) == ("net.sweep.db", "")
    assert not list(folder.glob("*.html"))
    out, err = succeed("report net.sweep.db --json -o page.html")
    assert json.loads(out)
    assert err == "page.html\n"
    assert (folder / "page.html").exists()


def test_bad_input_is_one_line_and_exit_3(refuse, sweep, folder):
    sweep.write_bytes(sweep.read_bytes()[: sweep.stat().st_size // 2])
    assert sweep.name in refuse("report net.sweep.db", code=3)
    sweep.unlink()
    assert "no results" in refuse("report", code=3)
    assert not list(folder.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_the_output_ends_in_one_line(tmp_path):
    # Printed at once by rich, and what waits in a buffer until the end.
    log = write_runs(tmp_path / "a.jsonl", steps=10)
    for options in ([log, "-o", tmp_path / "a.md"], ["--help"]):
        command = [sys.executable, "-m", "gtrace", "report", *options]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("gtrace: cannot write (No space left on device)")
        assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def bursts(tmp_path_factory):
    """A sweep of a trace with bursts and an optimizer, whose batch the user has to give."""
    path = tmp_path_factory.mktemp("bursts") / "mlp.zarr"
    rng = np.random.default_rng(0)
    facts = OptimizerFacts(kind="SGD", momentum=0.9)
    with gtrace.create_trace(path, attrs={"optimizers": {"0": facts.describe()}}) as writer:
        for step in (start + k for start in (0, 40, 80, 120) for k in range(4)):
            writer.append(step, "w", (0.1 * rng.standard_normal(500) + 0.05).astype(np.float32))
            writer.commit(step, lr=0.05)
    results = path.with_suffix(".sweep.db")
    gtrace.run_sweep(path, ["qsgdinf:bits=8", "qsgdinf:bits=2", "ef:topk:ratio=0.01"], output=results)
    return results


def test_the_verdict_is_a_prediction_for_the_horizon_and_the_workers(succeed, found, bursts):
    verdict = found("--batch-size 64", bursts)["verdict"]
    one = verdict["prediction"]
    assert (verdict["codec"], one["horizon"], one["batch"]) == ("qsgdinf:bits=8", 124, 64)
    assert "--horizon" in verdict["confidence"]
    verdict = found("--horizon 9000 --ranks 4 --batch-size 256", bursts)["verdict"]
    one = verdict["prediction"]
    assert (one["horizon"], one["batch"], one["workers"]) == (9000, 256, 4)
    assert 0.9 * 256 <= one["equivalent_batch_low"] <= one["equivalent_batch"] <= one["equivalent_batch_high"]
    assert " over 9,000 steps (256 of 256; " in verdict["costs"]
    assert "--horizon" not in verdict["confidence"]
    out, _ = succeed("report --batch-size 64", bursts)
    assert "over 124 steps (64 of 64; " in out
    assert out.count("\n") <= 25
    assert "add it with --batch-size" in found("", bursts)["verdict"]["confidence"]


@pytest.mark.usefixtures("sweep")
@pytest.mark.parametrize(
    ("file", "text"),
    [("gtrace.toml", "cluster = '8x25'"), ("pyproject.toml", "[tool.gtrace]\ncluster = '8x25'"), ("gtrace.toml", "x")],
)
def test_a_cluster_written_down_is_read_and_the_option_wins(succeed, refuse, folder, file, text):
    (folder / file).write_text(text)
    said = "cannot be read as TOML" if text == "x" else "cluster: '25' needs a unit, e.g. 25Gbit/s."
    assert refuse("report net.sweep.db", code=3 if text == "x" else 2).startswith(f"gtrace: {file}: {said}")
    succeed("report net.sweep.db --cluster 8x1Mbit/s,10ms")


def test_short_form(succeed, folder):
    helpers_sweep.write_trace(folder / "run.h5", steps=(0, 1))
    out, err = succeed("sweep run.h5 --methods qsgd,terngrad --bits 2-3")
    assert err == ""
    assert out.splitlines() == [
        "36 rows: 3 codecs on 3 tensors at 2 steps",
        "run.sweep.db",
        "next: gtrace report run.sweep.db",
    ]
    stored = ResultStore.load(folder / "run.sweep.db")
    direct = gtrace.run_sweep(folder / "run.h5", ["qsgd:bits=2", "qsgd:bits=3", "terngrad"])
    assert helpers_sweep.rows_of(stored) == helpers_sweep.rows_of(direct)
    assert stored.provenance["command"][1:3] == ["sweep", "run.h5"]


def test_a_new_selection_is_added_and_reported_and_force_starts_empty(succeed, refuse, folder):
    helpers_sweep.write_trace(folder / "run.zarr", steps=range(4))
    (folder / "run.sweep.db").write_text("mine")
    refuse("sweep run.zarr --methods terngrad", code=4)
    assert (folder / "run.sweep.db").read_text() == "mine"
    for options, shown, stored in (
        ("--methods qsgd,terngrad --bits 2 --force", 2, 2),
        ("--methods nuqsgd,terngrad --bits 3 --steps 0-1", 2, 3),
        ("--methods qsgd --bits 2", 1, 3),
        ("--methods natural --force", 1, 1),
    ):
        assert f": {shown} codec{'s' * (shown > 1)} on 3 tensors" in succeed(f"sweep run.zarr {options}")[0]
        found = ResultStore.load(folder / "run.sweep.db")
        assert len(set(found["codec"])) == stored
        assert len(set(found.selected["codec"])) == shown
        (section,) = json.loads(succeed("report run.sweep.db --json")[0])["sweeps"]
        assert len(section["configurations"]) == shown
        assert len(section["steps"]) == (2 if "--steps" in options else 4)
