import json

import pytest
from helpers_sweep import rows_of, write_trace
from helpers_trace import write_arrays

import gtrace
from gtrace.sweep import ResultStore
from gtrace.sweep.quick import representative_steps


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_short_form(call, tmp_path, suffix):
    write_trace(tmp_path / f"run.{suffix}", steps=(0, 1))
    done = call("sweep", f"run.{suffix}", "--methods", "qsgd,terngrad", "--bits", "2-3")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "36 rows: 3 codecs on 3 tensors at 2 steps",
        "run.sweep.db",
        "next: gtrace report run.sweep.db",
    ]
    stored = ResultStore.load(tmp_path / "run.sweep.db")
    direct = gtrace.run_sweep(tmp_path / f"run.{suffix}", ["qsgd:bits=2", "qsgd:bits=3", "terngrad"])
    assert rows_of(stored) == rows_of(direct)
    assert stored.provenance["command"][1:3] == ["sweep", f"run.{suffix}"]


def test_without_a_choice_it_takes_representative_steps_and_says_what_all_would_take(call, tmp_path):
    write_trace(tmp_path / "run.zarr", steps=range(60))
    done = call("sweep", "run.zarr", "--tensors", "fc.*")
    assert done.returncode == 0, done.stderr
    said = "gtrace: measures 20 configurations on 32 of 60 steps, seconds; --all: "
    assert done.stderr.startswith(said), done.stderr
    stored = ResultStore.load(tmp_path / "run.sweep.db")
    assert tuple(sorted(set(stored["step"]))) == representative_steps(range(60))
    assert set(stored["method"]) >= {"qsgdinf", "alq", "zipml", "nuqsgd", "topk", "ef-signsgd", "fp", "bf16"}
    done = call("sweep", "run.zarr", "--all", "--bits", "3")
    assert (done.returncode, done.stderr) == (2, "gtrace: --all measures everything: leave out --bits\n")


def test_a_new_selection_is_added_and_reported_and_force_starts_empty(call, tmp_path):
    write_trace(tmp_path / "run.zarr", steps=range(4))
    for options, shown, stored in (
        (("--methods", "qsgd,terngrad", "--bits", "2"), 2, 2),
        (("--methods", "nuqsgd,terngrad", "--bits", "3", "--steps", "0-1"), 2, 3),
        (("--methods", "qsgd", "--bits", "2"), 1, 3),
        (("--methods", "natural", "--force"), 1, 1),
    ):
        done = call("sweep", "run.zarr", *options)
        assert f": {shown} codec{'s' * (shown > 1)} on 3 tensors" in done.stdout, done.stderr
        found = ResultStore.load(tmp_path / "run.sweep.db")
        assert len(set(found["codec"])) == stored
        assert len(set(found.selected["codec"])) == shown
        (section,) = json.loads(call("report", "run.sweep.db", "--json").stdout)["sweeps"]
        assert len(section["configurations"]) == shown
        assert len(section["steps"]) == (2 if "--steps" in options else 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--methods", "qsgd:bit=3"), "no parameter 'bit'; did you mean bits"),
        (("--tensors", "nope.*"), "no tensor matches 'nope.*'"),
        (("--refit", "sometimes"), "choose pooled, previous, each, once"),
        (("--bucket-size", "0"), "out of range"),
        (("-o", "missing/out.db"), "does not exist"),
    ],
)
def test_bad_input(refuse, tmp_path, words, said):
    write_trace(tmp_path / "run.zarr", steps=(0,))
    assert said in refuse("sweep", "run.zarr", "--methods", "qsgd", *words)
    assert not (tmp_path / "run.sweep.db").exists()


def test_existing_output_is_left_untouched(call, tmp_path):
    write_trace(tmp_path / "run.zarr", steps=(0,))
    (tmp_path / "run.sweep.db").write_text("mine")
    done = call("sweep", "run.zarr", "--methods", "terngrad")
    assert done.returncode == 4
    assert (tmp_path / "run.sweep.db").read_text() == "mine"
    done = call("sweep", "run.zarr", "--methods", "terngrad", "--force")
    assert done.returncode == 0


def test_sparsities_and_kinds(call, tmp_path):
    with gtrace.create_trace(tmp_path / "run.zarr") as writer:
        for step in range(2):
            writer.append(step, "fc.weight", [0.1, -0.2, 0.3, 0.4])
            writer.append(step, "fc", [0.5, -0.1, 0.2][: 3 - step], kind="neural")
            writer.commit(step)
    sparsities = ("--methods", "prune,topk-prune", "--sparsity", "0.5-0.95")
    done = call("sweep", "run.zarr", *sparsities, "--json")
    assert json.loads(done.stdout)["left_out"] == {"neural": 1}
    assert done.stderr == "gtrace: 1 tensor of neural gradients left out; --kind neural takes them\n"
    result = ResultStore.load(tmp_path / "run.sweep.db")
    assert sorted(set(result["sparsity_asked"])) == pytest.approx([0.5 + 0.05 * k for k in range(10)])
    assert set(result["tensor"]) == {"fc.weight"}
    done = call("sweep", "run.zarr", *sparsities, "--kind", "neural", "-o", "neural.db")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(set(ResultStore.load(tmp_path / "neural.db")["n"])) == [2, 3]
    done = call("sweep", "run.zarr", "--methods", "qsgd", "--sparsity", "0.5", "-o", "x.db")
    assert done.returncode == 2
    assert "--sparsity: none of the chosen codecs takes it" in done.stderr


def test_a_sweep_over_averages_says_that_the_wire_is_worse(call, tmp_path):
    for stage in ("reduced", "local"):
        write_arrays(tmp_path / f"{stage}.zarr", {"w": [1.0, 2.0]}, attrs={"world_size": 4}, stage=stage)
        done = call("sweep", f"{stage}.zarr", "--methods", "qsgd", "--bits", "2")
        assert done.returncode == 0
        told = "gtrace: warning: gradients are averages over 4 processes" in done.stderr
        assert told == (stage == "reduced"), done.stderr
        assert ("errors on the wire will be larger" in done.stderr) == told
