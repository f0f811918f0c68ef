import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_capture import Command
from helpers_report import rows_of, write_runs, write_sweep

import gtrace
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


def test_ranks_alone_are_the_workers_of_the_comparison(found):
    document = found("--ranks 8 --coder entropy")
    (one,) = document["sweeps"]
    assert (one["name"], one["workers"], one["coder"]) == ("net.sweep.db", 8, "entropy")
    assert document["savings"] == []


@pytest.mark.usefixtures("sweep")
def test_a_pipe_gets_every_column_and_a_terminal_those_that_fit(succeed, monkeypatch):
    out, _ = succeed("report net.sweep.db -o x.md --full")
    assert "No room" not in out
    assert "\x1b" not in out
    assert "qsgdinf:bits=3,bucket_size=8192 " in out
    monkeypatch.setenv("COLUMNS", "70")
    out, _ = succeed("report net.sweep.db -o x.md --full --force")
    assert max(map(len, out.splitlines())) <= 70
    assert "No room for: " in out


@pytest.mark.usefixtures("sweep")
def test_without_arguments_the_newest_results_are_taken_and_named(succeed, folder):
    write_runs(folder / "train.jsonl", steps=30)
    out, err = succeed("report -o x.md")
    assert "net.sweep.db" in err
    assert "train.jsonl" in err
    assert out.startswith("Recommendation")
    assert "Training train.jsonl: " in out


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


@pytest.mark.usefixtures("sweep")
@pytest.mark.parametrize("output", ["x.tex", "x.csv", "one.pdf --figure rate-distortion"])
def test_other_formats_and_figures(succeed, refuse, folder, output):
    out, err = succeed(f"report net.sweep.db -o {output}")
    name, figure, _ = output.partition(" ")
    assert (f"\n{out}".endswith(f"\n{name}\n"), err) == (True, "")
    assert out == f"{name}\n" or not figure
    assert (folder / name).stat().st_size > 1000
    if figure:
        refuse(f"report net.sweep.db -o {output}", code=4)


def test_bad_input_is_one_line_and_exit_3(refuse, sweep, folder):
    sweep.write_bytes(sweep.read_bytes()[: sweep.stat().st_size // 2])
    assert sweep.name in refuse("report net.sweep.db", code=3)
    sweep.unlink()
    assert "no results" in refuse("report", code=3)
    assert not list(folder.iterdir())


def test_named_pairs_come_first(found, succeed, sweep):
    pair = ["qsgdinf:bits=3,bucket_size=8192", "qsgd:bits=3,bucket_size=8192"]
    ((one,),) = found(f"--pair {' '.join(pair)}")["pairs"]
    assert [one["first"], one["second"]] == pair
    assert one["by_elements"] < 0.1
    assert f"\n\n{pair[0]} has " in succeed(f"report net.sweep.db --pair {' '.join(pair)} -o x.md --full")[0]


@pytest.mark.usefixtures("sweep")
def test_two_sweeps_side_by_side(succeed, folder):
    write_sweep(folder / "other.sweep.db", rows_of(bits=[2, 3], layers=("w", "x"), seed=1))
    out, _ = succeed("report net.sweep.db other.sweep.db -o both.jsonl")
    assert out.count("\n") <= 25
    assert "Sweep other.sweep.db against net.sweep.db" in out
    kinds = [json.loads(line)["record"] for line in (folder / "both.jsonl").read_text().splitlines()]
    assert kinds.count("side_by_side") == 8


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


@pytest.fixture(scope="module", params=[64.0, None], ids=["the trace has the batch", "the user has it"])
def bursts(request, tmp_path_factory):
    """A sweep of a trace with bursts and an optimizer, and options that say what the trace does not."""
    path = tmp_path_factory.mktemp("bursts") / "mlp.zarr"
    rng = np.random.default_rng(0)
    facts = OptimizerFacts(kind="SGD", momentum=0.9, batch_size=request.param)
    with gtrace.create_trace(path, attrs={"optimizers": {"0": facts.describe()}}) as writer:
        for step in (start + k for start in (0, 40, 80, 120) for k in range(4)):
            writer.append(step, "w", (0.1 * rng.standard_normal(500) + 0.05).astype(np.float32))
            writer.commit(step, lr=0.05)
    results = path.with_suffix(".sweep.db")
    gtrace.run_sweep(path, ["qsgdinf:bits=8", "qsgdinf:bits=2", "ef:topk:ratio=0.01"], output=results)
    return results, "" if request.param else "--batch-size 64"


def test_the_verdict_is_a_prediction_for_the_horizon_and_the_workers(succeed, found, bursts):
    path, options = bursts
    verdict = found(options, path)["verdict"]
    one = verdict["prediction"]
    assert (verdict["codec"], one["horizon"], one["batch"]) == ("qsgdinf:bits=8", 124, 64)
    assert "--horizon" in verdict["confidence"]
    verdict = found("--horizon 9000 --ranks 4 --batch-size 256", path)["verdict"]
    one = verdict["prediction"]
    assert (one["horizon"], one["batch"], one["workers"]) == (9000, 256, 4)
    assert 0.9 * 256 <= one["equivalent_batch_low"] <= one["equivalent_batch"] <= one["equivalent_batch_high"]
    assert " over 9,000 steps (256 of 256; " in verdict["costs"]
    assert "--horizon" not in verdict["confidence"]
    out, _ = succeed(f"report {options}", path)
    assert "over 124 steps (64 of 64; " in out
    assert out.count("\n") <= 25
    assert not options or "add it with --batch-size" in found("", path)["verdict"]["confidence"]
