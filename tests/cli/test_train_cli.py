"""``gtrace train`` and ``gtrace study`` on built-in tasks."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest

from gtrace.report.analysis.runs import analyze_runs
from gtrace.runlog import RunLogWriter, read_runlog

SMALL = "--task digits-mlp --steps 4 --batch-size 2 --workers 2"
NEURAL = "--kind neural --task digits-mlp --steps 4 --batch-size 16"


def kinds(path, kind):
    """The records of one type in a run log."""
    return [record for record in read_runlog(path) if record["type"] == kind]


def timeless(path):
    """A run log without its times."""
    return re.sub(r'("\w*seconds": )[0-9.e-]+', r"\1-", path.read_text())


def test_a_table_a_log_and_its_command_which_repeats_the_run(folder, succeed):
    out, err = succeed(f"train --codec qsgdinf --bits 3 {SMALL} --lr 0.01 --seed 5")
    name, lines = "digits-mlp-qsgdinf-bits3.jsonl", out.splitlines()
    assert lines[0].split() == ["codec", "accuracy", "loss", "bits", "sent", "smaller", "variance", "codec", "CPU"]
    assert re.match(r"none +\d+\.\d % +\d\.\d{4}  32\.00   104 kB +1\.0x +0 +\d+ %", lines[1])
    assert re.match(r"qsgdinf:bits=3 +\d+\.\d % +\d\.\d{4} +\d\.\d\d +\S+ kB +\d+\.\dx +\S+ +\d+ %", lines[2])
    assert all(len(line) <= 110 for line in lines)
    assert "digits-mlp: 2 workers with 2 samples each, 4 steps, seed 5." in out
    assert (lines[-2:], err, os.listdir(folder)) == ([name, f"next: gtrace report {name}"], "", [name])
    command = read_runlog(folder / name)[0]["command"]
    assert command.startswith("gtrace study compare ")
    out, err = succeed(f"{command.removeprefix('gtrace ')} -o b.jsonl --json")
    assert timeless(folder / "b.jsonl") == timeless(folder / name)
    assert '"fit_seconds": -' in timeless(folder / name)
    said = json.loads(out)
    assert (said["output"], err, [run["run"] for run in said["runs"]]) == ("b.jsonl", "", ["none", "qsgdinf:bits=3"])
    end, coded = kinds(folder / name, "end")[1], said["runs"][1]
    assert all(coded[key] == end[key] for key in ("loss", "accuracy", "bits", "ratio", "steps"))
    assert coded["bits_per_value"] == pytest.approx(32 / coded["ratio"])
    assert coded["bits_per_worker_and_step"] == coded["bits"] / 8


def test_wrong_usage_is_found_without_torch(folder):
    code = "import sys; sys.modules['torch'] = None; from gtrace.cli import main; "
    code += "main(['train', '--codec', 'qsgd', '--task', sys.argv[1]])"
    for task, said in (
        ("digits-cmm", "gtrace: no task 'digits-cmm'"),
        ("digits-cnn", "gtrace: training needs PyTorch, which is not installed: pip install torch\n"),
    ):
        done = subprocess.run([sys.executable, "-c", code, task], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr[: len(said)]) == (2, said)
    assert done.stderr == said
    assert os.listdir(folder) == []


def test_divergence_is_said_and_can_end_the_run(folder, succeed, refuse):
    line = "train --codec qsgd --lr 1e20 --steps 3 --workers 1"
    out, err = succeed(line)
    assert "gtrace: warning: qsgd:bits=4: diverged; no worker's training loss is finite at step 1" in err
    assert "gtrace: warning: none: step 1, worker 0, conv1.weight: " in err
    assert re.search(r"\nqsgd:bits=4 .* - ", out)
    err = refuse(f"{line} --force --nonfinite error", code=3)
    assert re.fullmatch(r"gtrace: step 1, worker 0, conv1\.weight: \d+ of 288 gradient values are not finite.*\n", err)
    assert [one["step"] for one in kinds(folder / "digits-cnn-qsgd-bits4.jsonl", "step")] == [0, 0]


def test_ctrl_c_keeps_what_is_done(folder, call, monkeypatch):
    write, written = RunLogWriter.write, itertools.count()

    def stopped(self, *args, **fields):
        write(self, *args, **fields)
        if next(written) == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunLogWriter, "write", stopped)
    code, out, err = call(f"train --codec qsgd {SMALL} --steps 1000000 -o a.jsonl")
    assert (code, err.lstrip()) == (130, "gtrace: interrupted; finished work is kept.\n")
    steps = kinds(folder / "a.jsonl", "step")
    assert len(steps) >= 20
    assert {one["run"] for one in steps} == {"none", "qsgd:bits=4"}
    done = max(one["step"] for one in steps if one["run"] == "qsgd:bits=4") + 1
    words = rf"interrupted after ({done}|{done + 1}) of 1000000 steps\na\.jsonl\nnext: gtrace report a\.jsonl"
    assert re.search(words, out)


def test_the_command_says_what_was_chosen(folder, succeed):
    chosen = "topology=ps,compute=0.5s --policy fixed --policy schedule:0=2,6=3"
    out, _ = succeed(
        "study compare minmax:bits=4 --task digits-mlp --steps 12 --batch-size 2 --workers 2 --down same "
        f"--min-size 500 --network 1MB/s,{chosen} --json"
    )
    said = json.loads(out)
    assert [run["run"] for run in said["runs"]] == ["none", "minmax:bits=4", "minmax@schedule:0=2,6=3"]
    assert [run["codec_bits"] for run in said["runs"]] == [[], [], [[0, 2], [6, 3]]]
    assert said["runs"][1]["down_bits"] > 0 == said["runs"][0]["down_bits"]
    assert said["output"] == "digits-mlp-compare.jsonl"
    command = read_runlog(folder / "digits-mlp-compare.jsonl")[0]["command"]
    assert command.endswith(
        "--network 8Mbit/s,latency=0s,topology=ps,compute=0.5s --min-size 500 --down same "
        "--policy fixed --policy schedule:0=2,6=3"
    )


@pytest.mark.parametrize(
    ("words", "log", "run"),
    [
        ("--optimizer onebit-adam", "digits-mlp-onebit-adam.jsonl", "onebit-adam"),
        ("bf16 --every 2", "digits-mlp-bf16-every2.jsonl", "bf16 every=2"),
    ],
)
def test_a_study_needs_few_words_and_its_command_repeats_it(folder, succeed, refuse, words, log, run):
    out, _ = succeed(f"study compare {words} --steps 3 --workers 2 --task digits-mlp --json")
    assert [one["run"] for one in json.loads(out)["runs"]] == ["none", run]
    study = read_runlog(folder / log)[0]
    assert study["kind"] == "outer"
    assert words.removeprefix("bf16 ") in study["command"]
    assert run in succeed(f"report {log} --full")[0]
    # Its arithmetic is that of an exchange at every step.
    refuse(f"report {log} --cluster 8x1Gbit/s,20ms")


def test_neural_gradients_have_a_table_with_the_cosines_and_a_log(folder, succeed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out, err = succeed(f"study compare qsgdinf --bits 3 --shadow 2 {NEURAL}")
    assert err == ""
    lines = out.splitlines()
    found = re.match(r"qsgdinf:bits=3 +\d.* (0\.\d{4})  (0\.\d{4}) +\d+ %", lines[2])
    assert float(found[2]) < float(found[1])
    assert lines[-2] == "digits-mlp-neural-qsgdinf-bits3.jsonl"
    records = read_runlog(folder / lines[-2])
    assert (records[0]["kind"], records[0]["shadow"], records[0]["workers"]) == ("neural", 2, 1)
    assert records[0]["command"].endswith("--kind neural --layers inner --shadow 2")
    shadows = kinds(folder / lines[-2], "shadow")
    assert len(shadows) == 2 * 6
    (run,) = [run for run in analyze_runs(records).runs if run.shadow]
    assert run.spec == "qsgdinf:bits=3"
