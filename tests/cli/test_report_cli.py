import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers_report import rows_of, write_runs, write_sweep


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


def test_without_arguments_the_newest_results_are_taken_and_named(call, sweep, tmp_path):
    write_runs(tmp_path / "train.jsonl", steps=30)
    code, out, err = call("-o", "x.md")
    assert code == 0
    assert "net.sweep.db" in err
    assert "train.jsonl" in err
    assert out.startswith("Recommendation")
    assert "Training train.jsonl: " in out


def test_a_page_of_an_earlier_report_is_replaced_and_anything_else_is_not(call, sweep, tmp_path):
    page = tmp_path / "net.report.html"
    page.write_text("mine")
    code, out, err = call(sweep)
    assert (code, out) == (4, "")
    assert err == "gtrace: net.report.html already exists. Use --force to replace it or -o to write elsewhere.\n"
    assert page.read_text() == "mine"
    assert call(sweep, "--force")[0] == 0
    whole = page.read_bytes()
    page.write_bytes(whole[:2000])
    code, out, err = call(sweep)
    assert (code, err) == (0, "")
    assert page.read_bytes() == whole


def test_a_reader_that_goes_away_does_not_cost_the_page(sweep, tmp_path):
    command = [sys.executable, "-m", "gtrace", "report", str(sweep), "--json", "-o", "net.report.html"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.close()
        error = process.stderr.read().decode()
        process.wait(60)
    assert "Traceback" not in error
    assert (tmp_path / "net.report.html").read_text(encoding="utf-8").endswith("</html>\n")


def test_json_is_alone_on_stdout_and_writes_nothing_by_itself(call, sweep, tmp_path):
    code, out, err = call(sweep, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["sweeps"][0]["name"] == "net.sweep.db"
    assert not list(tmp_path.glob("*.html"))
    code, out, err = call(sweep, "--json", "-o", "page.html")
    assert code == 0
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
def test_other_formats(call, sweep, tmp_path, output, start):
    if output == "x.parquet":
        pytest.importorskip("pyarrow")
    code, out, _ = call(sweep, "-o", output)
    assert code == 0
    assert out.endswith(f"\n{output}\n")
    assert (tmp_path / output).read_bytes().startswith(start)
    assert (tmp_path / output).stat().st_size > 1000


def damage_nothing(path):
    return path.with_name("missing.sweep.db")


def damage_foreign(path):
    path.write_bytes(b"SQLite format 3\0" + b"x" * 4000)
    return path


def damage_text(path):
    path.write_text("hello\n")
    return path


def damage_truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def damage_folder(path):
    (path.parent / "empty.zarr").mkdir()
    return path.parent / "empty.zarr"


@pytest.mark.parametrize("damage", [damage_nothing, damage_foreign, damage_text, damage_truncate, damage_folder])
def test_bad_input_is_one_line_and_exit_3(call, sweep, damage, tmp_path):
    path = damage(sweep)
    code, out, err = call(path)
    assert code == 3
    assert out == ""
    assert err.startswith("gtrace: ")
    assert err.count("\n") == 1
    assert path.name in err
    assert not list(tmp_path.glob("*.html"))


def test_a_damaged_run_log_is_exit_3(call, tmp_path):
    log = write_runs(tmp_path / "a.jsonl", steps=3)
    text = log.read_text().splitlines()
    log.write_text("\n".join([text[0], "{broken", *text[1:]]) + "\n")
    code, _, err = call(log)
    assert code == 3
    assert "line 2" in err
    log.write_text(text[0] + '\n{"type": "step", "run": "q", "step": "x"}\n')
    code, _, err = call(log)
    assert code == 3
    assert "a.jsonl: 'step'" in err


def test_an_empty_folder_is_exit_3(call):
    code, _, err = call()
    assert code == 3
    assert "no results" in err


def test_wrong_usage_is_found_before_anything_is_read(call, sweep):
    code, out, err = call(sweep, "-o", "x.pdf")
    assert (code, out) == (2, "")
    assert ".html, .md, .csv" in err
    code, _, err = call(sweep, "-o", "nowhere/x.html")
    assert code == 2
    assert "does not exist" in err


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
        (
            ["--pair", "qsgd:bits=2", "alq"],
            "no comparable configuration 'qsgd:bits=2'; did you mean qsgd:bits=",
        ),
        (["-o", "x.docx"], ".html, .md, .csv, .jsonl, .parquet, .tex"),
    ],
)
def test_what_there_is_not_is_said_in_one_line(call, sweep, tmp_path, options, words):
    code, out, err = call(sweep, *options)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".svg", ".jpg", ".html", ".docx")]


def test_named_pairs_come_first(call, sweep):
    pair = ["qsgdinf:bits=3,bucket_size=8192", "qsgd:bits=3,bucket_size=8192"]
    code, out, _ = call(sweep, "--pair", *pair, "--json")
    assert code == 0
    ((found,),) = json.loads(out)["pairs"]
    assert (found["first"], found["second"]) == tuple(pair)
    assert found["by_elements"] < 0.1
    code, out, _ = call(sweep, "--pair", *pair, "-o", "x.md", "--full")
    assert f"\n\n{pair[0]} has " in out


def test_two_sweeps_side_by_side(call, sweep, tmp_path):
    other = write_sweep(tmp_path / "other.sweep.db", rows_of(bits=[2, 3], layers=("w", "x"), seed=1))
    code, out, _ = call(sweep, other, "-o", "both.jsonl")
    assert code == 0
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
