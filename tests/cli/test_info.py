"""``gtrace info``, also with ``--fit``, and ``gtrace formats``: tables, JSON, selections and errors."""

import json
import os
import subprocess
import sys
import tomllib

import helpers_laws as laws
import numpy as np
import pytest
from helpers_trace import SHAPES, STEPS, SUFFIXES, gradient, present, write_arrays, write_trace

from gtrace.fitting.magnitudes import LAWS, fit_magnitudes
from gtrace.report.names import sparkline
from gtrace.trace import create_trace, open_trace


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_table_and_json(suffix, succeed, tmp_path):
    attrs = {"argv": ["train.py", "--name", "a b"], "model": "Net", "capture": {"errors": 2}}
    path = write_trace(tmp_path / f"run{suffix}", attrs=attrs)
    out, err = succeed("info --full", path)
    assert err == ""
    head, table = out.split("\n\n")[:2]
    assert head.splitlines() == [
        f"{path}: complete, 6 steps, 4 tensors, 36,225 elements",
        "script   train.py --name 'a b'",
        "model    Net",
        "ranks    1",
        "steps    0 to 9",
        "loss     2.50 to 0.250  █▄▃▂▁▁",
        "errors   2 while capturing; gradients may be missing",
        "noise    can be estimated, from three consecutive steps",
    ]
    for name, line in zip(SHAPES, table.splitlines()[2:], strict=True):
        values = [gradient(name, step) for step in present(name)]
        norms = [np.linalg.norm(one) for one in values]
        cells = line.split()
        assert cells[:4] == [name, "x".join(map(str, SHAPES[name])) or "scalar", "float32", str(len(values))]
        measured = [norms[0], norms[-1], max(np.abs(one).max() for one in values)]
        assert [*map(float, cells[4:7])] == pytest.approx(measured, rel=5e-3)
        assert cells[7:10] == ["0.0%", "0", sparkline(norms, 16)]
    assert f"next: gtrace sweep {path}" in out
    said = json.loads(succeed("info --json", path)[0])
    with open_trace(path) as trace:
        assert said["fingerprint"] == trace.fingerprint
    assert (said["status"], said["attrs"]["model"], said["ranks"]) == ("complete", "Net", [0])
    counts = {"rank": 0, "kind": "weight", "optimizer": 0, "steps": 6, "first_step": 0, "last_step": 9}
    assert said["streams"] == [counts | {"first_loss": 2.5, "last_loss": 0.25}]
    assert [tensor["name"] for tensor in said["tensors"]] == list(SHAPES)
    matrix = said["tensors"][1]
    assert (matrix["shape"], matrix["size"], matrix["steps"]) == ([7, 31], 217, 4)
    assert matrix["norm_last"] == pytest.approx(np.linalg.norm(gradient("fc.weight", STEPS[-1])), rel=1e-6)


