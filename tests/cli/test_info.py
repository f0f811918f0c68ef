"""``gtrace info``: the table, JSON, selections and errors."""

import io
import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from helpers_trace import SHAPES, STEPS, SUFFIXES, edit_json, gradient, present, write_arrays, write_trace
from rich.console import Console

from gtrace.cli.info import FEW_ROWS, show
from gtrace.report.analysis.history import RunHistory
from gtrace.report.names import sparkline
from gtrace.trace import Trace, create_trace, open_trace


@pytest.fixture
def info(call):
    return partial(call, "info")


def shown(trace, width=200, encoding="utf-8", *, full=True):
    """What a terminal of this width and encoding gets."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, highlight=False, legacy_windows=False)
    show(trace, RunHistory(trace, trace.tensors), console, full=full)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_table(suffix, info, tmp_path):
    attrs = {"argv": ["train.py", "--name", "a b"], "model": "Net", "capture": {"errors": 2}}
    path = write_trace(tmp_path / f"run{suffix}", attrs=attrs)
    code, out, err = info(path, "--full")
    assert (code, err) == (0, "")
    head, table = out.split("\n\n")[:2]
    lines = head.splitlines()
    assert lines[0] == f"{path}: complete, 6 steps, 4 tensors, 36,225 elements"
    assert [line.split(maxsplit=1) for line in lines[1:]] == [
        ["script", "train.py --name 'a b'"],
        ["model", "Net"],
        ["ranks", "1"],
        ["steps", "0 to 9"],
        ["loss", "2.50 to 0.250  █▄▃▂▁▁"],
        ["errors", "2 while capturing; gradients may be missing"],
        ["noise", "can be estimated, from three consecutive steps"],
    ]
    for name, line in zip(SHAPES, table.splitlines()[2:], strict=True):
        norms = [np.linalg.norm(gradient(name, step)) for step in present(name)]
        cells = line.split()
        assert (cells[0], cells[1]) == (name, "x".join(map(str, SHAPES[name])) or "scalar")
        assert cells[2:4] == ["float32", str(len(present(name)))]
        assert float(cells[4]) == pytest.approx(norms[0], rel=5e-3)
        assert float(cells[5]) == pytest.approx(norms[-1], rel=5e-3)
        largest = max(np.abs(gradient(name, step)).max() for step in present(name))
        assert float(cells[6]) == pytest.approx(largest, rel=5e-3)
        assert cells[7:9] == ["0.0%", "0"]
        assert cells[9] == sparkline(norms, 16)
    assert f"next: gtrace sweep {path}" in out


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {"kind": "SGD", "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 64, "planned_steps": 1000},
            "SGD, lr 0.1 to 0.01, momentum 0.9, weight decay 0.0005 on 1 of 2 tensors; batch 64; 1,000 steps planned",
        ),
        (
            {"kind": "SGD", "momentum": 0.9, "nesterov": True, "steps_seen": 9},
            "SGD, lr 0.1 to 0.01, Nesterov momentum 0.9; 9 steps taken",
        ),
        (
            {"kind": "AdamW", "betas": [0.9, 0.95], "batch_size": 7, "varies": ["batch_size"]},
            "AdamW, lr 0.1 to 0.01, betas 0.9 and 0.95; batch about 7",
        ),
        ({"batch_size": 64}, None),
    ],
)
def test_the_optimizer(facts, text, info, tmp_path):
    with create_trace(tmp_path / "run.zarr", attrs={"optimizers": {"0": facts}}) as writer:
        for step, lr in enumerate([0.1, 0.05, 0.01]):
            writer.append(step, "w", np.ones(3))
            writer.append(step, "b", np.ones(2), **({} if step else {"group": {"weight_decay": 0.0}}))
            writer.commit(step, lr=lr)
    told = [line[9:] for line in info(tmp_path / "run.zarr")[1].splitlines() if line.startswith("training ")]
    assert told == ([] if text is None else [text])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_json(suffix, info, tmp_path):
    path = write_trace(tmp_path / f"run{suffix}", attrs={"seed": 3})
    code, out, err = info(path, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    with open_trace(path) as trace:
        assert told["fingerprint"] == trace.fingerprint
    assert told["status"] == "complete"
    assert told["attrs"]["seed"] == 3
    assert told["ranks"] == [0]
    counts = {"rank": 0, "kind": "weight", "optimizer": 0, "steps": 6, "first_step": 0, "last_step": 9}
    assert told["streams"] == [counts | {"first_loss": 2.5, "last_loss": 0.25}]
    assert [tensor["name"] for tensor in told["tensors"]] == list(SHAPES)
    matrix = told["tensors"][1]
    assert (matrix["shape"], matrix["size"], matrix["steps"]) == ([7, 31], 217, 4)
    assert matrix["norm_last"] == pytest.approx(np.linalg.norm(gradient("fc.weight", STEPS[-1])), rel=1e-6)


def test_it_reads_no_gradient(info, tmp_path):
    path = write_trace(tmp_path / "run.zarr")
    for chunk in path.rglob("c.*"):
        if "%" in chunk.parent.name or "fc." in chunk.parent.name:
            chunk.write_bytes(b"")
    assert info(path)[0] == 0


def test_what_is_not_finite_is_counted(info, tmp_path):
    values = dict.fromkeys(range(3), np.float32([np.nan, np.inf, 0.0, 3.0]))
    write_arrays(tmp_path / "run.zarr", {"w": values}, [5.0, np.nan, np.nan])
    code, out, _ = info(tmp_path / "run.zarr", "--full")
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.startswith("w "))
    assert line.split()[4:] == ["NaN", "NaN", "3.00", "25.0%", "6", "×××"]
    assert "loss     5.00, then not finite  ▁××" in out
    first = info(tmp_path / "run.zarr")[1].splitlines()[:3]
    assert first[1:] == [
        "DIVERGED the loss is not finite from step 1 on; last finite loss 5.00 at step 0",
        "broken   NaN or infinity in the gradients of 1 of 1 tensor, at 3 of 3 steps, first at step 0",
    ]
    found = json.loads(info(tmp_path / "run.zarr", "--json")[1])["divergence"]
    assert (found["loss_step"], found["last_loss"], found["gradient_step"], found["values"]) == (1, 5.0, 0, 6)


#: what tells tensors apart
KEYS = ("name", "kind", "optimizer")


def test_selections(info, refuse, tmp_path):
    with create_trace(tmp_path / "run.zarr") as writer:
        for optimizer in range(2):
            for name in ("g.weight", "g.bias"):
                writer.append(0, name, [1.0], optimizer=optimizer)
        writer.append(0, "act", [1.0], kind="neural")
    path = tmp_path / "run.zarr"

    def names(*options):
        return [tuple(map(t.get, KEYS)) for t in json.loads(info(path, "--json", *options)[1])["tensors"]]

    act, biases = ("act", "neural", 0), [("g.bias", "weight", 0), ("opt1/g.bias", "weight", 1)]
    second = [("opt1/g.weight", "weight", 1), ("opt1/g.bias", "weight", 1)]
    assert len(names()) == 5
    assert names("--kind", "neural") == [act]
    assert names("--optimizer", "1") == second
    assert names("--tensors", "*.bias", "--tensors", "act") == [*biases, act]
    assert names("--tensors", "opt1/*", "--tensors", "act") == [*second, act]
    assert names("--tensors", "g.b*,g.w*", "--optimizer", "1") == second
    out = info(path)[1]
    for words in ("kind", "optimizer", "1 step of each of 2 optimizers, 5 tensors"):
        assert words in out
    assert "1, 0 to 0 (weight gradients, optimizer 1, rank 0)" in info(path, "--full")[1]
    said = refuse("info", path, "--rank", "3")
    assert "holds no rank 3; it holds weight gradients of optimizer 0 on rank 0" in said
    said = refuse("info", path, "--tensors", "g.wieght")
    assert "no tensor matches 'g.wieght'; did you mean g.weight" in said


def test_a_trace_that_is_being_written_and_an_empty_one(info, tmp_path):
    with create_trace(tmp_path / "run.h5") as writer:
        code, out, _ = info(tmp_path / "run.h5")
        assert code == 0
        assert "still being written, no steps, 0 tensors" in out
        writer.append(0, "w", [1.0])
        writer.commit(0)
        assert "still being written, 1 step, 1 tensor, 1 element" in info()[1]


def test_a_trace_whose_process_was_killed(info, tmp_path):
    if (child := os.fork()) == 0:
        writer = create_trace(tmp_path / "killed.zarr")
        writer.append(0, "w", [1.0])
        writer.commit(0)
        os._exit(1)
    os.waitpid(child, 0)
    assert "killed.zarr: not finished: its process was killed, or runs on another machine, 1 step, " in info()[1]


def test_the_newest_trace_is_found(info, tmp_path):
    code, _, err = info()
    assert (code, err.count("\n")) == (3, 1)
    assert "no trace in" in err
    for name in ("old.h5", "new.zarr"):
        write_trace(tmp_path / name)
    (tmp_path / "newer.zarr").mkdir()
    code, out, err = info()
    assert (code, err) == (0, "taking the newest trace in this folder: new.zarr\n")
    assert out.startswith("new.zarr: complete")
    os.utime(tmp_path / "old.h5", (2**33, 2**33))
    assert info()[1].startswith("old.h5: complete")


def test_names_that_would_act_on_a_terminal_are_shown(info, tmp_path):
    name = "[red]a[/red]\x1b[31m\u202e\n"
    write_arrays(tmp_path / "run.zarr", {name: [1.0]}, attrs={"model": "\x1b]0;x\x07"}, dtype="\x1b[1m")
    code, out, _ = info(tmp_path / "run.zarr")
    assert code == 0
    assert r"[red]a[/red]\x1b[31m\u202e\n" in out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert info(tmp_path / "run.zarr", "--tensors", "x")[2].isprintable() is False
    assert "\x1b" not in info(tmp_path / "run.zarr", "--tensors", "x")[2]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 140])
def test_narrow_terminals(width):
    long = "encoder.layers.11.self_attn.in_proj_weight"
    trace = Trace.from_arrays({long: {s: gradient(long, s, (40, 30)) for s in range(40)}, "b": [1.0]})
    out = shown(trace, width)
    table = out.split("\n\n")[1].splitlines()
    rows = [line for line in table if not line.startswith("No room")]
    assert all(len(line) <= width for line in rows)
    # The name is there in full, folded where it has to be.
    assert long in "".join(line.split("  ")[0].strip() for line in rows)
    assert ("No room for" in out) == (width < 140)
    if width >= 60:
        assert sparkline([float(np.linalg.norm(gradient(long, s, (40, 30)))) for s in range(40)], 16) in out


@pytest.mark.parametrize(("count", "ranks"), [(1, 1), (8, 1), (40, 6)])
def test_the_tensors_with_most_energy_in_25_lines(tmp_path, count, ranks):
    with create_trace(tmp_path / "run.zarr", attrs={"argv": ["train.py"], "model": "Net"}) as writer:
        for step in range(3):
            for rank in range(ranks):
                for k in range(count):
                    writer.append(step, f"blocks.{k}.attention.in_proj_weight", [1.0 + k] * 7, rank=rank)
            writer.commit(step, loss=4.0**step)
    with open_trace(tmp_path / "run.zarr") as trace:
        lines = shown(trace, 80, full=False).splitlines()
    assert len(lines) <= 25
    assert lines[1] == "DIVERGED the loss rises from 1.00 to 16.0"
    assert "noise    can be estimated, from" in "".join(lines)
    table = [line for line in lines if line.startswith("blocks.")]
    assert len(table) == min(FEW_ROWS, count)
    assert table[0].split()[0] == f"blocks.{count - 1}.attention.in_proj_weight"


def test_a_terminal_without_unicode():
    trace = Trace.from_arrays({"schön": {step: [step] for step in range(3)}})
    out = shown(trace, encoding="ascii")
    assert r"sch\xf6n" in out
    assert "_:#" in out.replace("=", ":")
    assert sparkline([0, 1], encoding="ascii") == "_#"


def test_sparkline():
    drawn = ["▁", "▁▁", "▁▂▃▄▅▆▇█", "▁" * 6 + "█" * 6]
    assert [*map(sparkline, ([1.0], [2.0, 2.0], range(8), [0.0] * 500 + [1.0] * 500))] == drawn


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_errors_are_one_line_and_exit_3(as_json, refuse, tmp_path):
    path = write_trace(tmp_path / "run.zarr")
    edit_json(path / "zarr.json", lambda document: document["attributes"].update(version=99))
    for place, word in (
        (path, "newer gtrace"),
        (tmp_path / "none.zarr", "no such trace"),
        (tmp_path, "not a gtrace trace"),
    ):
        err = refuse("info", place, *as_json, code=3)
        assert err.startswith(f"gtrace: {place}: ")
        assert word in err


def test_it_loads_neither_zarr_nor_torch_nor_numba(tmp_path):
    path = write_trace(tmp_path / "run.zarr")
    program = (
        "import sys; from gtrace.cli import main\n"
        "try: main(['info', sys.argv[1], '--json'])\n"
        "finally: print({'zarr', 'torch', 'numba', 'matplotlib', 'scipy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


def test_info_says_whether_ranks_agree(info, tmp_path):
    with create_trace(tmp_path / "run.zarr") as writer:
        for rank in (0, 1):
            writer.append(0, "same", [1.0, 2.0], rank=rank, stage="reduced")
            writer.append(0, "own", [1.0, 2.0 + rank], rank=rank)
        writer.commit(0)
    assert (
        "ranks    2; local gradients differ (1 of 1), as on different data; reduced gradients are the same on all\n"
    ) in info("run.zarr").stdout


def test_info_says_where_ranks_drift_apart_and_what_cannot_be_compared(tmp_path, info):
    with create_trace(tmp_path / "run.zarr") as writer:
        for step in range(3):
            for rank in (0, 1):
                writer.append(step, "w", [1.0, 2.0 + rank * (step > 1)], rank=rank, stage="reduced")
                writer.append(step, "alike", [1.0], rank=rank)
                part = {"placements": ["Shard(dim=0)"], "place": [rank]}
                writer.append(step, "part", [float(rank)], rank=rank, stage="reduced", **part)
            writer.commit(step)
    code, out, _ = info(str(tmp_path / "run.zarr"))
    assert code == 0
    assert (
        "ranks    2; each holds its part of 1 tensor; local gradients are the same on all: they saw the same data; "
        "reduced gradients differ (1 of 3, first at step 2: w); the ranks have drifted apart\n"
    ) in out
