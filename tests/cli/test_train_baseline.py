"""``gtrace train SCRIPT`` beside its baseline: what is compared, how sure that is, and what cannot be compared."""

import json
import os
import subprocess
import sys

import pytest

from gtrace.cli.train_script import _lines, run_one
from gtrace.report import analyze_runs
from gtrace.runlog import read_runlog
from gtrace.training.exchange import Tally
from gtrace.training.unmodified import ScriptSummary

PROGRAM = """
import os, sys
import torch
from torch import nn
words = sys.argv[1:]
if "seeded" in words:
    torch.manual_seed(0)
print("seed", os.environ["GTRACE_SEED"])
model = nn.Linear(20, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = torch.ones(20, 3).tril()
for step in range(int(words[0])):
    x = torch.randn(16, 20)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), (x @ truth).argmax(1))
    if "diverges" in words and step > 20:
        loss = loss * float("nan")
    if "hidden" in words:
        torch.autograd.backward([model(x).flatten()], [torch.ones(48)])
    elif "untrained" not in words:
        loss.backward()
    if "untrained" not in words:
        optimizer.step()
second = os.path.exists("first")
open("first", "w").close()
sys.exit(7 if "fails" in words or ("once" in words and second) else 0)
"""


@pytest.fixture
def beside(call, folder, monkeypatch):
    """``gtrace train`` on the program, each of whose runs is in this process."""
    (folder / "train.py").write_text(PROGRAM)
    started = []

    def in_this_process(command, env, **_):
        started.append(json.loads(command[3])["setup"])
        monkeypatch.setenv("GTRACE_SEED", env["GTRACE_SEED"])
        return subprocess.CompletedProcess(command, run_one(command[3]))

    monkeypatch.setattr("gtrace.cli.train_script.subprocess.run", in_this_process)

    def run(words, program="60"):
        done = call(f"train {words} train.py {program}")
        return done, [(one["codec"], one["seed"]) for one in started]

    return run


def test_a_program_is_compared_with_itself_in_processes_of_their_own(call, folder):
    (folder / "train.py").write_text(PROGRAM)
    done = call("train --codec qsgdinf:bits=2 --baseline train.py 300")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.replace("seed 0\n", "").splitlines()
    assert first.startswith("qsgdinf:bits=2: final loss 0.")
    assert " uncompressed (+0." in first
    assert " +- 0." in first
    assert len(rest) <= 3
    assert done.stdout.count("seed 0\n") == 2
    told = [line for line in done.stderr.splitlines() if "run " in line]
    assert told == ["gtrace: run 1 of 2: uncompressed", "gtrace: run 2 of 2: qsgdinf:bits=2"]
    runs = {run.spec: run for run in analyze_runs(read_runlog(folder / "train-qsgdinf-bits2.jsonl")).runs}
    assert runs["none"].ratio == 1
    assert runs["none"].final_loss < runs["none"].loss[:30].mean() / 2
    # Both begin with the same weights and batches, although the program seeds nothing.
    assert runs["none"].loss[0] == runs["qsgdinf:bits=2"].loss[0]
    report = call("report train-qsgdinf-bits2.jsonl --json")
    assert "; uncompressed 0." in report.stdout
    assert " +- 0." in report.stdout


@pytest.mark.parametrize(
    ("codec", "program", "code", "said"),
    [
        ("sign", "60", 2, "'sign'"),
        ("none", "60", 2, "--codec none is the baseline itself"),
        ("signsgd", "60 fails", 5, "the uncompressed run failed with exit code 7"),
        ("signsgd", "60 once", 5, "signsgd failed with exit code 7"),
        ("signsgd", "60 hidden", 2, "its loss cannot be seen"),
        ("signsgd", "60 untrained", 2, "it took no step of a torch optimizer"),
        ("signsgd", "60 diverges", 0, "nothing to compare: the uncompressed run diverged"),
        ("signsgd", "60", 0, "6 steps are too few for a confidence interval, which needs 12"),
    ],
)
def test_what_is_said_of_a_comparison(beside, codec, program, code, said):
    done, started = beside(f"--codec {codec} --baseline", program)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "once" not in program or len(started) == 2


def test_several_codecs_are_rows_and_seeds_are_those_of_the_program(beside):
    done, started = beside("--compare qsgdinf:bits=3,signsgd --seeds 2 --seed 4")
    assert done.returncode == 0, done.stderr
    assert started == [(codec, seed) for seed in (4, 5) for codec in ("none", "qsgdinf:bits=3", "signsgd")]
    assert done.stdout.splitlines()[:6:3] == ["seed 4", "seed 5"]
    assert {"none", "qsgdinf:bits=3", "signsgd"} <= {line.split()[0] for line in done.stdout.splitlines()[6:]}
    assert "fewer than 5 seeds" in done.stdout


def test_a_program_with_a_seed_of_its_own_runs_once(beside):
    done, started = beside("--codec signsgd --seeds 3", "60 seeded")
    assert started == [("none", 0), ("signsgd", 0), ("none", 1)]
    assert "The script sets its own seed" in done.stdout


def test_json_and_an_existing_log(beside, folder):
    done, _ = beside("--codec signsgd --baseline --json -o runs.jsonl")
    (one,) = json.loads(done.stdout[done.stdout.index("{") :])["comparison"]
    assert one["difference"]["estimate"] == pytest.approx(one["loss"] - one["baseline"])
    before = (folder / "runs.jsonl").read_bytes()
    assert beside("--codec signsgd --baseline -o runs.jsonl")[0].returncode == 4
    assert (folder / "runs.jsonl").read_bytes() == before


def test_ranks_of_a_launcher_are_sent_to_the_launcher(beside, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done, started = beside("--codec signsgd --baseline")
    assert (done.returncode, started) == (2, [])
    assert "-m torch.distributed.run --nproc-per-node 2 train.py" in done.stderr


def test_seeds_reach_libraries_before_the_program(tmp_path):
    code = (
        "import os; from gtrace.torch_hooks.processes import seed_libraries\n"
        "for rank in '001':\n    os.environ['RANK'] = rank; seed_libraries(5); import random, numpy, torch\n"
        "    print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    )
    told = {**os.environ, "WORLD_SIZE": "2"}
    seen = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True).stdout.splitlines()
    assert len(seen) == 3
    first, second = sorted(set(seen))
    assert len(first.split()) == len(second.split()) == 3
    assert not set(first.split()) & set(second.split())


def test_a_second_shot_is_counted_from_all_ranks_and_has_an_error_if_this_one_sent_any():
    setup = {"codec": "qsgd", "every": None, "exchange": "two-shot", "workers": 1}
    for energy, error in ((0.0, ""), (4.0, ", relative variance 0.25 of the averages that this rank sent on")):
        tally = Tally(payload_bits=300, float32_bits=3200, down_bits=250, down_energy=energy, down_squared_error=1.0)
        found = _lines(ScriptSummary(steps=1, tally=tally, exchanged=True, rank=0, world_size=2), setup)
        assert f"gtrace: second shot: 2.50 bits per value{error}" in found
