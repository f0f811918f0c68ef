"""``gtrace advise``: one command from a script or a trace to the verdict, and the lines that it says to paste.

docs/when-not-to-compress.md shows it on a larger model.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers_capture import environment, run_gtrace
from torch.nn.parallel import DistributedDataParallel

from gtrace import create_trace, open_trace
from gtrace.cli.advise import paste
from gtrace.planning import load_plan
from gtrace.report.section import Verdict
from gtrace.sweep import ResultStore

from .conftest import PROGRAM

TENSORS = {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.fixture(scope="module")
def advised(tmp_path_factory):
    """The command on a script that would run for long, at 80 columns: its end, and the folder."""
    folder = tmp_path_factory.mktemp("advise")
    (folder / "train.py").write_text(PROGRAM)
    words = ["--cluster", "8x10Mbit/s", "--bandwidth", "0.001-100Gbit/s", "train.py", "1000000"]
    done = run_gtrace("advise", *words, cwd=folder, env={**environment(), "COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, out=done.stdout, err=done.stderr)


def test_a_script_is_stopped_and_the_answer_fits_a_screen(advised):
    lines = advised.out.splitlines()
    assert lines[0].startswith("Recommendation   ")
    assert len(lines) <= 25, advised.out
    assert max(map(len, lines)) <= 90
    names = [line.split()[0] for line in lines if line]
    assert {"Saves", "Costs", "Confidence", "float32", "bf16", "plan", "By", "Paste", "Compare"} <= set(names)
    assert "the script" not in advised.out + advised.err
    with open_trace(advised.folder / "train.advice" / "trace.zarr") as trace:
        assert trace.steps("0.weight").tolist()[:12] == [0, 1, 2, 3, 8, 9, 10, 11, 21, 22, 23, 24]
        assert len(trace.steps("0.weight")) == 32
        times = trace.attrs["times"]
        assert 0 < times["backward"] < times["step"] < 1
    # The page and a later report on the sweep show all that the answer is about.
    stored = ResultStore.load(advised.folder / "train.advice" / "sweep.db")
    assert len(stored.selected) == len(stored)
    assert lines[0].split(maxsplit=1)[1][:20] in (advised.folder / "train.advice" / "report.html").read_text()
    left = {path.name for path in (advised.folder / "train.advice").iterdir()}
    assert left == {"trace.zarr", "sweep.db", "plan.toml", "report.html", "advice.json"}


def test_the_trace_of_an_advice_is_advised_on_without_a_capture(advised, succeed, folder):
    found = json.loads(succeed("advise --json", advised.folder / "train.advice" / "trace.zarr")[0])
    assert found["step"] > found["backward"] > 0
    assert set(found["seconds"]) == {"sweep", "report", "plan"}
    assert found["verdict"]["recommendation"]
    assert {option["name"] for option in found["options"]} >= {"float32", "bf16", "plan"}
    assert {row.tensor for row in load_plan(folder / "trace.advice" / "plan.toml").tensors} == TENSORS


def test_an_earlier_advice_and_other_files_stay_until_there_are_new_results(advised, call, succeed, folder):
    earlier = shutil.copytree(advised.folder / "train.advice", folder / "train.advice")
    (earlier / "mine").write_text("mine")
    before = {path.name: path.read_bytes() for path in earlier.iterdir() if path.is_file()}
    (folder / "train.py").write_text("raise SystemExit(3)")
    assert call("advise train.py").returncode == 5
    assert before.items() <= {path.name: path.read_bytes() for path in earlier.iterdir() if path.is_file()}.items()
    succeed("advise -o train.advice train.advice/trace.zarr")
    assert (earlier / "mine").exists()
    assert len(open_trace(earlier / "trace.zarr").steps("0.weight")) == 32
    assert (earlier / "sweep.db").read_bytes() != before["sweep.db"]


def test_with_force_only_its_own_files_are_written_to_a_folder(advised, call, succeed, folder):
    trace = shutil.copytree(advised.folder / "train.advice" / "trace.zarr", folder / "run.zarr")
    succeed("advise --force -o . run.zarr")
    for inside, said in (("run.zarr", "is what is being read"), ("run.zarr/advice", "is inside the trace")):
        done = call(f"advise --force -o {inside} run.zarr")
        assert (done.returncode, done.stderr.startswith(f"gtrace: {inside}: {said}")) == (2, True), done.stderr
    assert len(open_trace(trace).steps("0.weight")) == 32


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("-o full train.py", 4, "full: holds something else and was left untouched"),
        ("--force -o full/mine train.py", 4, "full/mine: is a file and was left untouched"),
        ("empty.zarr", 3, "the trace is empty"),
        ("train.py 3 9", 5, "train.py failed with exit code 9"),
        ("full", 2, "full: is a folder without a __main__.py"),
        ("run.sweep.db", 2, "run.sweep.db: is not a Python script"),
    ],
)
def test_what_cannot_be_advised_on(call, folder, words, code, said):
    (folder / "train.py").write_text(PROGRAM)
    (folder / "full").mkdir()
    (folder / "full" / "mine").write_text("mine")
    (folder / "run.sweep.db").write_text("import os; os.abort()")
    create_trace(folder / "empty.zarr").close()
    done = call(f"advise {words}")
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert ("the script began" in done.stderr) == (code == 5)
    assert (folder / "full" / "mine").read_text() == "mine"


@pytest.fixture
def ddp_model(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    torch.manual_seed(0)
    yield DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5)))
    dist.destroy_process_group()


@pytest.mark.parametrize("what", ["codec", "plan"])
def test_the_lines_to_paste_work(ddp_model, advised, what):
    verdict = Verdict("compress", "", "", "", "", codec="qsgdinf:bits=4", bits=3.0)
    file = Path(advised.folder / "train.advice" / "plan.toml")
    plan = SimpleNamespace(worth=True) if what == "plan" else None
    lines = paste(SimpleNamespace(verdict=verdict, plan=plan, plan_file=file))
    exec("\n".join(lines), {"ddp_model": ddp_model})
    x = torch.randn(16, 40)
    exact = torch.autograd.grad(ddp_model.module(x).square().sum(), list(ddp_model.module.parameters()))
    ddp_model(x).square().sum().backward()
    for parameter, gradient in zip(ddp_model.module.parameters(), exact, strict=True):
        assert 0 < (parameter.grad - gradient).norm() < gradient.norm()
