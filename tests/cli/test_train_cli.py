"""``gtrace train`` and ``gtrace study`` on built-in tasks."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest

from gtrace.runlog import RunLogWriter, read_runlog
from gtrace.training import task_names

SMALL = ["--task", "digits-mlp", "--steps", "4", "--batch-size", "2", "--workers", "2"]


def test_a_table_a_log_and_the_next_command(folder, succeed):
    out, err = succeed("train", "--codec", "qsgdinf", "--bits", "3", *SMALL)
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split() == ["codec", "accuracy", "loss", "bits", "sent", "smaller", "variance", "codec", "CPU"]
    assert re.match(r"none +\d+\.\d % +\d\.\d{4}  32\.00   104 kB +1\.0x +0 +\d+ %", lines[1])
    assert re.match(r"qsgdinf:bits=3 +\d+\.\d % +\d\.\d{4} +\d\.\d\d +\S+ kB +\d+\.\dx +\S+ +\d+ %", lines[2])
    assert all(len(line) <= 110 for line in lines)
    assert "digits-mlp: 2 workers with 2 samples each, 4 steps, seed 0." in out
    assert lines[-2:] == ["digits-mlp-qsgdinf-bits3.jsonl", "next: gtrace report digits-mlp-qsgdinf-bits3.jsonl"]
    assert os.listdir(folder) == ["digits-mlp-qsgdinf-bits3.jsonl"]


def test_the_command_in_the_log_repeats_the_run(folder, call):
    first = call("train", "--codec", "nuqsgd", "--bits", "3", *SMALL, "--lr", "0.01", "--seed", "5", "-o", "a.jsonl")
    assert first.returncode == 0
    command = read_runlog(folder / "a.jsonl")[0]["command"].split()
    assert command[:3] == ["gtrace", "study", "compare"]
    assert call(*command[1:], "-o", "b.jsonl").returncode == 0

    def timeless(name):
        return re.sub(r'("\w*seconds": )[0-9.e-]+', r"\1-", (folder / name).read_text())

    assert timeless("a.jsonl") == timeless("b.jsonl")
    assert '"fit_seconds": -' in timeless("a.jsonl")


def test_json(folder, succeed):
    out, err = succeed("train", "--codec", "terngrad", *SMALL, "--json")
    assert err == ""
    said = json.loads(out)
    assert said["output"] == "digits-mlp-terngrad.jsonl"
    assert [run["run"] for run in said["runs"]] == ["none", "terngrad"]
    end = [r for r in read_runlog(folder / said["output"]) if r["type"] == "end"][1]
    coded = said["runs"][1]
    assert all(coded[key] == end[key] for key in ("loss", "accuracy", "bits", "ratio", "steps"))
    assert coded["bits_per_value"] == pytest.approx(32 / coded["ratio"])
    assert coded["bits_per_worker_and_step"] == coded["bits"] / 8


def test_a_task_without_accuracy(succeed):
    out, _ = succeed("train", "--codec", "none", "--task", "char-lstm", "--steps", "1", "--workers", "1")
    head = out.splitlines()[:2]
    assert "accuracy" not in head[0]
    assert re.match(r"none +\d\.\d{4}  32\.00", head[1])


def test_long_specs_break_at_their_commas(succeed):
    out, _ = succeed("train", "--codec", "qsgdinf:bits=3,bucket_size=512", *SMALL)
    assert re.search(r"\nqsgdinf:bits=3, .*x .*%\nbucket_size=512 *\n", out)
    assert "digits-mlp-qsgdinf-bits3-bucket_size512.jsonl" in out


def test_an_existing_log_stays_without_force(folder, call, refuse):
    (folder / "a.jsonl").write_text("mine")
    err = refuse("train", "--codec", "qsgd", *SMALL, "-o", "a.jsonl", code=4)
    assert "a.jsonl already exists. Use --force" in err
    assert (folder / "a.jsonl").read_text() == "mine"
    assert call("train", "--codec", "qsgd", *SMALL, "-o", "a.jsonl", "--force").returncode == 0
    assert read_runlog(folder / "a.jsonl")[-1]["type"] == "end"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "qsgd", "--task", "digit-cnn"], "gtrace: no task 'digit-cnn'; did you mean digits-cnn"),
        (["--codec", "qsgd:bit=3"], "gtrace: codec qsgd: no parameter 'bit'; did you mean bits?"),
        (["--codec", "qsgd", "--bits", "99"], "gtrace: codec qsgd: bits=99 is out of range"),
        (["--codec", "qsgd:bits=3", "--bits", "4"], "gtrace: --bits 4: the codec 'qsgd:bits=3' names its bits"),
        (["--codec", "qsgd", "--refit", "daily"], "gtrace: refit: 'daily' is not a schedule; write pooled, every"),
        (["--codec", "qsgd", "--lr", "nan"], "gtrace: lr: must be a positive number, not nan"),
        (["--codec", "qsgd", "--workers", "0"], "gtrace: Invalid value for '--workers'"),
        (["--codec", "qsgd", "-o", "no/a.jsonl"], "gtrace: no/a.jsonl: the folder no does not exist"),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(folder, arguments, message, refuse):
    assert refuse("train", *arguments).startswith(message)
    assert os.listdir(folder) == []


def test_wrong_usage_is_found_without_torch(folder):
    code = "import sys; sys.modules['torch'] = None; from gtrace.cli import main; "
    code += "main(['train', '--codec', 'qsgd', '--task', sys.argv[1]])"

    def run(task):
        return subprocess.run([sys.executable, "-c", code, task], capture_output=True, text=True, check=False)

    assert run("digits-cmm").stderr.startswith("gtrace: no task 'digits-cmm'")
    done = run("digits-cnn")
    assert done.returncode == 2
    assert done.stderr == "gtrace: training needs PyTorch, which is not installed: pip install torch\n"
    assert os.listdir(folder) == []


def test_bits_of_a_codec_without_bits_are_ignored_aloud(call):
    done = call("train", "--codec", "terngrad", "--bits", "3", *SMALL)
    assert (done.returncode, done.stderr) == (0, "gtrace: terngrad has no bits to choose; --bits 3 is ignored\n")


def test_bits_reach_the_codec_inside_a_wrapper(folder, call, refuse):
    assert call("train", "--codec", "ef:qsgdinf:bucket_size=64", "--bits", "3", *SMALL).returncode == 0
    assert os.listdir(folder) == ["digits-mlp-ef-qsgdinf-bits3-bucket_size64.jsonl"]
    assert "names its bits already" in refuse("train", "--codec", "ef:qsgdinf:bits=3", "--bits", "3", *SMALL)


def test_divergence_is_said(succeed):
    out, err = succeed("train", "--codec", "qsgd", "--lr", "1e20", "--steps", "3", "--workers", "1")
    assert "gtrace: warning: qsgd:bits=4: diverged; no worker's training loss is finite at step 1" in err
    assert "gtrace: warning: none: step 1, worker 0, conv1.weight: " in err
    assert re.search(r"\nqsgd:bits=4 .* - ", out)


def test_gradients_that_are_not_finite_can_end_the_run(folder, refuse):
    arguments = ["--codec", "qsgd", "--lr", "1e20", "--steps", "3", "--workers", "1", "--nonfinite", "error"]
    err = refuse("train", *arguments, code=3)
    assert re.fullmatch(r"gtrace: step 1, worker 0, conv1\.weight: \d+ of 288 gradient values are not finite.*\n", err)
    steps = [r for r in read_runlog(folder / "digits-cnn-qsgd-bits4.jsonl") if r["type"] == "step"]
    assert [r["step"] for r in steps] == [0, 0]


def test_ctrl_c_keeps_what_is_done(folder, call, monkeypatch):
    write, written = RunLogWriter.write, itertools.count()

    def stopped(self, *args, **fields):
        write(self, *args, **fields)
        if next(written) == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunLogWriter, "write", stopped)
    done = call("train", "--codec", "qsgd", *SMALL, "--steps", "1000000", "-o", "a.jsonl")
    assert (done.returncode, done.stderr.lstrip()) == (130, "gtrace: interrupted; finished work is kept.\n")
    out, path = done.stdout, folder / "a.jsonl"
    records = read_runlog(path)
    steps = [r for r in records if r["type"] == "step"]
    assert len(steps) >= 20
    assert {r["run"] for r in steps} == {"none", "qsgd:bits=4"}
    done = max(r["step"] for r in steps if r["run"] == "qsgd:bits=4") + 1
    words = rf"interrupted after ({done}|{done + 1}) of 1000000 steps\na\.jsonl\nnext: gtrace report a\.jsonl"
    assert re.search(words, out)


def test_the_tasks_are_listed(call, succeed):
    out, _ = succeed("study", "tasks")
    assert [line.split()[0] for line in out.splitlines()] == list(task_names())
    assert list(json.loads(call("study", "tasks", "--json").stdout)) == list(task_names())


def test_the_command_says_what_was_chosen(tmp_path, succeed):
    words = "study compare minmax:bits=4 --task digits-mlp --steps 12 --batch-size 2 --workers 2 --down same"
    words += " --min-size 500"
    words += " --network 1MB/s,topology=ps,compute=0.5s --policy fixed --policy schedule:0=2,6=3"
    out, _ = succeed(*words.split(), "--json")
    told = json.loads(out)
    assert [run["run"] for run in told["runs"]] == ["none", "minmax:bits=4", "minmax@schedule:0=2,6=3"]
    assert [run["codec_bits"] for run in told["runs"]] == [[], [], [[0, 2], [6, 3]]]
    assert told["runs"][1]["down_bits"] > 0 == told["runs"][0]["down_bits"]
    assert told["output"] == "digits-mlp-compare.jsonl"
    reached = [run["seconds_to_common_loss"] for run in told["runs"] if not run["diverged"]]
    assert any(seconds is not None and 0 < seconds <= told["runs"][0]["sim_seconds"] for seconds in reached)
    head = read_runlog(tmp_path / "digits-mlp-compare.jsonl")[0]
    assert head["command"].endswith(
        "--network 8Mbit/s,latency=0s,topology=ps,compute=0.5s --min-size 500 --down same "
        "--policy fixed --policy schedule:0=2,6=3"
    )
    out, _ = succeed(*head["command"].split()[1:], "--force")
    assert "bits of minmax@schedule:0=2,6=3: 2, 3 from 6" in out
    assert "to loss: simulated time to a training loss of" in out
    assert "sent:" not in out


def test_scripts_are_refused_in_one_line(tmp_path, refuse):
    (tmp_path / "s.py").write_text("")
    err = refuse("train", "--codec", "minmax", "--policy", "mqgrad", str(tmp_path / "s.py"))
    assert "gtrace.training.MQGrad" in err


def test_a_table_with_the_error_of_the_weights(succeed):
    out, err = succeed("study", "compare", "--weights", "optimal5,uniform5", *SMALL)
    lines = out.splitlines()
    assert "warning" not in err
    assert lines[0].split() == ["codec", "accuracy", "loss", "bits", "sent", "variance", "weights"]
    assert lines[1].split()[-1] == "-"
    optimal, uniform = (float(line.split()[-1]) for line in lines[2:4])
    assert 0 < optimal <= uniform < 0.2
    assert "2.32 bits each,\n63 % of the parameters (fc2.weight)" in out
    assert "digits-mlp-weights-optimal5-uniform5.jsonl" in out


def test_json_and_the_command_of_the_log(folder, succeed):
    arguments = ["alq:bits=4", "--weights", "optimal7", *SMALL]
    out, _ = succeed("study", "compare", *arguments, "-o", "a.jsonl", "--json")
    summary = json.loads(out)
    assert [run["run"] for run in summary["runs"]] == ["none", "alq:bits=4 weights=optimal7"]
    assert summary["weights"][0]["tensors"] == ["fc2.weight"]
    assert summary["runs"][0]["weight_error"] is None
    assert 0 < summary["runs"][1]["weight_error"] < 1
    assert "--weights optimal7" in read_runlog(folder / "a.jsonl")[0]["command"]


def test_seeds_show_the_error_of_the_weights(succeed):
    out, _ = succeed("study", "seeds", "--weights", "optimal3", "--seeds", "2", *SMALL)
    assert out.splitlines()[0].split()[-1] == "weights"
    assert "1.58 bits each" in out


@pytest.mark.parametrize(
    ("weights", "options", "said"),
    [
        ("optimal1", [], "levels of weights: 1 is not between 2 and 256"),
        ("common5", [], "levels of weights: 'common' is unknown"),
        ("optimal", [], "levels of weights: 'optimal' needs a placement and a count, e.g. optimal5."),
        ("optimal5", ["--kind", "neural"], "choose kind weight"),
    ],
)
def test_what_are_not_levels_is_said_in_one_line(refuse, weights, options, said):
    assert said in refuse("study", "compare", "--weights", weights, *options)


SHORT = ("--steps", 3, "--workers", 2, "--task", "digits-mlp", "--json")


@pytest.mark.parametrize(
    ("words", "log", "runs"),
    [
        (("--optimizer", "onebit-adam"), "digits-mlp-onebit-adam.jsonl", ["none", "onebit-adam"]),
        (("bf16", "--every", 2), "digits-mlp-bf16-every2.jsonl", ["none", "bf16 every=2"]),
    ],
)
def test_a_study_needs_few_words_and_its_command_repeats_it(call, words, log, runs):
    code, out, err = call("study", "compare", *words, *SHORT)
    assert code == 0, err
    assert [run["run"] for run in json.loads(out)["runs"]] == runs
    with open(log) as file:
        study = json.loads(file.readline())
    assert study["kind"] == "outer"
    assert " ".join(map(str, words[-2:])) in study["command"]
    code, out, err = call("report", log, "--full")
    assert code == 0, err
    assert runs[1] in out
    # Its arithmetic is that of an exchange at every step.
    assert call("report", log, "--cluster", "8x1Gbit/s,20ms").returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("study", "compare"), "name at least one codec"),
        (("study", "compare", "bf16", "--every", 2, "--cluster", "8x1Gbit/s,20ms"), "leave out every=2"),
        (("study", "compare", "bf16", "--every", 2, "--network", "1Gbit/s"), "leave out every=2"),
        (("study", "compare", "bf16", "--every", 2, "--kind", "neural"), "leave out every=2"),
        (("train", "--codec", "bf16", "--every", 2, "--cluster", "8x1Gbit/s,20ms", "train.py"), "leave out --every"),
    ],
)
def test_what_does_not_go_together_is_one_line(refuse, words, said):
    assert said in refuse(*words)