def test_the_optimizer(succeed, tmp_path):
    facts = {"kind": "SGD", "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 64, "planned_steps": 1000}
    text = "SGD, lr 0.1 to 0.01, momentum 0.9, weight decay 0.0005 on 1 of 2 tensors; batch 64; 1,000 steps planned"
    with create_trace(tmp_path / "run.zarr", attrs={"optimizers": {"0": facts}}) as writer:
        for step, lr in enumerate([0.1, 0.05, 0.01]):
            writer.append(step, "w", np.ones(3))
            writer.append(step, "b", np.ones(2), **({} if step else {"group": {"weight_decay": 0.0}}))
            writer.commit(step, lr=lr)
    said = [line for line in succeed("info run.zarr")[0].splitlines() if line.startswith("training ")]
    assert said == [f"training {text}"]


def test_what_is_not_finite_is_counted(succeed, tmp_path):
    values = dict.fromkeys(range(3), np.float32([np.nan, np.inf, 0.0, 3.0]))
    write_arrays(tmp_path / "run.zarr", {"w": values}, [5.0, np.nan, np.nan])
    out, _ = succeed("info run.zarr --full")
    (line,) = (line for line in out.splitlines() if line.startswith("w "))
    assert line.split()[4:] == ["NaN", "NaN", "3.00", "25.0%", "6", "×××"]
    assert "loss     5.00, then not finite  ▁××" in out
    assert succeed("info run.zarr")[0].splitlines()[1:3] == [
        "DIVERGED the loss is not finite from step 1 on; last finite loss 5.00 at step 0",
        "broken   NaN or infinity in the gradients of 1 of 1 tensor, at 3 of 3 steps, first at step 0",
    ]
    found = json.loads(succeed("info run.zarr --json")[0])["divergence"]
    assert (found["loss_step"], found["last_loss"], found["gradient_step"], found["values"]) == (1, 5.0, 0, 6)


def test_selections(succeed, refuse, tmp_path):
    with create_trace(tmp_path / "run.zarr") as writer:
        for optimizer in range(2):
            for name in ("g.weight", "g.bias"):
                writer.append(0, name, [1.0], optimizer=optimizer)
        writer.append(0, "act", [1.0], kind="neural")
    act, biases = "act neural 0", ["g.bias weight 0", "opt1/g.bias weight 1"]
    second = ["opt1/g.weight weight 1", "opt1/g.bias weight 1"]
    for options, wanted in {
        "": ["g.weight weight 0", biases[0], *second, act],
        "--kind neural": [act],
        "--optimizer 1": second,
        "--tensors *.bias --tensors act": [*biases, act],
        "--tensors g.b*,g.w* --optimizer 1": second,
    }.items():
        tensors = json.loads(succeed(f"info run.zarr --json {options}")[0])["tensors"]
        assert [f"{one['name']} {one['kind']} {one['optimizer']}" for one in tensors] == wanted, options
    assert "1 step of each of 2 optimizers, 5 tensors" in succeed("info run.zarr")[0]
    said = refuse("info run.zarr --rank 3")
    assert "holds no rank 3; it holds weight gradients of optimizer 0 on rank 0" in said
    assert "no tensor matches 'g.wieght'; did you mean g.weight" in refuse("info run.zarr --tensors g.wieght")


def test_a_trace_without_its_end(succeed, tmp_path):
    with create_trace(tmp_path / "run.h5") as writer:
        assert "still being written, no steps, 0 tensors" in succeed("info run.h5")[0]
        writer.append(0, "w", [1.0])
        writer.commit(0)
        assert "still being written, 1 step, 1 tensor, 1 element" in succeed("info")[0]
    if (child := os.fork()) == 0:
        writer = create_trace(tmp_path / "killed.zarr")
        writer.append(0, "w", [1.0])
        writer.commit(0)
        os._exit(1)
    os.waitpid(child, 0)
    said = "killed.zarr: not finished: its process was killed, or runs on another machine, 1 step, "
    assert said in succeed("info killed.zarr")[0]


def test_the_newest_trace_is_found_and_no_gradient_is_read(succeed, refuse, tmp_path):
    assert "no trace in" in refuse("info", code=3)
    for name in ("old.h5", "new.zarr"):
        write_trace(tmp_path / name)
    (tmp_path / "newer.zarr").mkdir()
    for chunk in (tmp_path / "new.zarr").rglob("c.*"):
        if "%" in chunk.parent.name or "fc." in chunk.parent.name:
            chunk.write_bytes(b"")
    out, err = succeed("info")
    assert err == "taking the newest trace in this folder: new.zarr\n"
    assert out.startswith("new.zarr: complete")
    os.utime(tmp_path / "old.h5", (2**33, 2**33))
    assert succeed("info")[0].startswith("old.h5: complete")


def test_it_loads_neither_zarr_nor_torch_nor_numba(tmp_path):
    path = write_trace(tmp_path / "run.zarr")
    program = (
        "import sys; from gtrace.cli import main\n"
        "try: main(['info', sys.argv[1], '--json'])\n"
        "finally: print({'zarr', 'torch', 'numba', 'matplotlib', 'scipy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("drift", [False, True])
def test_info_says_whether_ranks_agree_where_they_drift_apart_and_what_cannot_be_compared(tmp_path, succeed, drift):
    with create_trace(tmp_path / "run.zarr") as writer:
        for step in range(3):
            for rank in (0, 1):
                apart = rank * (step > 1) if drift else 0
                writer.append(step, "w", [1.0, 2.0 + apart], rank=rank, stage="reduced")
                writer.append(step, "own", [1.0 if drift else 2.0 + rank], rank=rank)
                if drift:
                    part = {"placements": ["Shard(dim=0)"], "place": [rank]}
                    writer.append(step, "part", [float(rank)], rank=rank, stage="reduced", **part)
            writer.commit(step)
    local = "local gradients differ (3 of 3), as on different data"
    said = f"ranks    2; {local}; reduced gradients are the same on all\n"
    if drift:
        said = (
            "ranks    2; each holds its part of 1 tensor; local gradients are the same on all: they saw the same data; "
            "reduced gradients differ (1 of 3, first at step 2: w); the ranks have drifted apart\n"
        )
    assert said in succeed("info run.zarr")[0]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return laws.write_laws(tmp_path_factory.mktemp("laws") / "run.zarr", kinds=("weight", "neural"))


def test_fit_says_first_which_law_fits(succeed, trace):
    out, err = succeed("info --fit --kind neural", trace)
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == f"{trace}: laws of |g| without zeros, 4 tensors, 3 steps from 0 to 20"
    assert lines[1].startswith("The lognormal law fits best on average: mean KS distance 0.0")
    row = next(line.split() for line in lines if line.startswith("wide"))
    fits = [fit_magnitudes(laws.gradient("wide", step)) for step in laws.STEPS]
    assert row[2] == "lognormal"
    for place, law in enumerate(LAWS):
        assert float(row[3 + place]) == pytest.approx(sum(fit.ks[law] for fit in fits) / 3, abs=6e-4)
    assert float(row[3 + len(LAWS)]) == pytest.approx(sum(fit.mu_log2 for fit in fits) / 3, rel=5e-3)
    assert float(row[4 + len(LAWS)]) == pytest.approx(sum(fit.sigma_log2 for fit in fits) / 3, rel=5e-3)
    assert all(word.startswith("1-") for word in row[-5:])
    assert "weight" not in out
    out, _ = succeed("info --fit --tensors narrow --steps 0", trace)
    rows = [line.split() for line in out.splitlines() if line.startswith("narrow")]
    assert [row[1] for row in rows] == ["weight", "neural"]


def test_formats_as_a_table_and_its_answer_in_25_lines(succeed, trace):
    lines = succeed("formats --kind neural --bits 4-8", trace)[0].splitlines()
    assert len(lines) <= 25
    assert lines[1].startswith("At 8 bits, 1-")
    assert lines[-1] == f"next: gtrace sweep {trace} --methods fp --bits 4-8"
    assert "Mind: wide at 4 bits loses up to" in succeed("formats --kind neural --bits 4 --tensors wide", trace)[0]
    assert "Mind" not in succeed("formats --kind neural --bits 8 --tensors narrow", trace)[0]


def test_formats_as_toml_and_json_are_the_same(succeed, refuse, trace, folder):
    out, err = succeed("formats --kind neural --bits 6 -o recipe.toml --json", trace)
    assert err == "recipe.toml\n"
    written, said = tomllib.loads((folder / "recipe.toml").read_text()), json.loads(out)
    assert written["gtrace_formats"] == 1
    assert [layer["tensor"] for layer in written["layers"]] == list(laws.LAYERS)
    assert written["provenance"] == said["provenance"]
    assert written["layers"][0]["formats"]["6"] == said["layers"][0]["formats"]["6"]
    assert written["provenance"]["steps"] == list(laws.STEPS)
    assert list(folder.iterdir()) == [folder / "recipe.toml"]
    (folder / "recipe.toml").write_text("mine")
    assert "already exists" in refuse("formats -o recipe.toml", trace, code=4)
    assert (folder / "recipe.toml").read_text() == "mine"
    succeed("formats -o recipe.toml --force --steps 0 --bits 4", trace)
    assert tomllib.loads((folder / "recipe.toml").read_text())["provenance"]["steps"] == [0]
