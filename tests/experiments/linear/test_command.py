import json
import re
import subprocess
import sys

import numpy as np
import pytest

from gtrace.cli import main
from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.runlog import read_runlog

SMALL = ["--data", "synthetic-10x200", "--epochs", "4"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def gtrace_linear(*arguments):
    """Exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main(["linear", *arguments])
    return ended.value.code


def test_a_table_a_log_and_the_next_command(folder, capsys):
    options = ["--quantize", "samples", "--bits", "5", "--sampling", "double"]
    assert gtrace_linear("--task", "linear", *options, *SMALL) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split() == ["precision", "loss", "above", "optimum", "test", "loss", "bits", "smaller"]
    assert re.match(r"none +\d\.\d{4} .* 32/32/32 +1\.0x", lines[1])
    assert re.match(r"double:bits=5 +\d\.\d{4} .* 6/32/32 +1\.4x", lines[2])
    assert "linear on synthetic-10x200: 200 samples of 10 features, 4 epochs, batches of 1, step 0.04" in out
    assert lines[-2:] == ["linear-double-bits5.jsonl", "next: gtrace report linear-double-bits5.jsonl"]
    assert max(map(len, lines[:3])) <= 80
    assert [path.name for path in folder.iterdir()] == ["linear-double-bits5.jsonl"]


def test_seeds_and_several_precisions_on_a_hinge(folder, capsys):
    items = "naive,nearest:levels=optimal,naive:refetch=l1,double:bits=4,chebyshev=3"
    assert gtrace_linear("--task", "svm", "--compare", items, "--bits", "8", "--seeds", "2", *SMALL) == 0
    out, _ = capsys.readouterr()
    table = out.splitlines()
    assert all(len(line) <= 80 for line in table[:8])
    assert " ± " in table[2]
    assert "fetched: samples that were needed in full after all" in out
    analysis = analyze_runs(read_runlog(folder / "svm-compare.jsonl"), "a")
    specs = "none naive:bits=8 nearest:bits=8,levels=optimal naive:bits=8,refetch=l1 double:bits=4,chebyshev=3"
    assert [run.spec for run in analysis.runs if run.seed == 0] == specs.split()
    assert {run.seed for run in analysis.runs} == {0, 1}
    assert all(run.finished and len(run.steps) == 4 for run in analysis.runs)
    assert (analysis.step_name, analysis.task) == ("epoch", "svm on synthetic-10x200")


@pytest.mark.parametrize(
    "options",
    [
        ["--quantize", "samples,model,gradients", "--bits", "6", "--sampling", "symmetrized", "--prox", "l1=0.01"],
        ["--codec", "qsgd:bits=4", "--quantize", "samples", "--bits", "5", "--batch-size", "16", "--seeds", "2"],
        ["--compare", "alq:bits=3,double:bits=3,levels=optimal", "--lr", "0.03", "--seed", "5", "--refit", "0,+50"],
    ],
)
def test_the_command_in_the_log_repeats_the_run(folder, options):
    assert gtrace_linear("--task", "linear", *SMALL, *options, "-o", "a.jsonl") == 0
    command = read_runlog(folder / "a.jsonl")[0]["command"].split()
    assert command[:2] == ["gtrace", "linear"]
    assert gtrace_linear(*command[2:], "-o", "b.jsonl") == 0

    def timeless(name):
        return re.sub(r'("\w*seconds": )[0-9.e-]+', r"\1-", (folder / name).read_text())

    assert timeless("a.jsonl") == timeless("b.jsonl")
    assert ("--refit" in command) == any("--refit" in word or "--codec" in word for word in options)


def test_json_of_a_codec_and_of_parts(folder, capsys):
    assert gtrace_linear("--task", "logistic", "--codec", "mcgq", "--bits", "3", *SMALL, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    plain, coded = said["runs"]
    assert (plain["run"], plain["gradient_bits_per_value"], plain["ratio"]) == ("none", 32, 1)
    assert coded["run"].startswith("mcgq:bits=3")
    assert coded["sample_bits_per_value"] == coded["model_bits_per_value"] == 32
    assert coded["gradient_bits_per_value"] < 16
    assert coded["optimum"] is None
    assert gtrace_linear("--task", "logistic", "--quantize", "model", "--bits", "4", *SMALL, "--json") == 0
    one = json.loads(capsys.readouterr().out)["runs"][1]
    assert one["run"] == "full:bits=4,quantize=model"
    # 10 values of 4 bits and a norm.
    assert (one["sample_bits_per_value"], one["model_bits_per_value"]) == (32, 4 + 32 / 10)


def test_files(folder, capsys):
    random = np.random.default_rng(0)
    a = random.standard_normal((60, 3))
    rows = "\n".join(",".join(f"{value:.6f}" for value in (*row, row @ [1, 2, 3])) for row in a)
    (folder / "d.csv").write_text("u,v,w,y\n" + rows)
    assert gtrace_linear("--task", "linear", "--data", "d.csv", "--target", "y", "--bits", "6", "--epochs", "3") == 0
    assert "linear on d.csv: 48 samples of 3 features" in capsys.readouterr().out
    assert gtrace_linear("--task", "svm", "--data", "d.csv") == 2
    assert "60 different targets where two labels are needed" in capsys.readouterr().err
    assert gtrace_linear("--task", "linear", "--data", "e.csv") == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--task", "linera"], "'linera' is not one of 'linear', 'lssvm', 'logistic', 'svm'"),
        (["--task", "linear", "--steps", "9"], "No such option '--steps'"),
        (["--task", "linear", "--refetch", "l1"], "linear has no hinge"),
        (["--task", "linear", "--chebyshev", "3"], "derivative of linear is a line"),
        (["--task", "linear", "--levels", "common"], "'common' is not one of 'uniform', 'optimal'"),
        (["--task", "linear", "--compare", "naive", "--sampling", "double"], "leave out --sampling"),
        (["--task", "linear", "--quantize", "model", "--sampling", "double"], "add them to --quantize"),
        (["--task", "linear", "--quantize", "weights"], "quantize: 'weights' is unknown"),
    ],
)
def test_what_does_not_fit_is_said(options, said, capsys):
    assert gtrace_linear(*options) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_diverges_says_so_and_others_go_on(folder, capsys):
    assert gtrace_linear("--task", "linear", "--compare", "double:bits=2", "--lr", "0.2", *SMALL) == 0
    out, err = capsys.readouterr()
    assert re.search(r"double:bits=2: (diverged|learned nothing)", err)
    assert "Try a lower --lr than 0.2, or more bits" in err
    assert out.splitlines()[1].startswith("none")
    assert gtrace_linear("--task", "linear", "--compare", "double:bits=2", *SMALL) == 4
    assert "linear-double-bits2.jsonl already exists" in capsys.readouterr().err


def test_an_interrupted_run_shows_what_was_done(folder, capsys, monkeypatch):
    from gtrace_experiments.linear import Training

    done, whole = [], Training.epoch

    def epoch(self):
        done.append(self)
        if len(done) == 4:
            raise KeyboardInterrupt
        return whole(self)

    monkeypatch.setattr(Training, "epoch", epoch)
    assert gtrace_linear("--task", "linear", *SMALL) == 130
    assert "interrupted after 1 of 4 epochs" in capsys.readouterr().out
    kinds = [record["type"] for record in read_runlog(folder / "linear-double-bits5.jsonl")]
    assert kinds == ["study"] + ["step", "eval"] * 3


def test_linear_models_need_no_torch():
    code = "import sys, gtrace_experiments.linear.study; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
