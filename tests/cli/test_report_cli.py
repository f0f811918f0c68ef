import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers_capture import Command
from helpers_report import rows_of, write_runs, write_sweep

import gtrace
from gtrace.trace import OptimizerFacts


@pytest.fixture
def call(call):
    return partial(call, "report")


@pytest.fixture
def sweep(tmp_path):
    return write_sweep(tmp_path / "net.sweep.db", rows_of(bits=[2, 3, 4], layers=("w", "v")))


def test_the_verdict_first_and_the_path_of_the_page_last(call, sweep, tmp_path):
    code, out, err = call(sweep)
    assert (code, err) == (0, "")
    assert out.startswith("Recommendation   ")
    assert "At 2 bits per value" not in out
    assert out.endswith("\nnet.report.html\n")
    assert out.count("\n") <= 25
    assert (tmp_path / "net.report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_ranks_alone_are_the_workers_of_the_comparison(call, sweep):
    code, out, _ = call(sweep, "--ranks", "8", "--coder", "entropy", "--json")
    (found,) = json.loads(out)["sweeps"]
    assert (code, found["workers"], found["coder"]) == (0, 8, "entropy")
    assert json.loads(out)["savings"] == []


def test_a_pipe_gets_every_column(call, sweep):
    _, out, _ = call(sweep, "-o", "x.md", "--full")
    assert "No room" not in out
    assert "\x1b" not in out
    assert "qsgdinf:bits=3,bucket_size=8192 " in out


def test_columns_are_respected(call, sweep, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    _, out, _ = call(sweep, "-o", "x.md", "--full")
    assert max(map(len, out.splitlines())) <= 70
    assert "No room for: " in out


def test_without_arguments_the_newest_results_are_taken_and_named(succeed, sweep, tmp_path):
    write_runs(tmp_path / "train.jsonl", steps=30)
    out, err = succeed("-o", "x.md")
    assert "net.sweep.db" in err
    assert "train.jsonl" in err
    assert out.startswith("Recommendation")
    assert "Training train.jsonl: " in out


def test_a_page_of_an_earlier_report_is_replaced_and_anything_else_is_not(call, refuse, sweep, tmp_path):
    page = tmp_path / "net.report.html"
    page.write_text("mine")
    err = refuse(sweep, code=4)
    assert err == "gtrace: net.report.html already exists. Use --force to replace it or -o to write elsewhere.\n"
    assert page.read_text() == "mine"
    assert call(sweep, "--force")[0] == 0
    whole = page.read_bytes()
    page.write_bytes(whole[:2000])
    code, _, err = call(sweep)
    assert (code, err) == (0, "")
    assert page.read_bytes() == whole


def test_a_reader_that_goes_away_does_not_cost_the_page(sweep, tmp_path):
    with Command("report", sweep, "--json", "-o", "net.report.html", cwd=tmp_path) as process:
        process.stdout.close()
        assert "Traceback" not in process.end().stderr
    assert (tmp_path / "net.report.html").read_text(encoding="utf-8").endswith("</html>\n")


def test_json_is_alone_on_stdout_and_writes_nothing_by_itself(call, succeed, sweep, tmp_path):
    code, out, err = call(sweep, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["sweeps"][0]["name"] == "net.sweep.db"
    assert not list(tmp_path.glob("*.html"))
    out, err = succeed(sweep, "--json", "-o", "page.html")
    assert json.loads(out)
    assert err.strip() == "page.html"
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("output", "start"),
    [
        ("x.md", b"# gtrace report"),
        ("x.csv", b"results,spec,method"),
        ("x.tex", b"%"),
        ("x.jsonl", b'{"record": '),
        ("x.parquet", b"PAR1"),
    ],
)
def test_other_formats(succeed, sweep, tmp_path, output, start):
    if output == "x.parquet":
        pytest.importorskip("pyarrow")
    out, _ = succeed(sweep, "-o", output)
    assert out.endswith(f"\n{output}\n")
    assert (tmp_path / output).read_bytes().startswith(start)
    assert (tmp_path / output).stat().st_size > 1000


def test_bad_input_is_one_line_and_exit_3(refuse, sweep, tmp_path):
    assert "missing.sweep.db" in refuse("missing.sweep.db", code=3)
    sweep.write_bytes(sweep.read_bytes()[: sweep.stat().st_size // 2])
    assert sweep.name in refuse(sweep, code=3)
    assert not list(tmp_path.glob("*.html"))
    sweep.unlink()
    assert "no results" in refuse(code=3)
    log = write_runs(tmp_path / "a.jsonl", steps=3)
    text = log.read_text().splitlines()
    log.write_text("\n".join([text[0], "{broken", *text[1:]]) + "\n")
    assert "line 2" in refuse(log, code=3)


@pytest.mark.parametrize(("suffix", "start"), [("pdf", b"%PDF"), ("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_one_figure_alone(call, sweep, tmp_path, suffix, start):
    code, out, err = call(sweep, "--figure", "rate-distortion", "-o", f"one.{suffix}")
    assert (code, out, err) == (0, f"one.{suffix}\n", "")
    assert (tmp_path / f"one.{suffix}").read_bytes().startswith(start)
    assert call(sweep, "--figure", "rate-distortion", "-o", f"one.{suffix}")[0] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--figure", "rate-distorsion"], "no such figure; did you mean rate-distortion?"),
        (["--figure", "rate-distortion", "-o", "x.jpg"], "a figure is written as .pdf, .png, .svg"),
        (["--figure", "rate-distortion", "--json"], "leave out --json, --pair and --group"),
        (["--pair", "qsgd:bits=2", "alq"], "no comparable configuration 'qsgd:bits=2'; did you mean qsgd:bits="),
        (["-o", "x.docx"], ".html, .md, .csv, .jsonl, .parquet, .tex"),
    ],
)
def test_what_there_is_not_is_said_in_one_line(refuse, sweep, tmp_path, options, words):
    assert words in refuse(sweep, *options)
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".svg", ".jpg", ".html", ".docx")]


def test_named_pairs_come_first(call, succeed, sweep):
    pair = ["qsgdinf:bits=3,bucket_size=8192", "qsgd:bits=3,bucket_size=8192"]
    out, _ = succeed(sweep, "--pair", *pair, "--json")
    ((found,),) = json.loads(out)["pairs"]
    assert (found["first"], found["second"]) == tuple(pair)
    assert found["by_elements"] < 0.1
    out, _ = succeed(sweep, "--pair", *pair, "-o", "x.md", "--full")
    assert f"\n\n{pair[0]} has " in out


def test_two_sweeps_side_by_side(succeed, sweep, tmp_path):
    other = write_sweep(tmp_path / "other.sweep.db", rows_of(bits=[2, 3], layers=("w", "x"), seed=1))
    out, _ = succeed(sweep, other, "-o", "both.jsonl")
    assert out.count("\n") <= 25
    assert "Sweep other.sweep.db against net.sweep.db" in out
    kinds = [json.loads(line)["record"] for line in (tmp_path / "both.jsonl").read_text().splitlines()]
    assert kinds.count("side_by_side") == 8


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_the_output_ends_in_one_line(tmp_path):
    # Printed at once by rich, and what waits in a buffer until the end.
    log = write_runs(tmp_path / "a.jsonl", steps=10)
    for options in ([log, "-o", tmp_path / "a.md"], ["--help"]):
        with Path("/dev/full").open("w") as full:
            found = subprocess.run(
                [sys.executable, "-m", "gtrace", "report", *map(str, options)],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert found.returncode == 2
        assert found.stderr.startswith("gtrace: cannot write (No space left on device)")
        assert found.stderr.count("\n") == 1


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
    return results, [] if request.param else ["--batch-size", "64"]


def test_the_verdict_is_a_prediction_for_the_horizon_and_the_workers(call, bursts):
    path, options = bursts
    _, out, _ = call(path, *options, "--json")
    verdict = json.loads(out)["verdict"]
    found = verdict["prediction"]
    assert (verdict["codec"], found["horizon"], found["batch"]) == ("qsgdinf:bits=8", 124, 64)
    assert "--horizon" in verdict["confidence"]
    _, out, _ = call(path, "--horizon", "9000", "--ranks", "4", "--batch-size", "256", "--json")
    verdict = json.loads(out)["verdict"]
    found = verdict["prediction"]
    assert (found["horizon"], found["batch"], found["workers"]) == (9000, 256, 4)
    assert 0.9 * 256 <= found["equivalent_batch_low"] <= found["equivalent_batch"] <= found["equivalent_batch_high"]
    assert " over 9,000 steps (256 of 256; " in verdict["costs"]
    assert "--horizon" not in verdict["confidence"]
    _, out, _ = call(path, *options)
    assert "over 124 steps (64 of 64; " in out
    assert out.count("\n") <= 25
    if options:
        _, out, _ = call(path, "--json")
        assert "add it with --batch-size" in json.loads(out)["verdict"]["confidence"]


@pytest.mark.parametrize("words", [("--horizon", "0"), ("--horizon", "many"), ("--batch-size", "0")])
def test_horizons_and_batches_are_positive_numbers(refuse, sweep, words):
    assert words[0] in refuse(sweep, *words)
