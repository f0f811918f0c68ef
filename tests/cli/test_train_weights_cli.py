import json

import pytest

from gtrace.runlog import read_runlog

SMALL = ["--task", "digits-mlp", "--steps", "4", "--batch-size", "2", "--workers", "2"]


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
