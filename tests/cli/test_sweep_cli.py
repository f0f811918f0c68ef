import json

import pytest
from helpers_sweep import rows_of, write_trace
from helpers_trace import write_arrays

import gtrace
from gtrace.sweep import ResultStore
from gtrace.sweep.quick import representative_steps


def test_short_form(succeed, folder):
    write_trace(folder / "run.h5", steps=(0, 1))
    out, err = succeed("sweep run.h5 --methods qsgd,terngrad --bits 2-3")
    assert err == ""
    assert out.splitlines() == [
        "36 rows: 3 codecs on 3 tensors at 2 steps",
        "run.sweep.db",
        "next: gtrace report run.sweep.db",
    ]
    stored = ResultStore.load(folder / "run.sweep.db")
    direct = gtrace.run_sweep(folder / "run.h5", ["qsgd:bits=2", "qsgd:bits=3", "terngrad"])
    assert rows_of(stored) == rows_of(direct)
    assert stored.provenance["command"][1:3] == ["sweep", "run.h5"]


def test_without_a_choice_it_takes_representative_steps_and_says_what_all_would_take(succeed, folder):
    write_trace(folder / "run.zarr", steps=range(60))
    _, err = succeed("sweep run.zarr --tensors fc.*")
    assert err.startswith("gtrace: measures 20 configurations on 32 of 60 steps, seconds; --all: ")
    stored = ResultStore.load(folder / "run.sweep.db")
    assert tuple(sorted(set(stored["step"]))) == representative_steps(range(60))
    assert set(stored["method"]) >= {"qsgdinf", "alq", "zipml", "nuqsgd", "topk", "ef-signsgd", "fp", "bf16"}


def test_a_new_selection_is_added_and_reported_and_force_starts_empty(succeed, refuse, folder):
    write_trace(folder / "run.zarr", steps=range(4))
    (folder / "run.sweep.db").write_text("mine")
    refuse("sweep run.zarr --methods terngrad", code=4)
    assert (folder / "run.sweep.db").read_text() == "mine"
    for options, shown, stored in (
        ("--methods qsgd,terngrad --bits 2 --force", 2, 2),
        ("--methods nuqsgd,terngrad --bits 3 --steps 0-1", 2, 3),
        ("--methods qsgd --bits 2", 1, 3),
        ("--methods natural --force", 1, 1),
    ):
        assert f": {shown} codec{'s' * (shown > 1)} on 3 tensors" in succeed(f"sweep run.zarr {options}")[0]
        found = ResultStore.load(folder / "run.sweep.db")
        assert len(set(found["codec"])) == stored
        assert len(set(found.selected["codec"])) == shown
        (section,) = json.loads(succeed("report run.sweep.db --json")[0])["sweeps"]
        assert len(section["configurations"]) == shown
        assert len(section["steps"]) == (2 if "--steps" in options else 4)


def test_sparsities_and_kinds(succeed, folder):
    with gtrace.create_trace(folder / "run.zarr") as writer:
        for step in range(2):
            writer.append(step, "fc.weight", [0.1, -0.2, 0.3, 0.4])
            writer.append(step, "fc", [0.5, -0.1, 0.2][: 3 - step], kind="neural")
            writer.commit(step)
    line = "sweep run.zarr --methods prune,topk-prune --sparsity 0.5-0.95"
    out, err = succeed(f"{line} --json")
    assert json.loads(out)["left_out"] == {"neural": 1}
    assert err == "gtrace: 1 tensor of neural gradients left out; --kind neural takes them\n"
    result = ResultStore.load(folder / "run.sweep.db")
    assert sorted(set(result["sparsity_asked"])) == pytest.approx([0.5 + 0.05 * k for k in range(10)])
    assert set(result["tensor"]) == {"fc.weight"}
    assert succeed(f"{line} --kind neural -o neural.db")[1] == ""
    assert sorted(set(ResultStore.load(folder / "neural.db")["n"])) == [2, 3]


@pytest.mark.parametrize("stage", ["reduced", "local"])
def test_a_sweep_over_averages_says_that_the_wire_is_worse(succeed, folder, stage):
    write_arrays(folder / "run.zarr", {"w": [1.0, 2.0]}, attrs={"world_size": 4}, stage=stage)
    _, err = succeed("sweep run.zarr --methods qsgd --bits 2")
    assert ("gtrace: warning: gradients are averages over 4 processes" in err) == (stage == "reduced")
    assert ("errors on the wire will be larger" in err) == (stage == "reduced")
