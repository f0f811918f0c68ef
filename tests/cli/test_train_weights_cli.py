import json

import pytest

from gtrace.runlog import read_runlog

SMALL = ["--task", "digits-mlp", "--steps", "4", "--batch-size", "2", "--workers", "2"]


def test_a_table_with_the_error_of_the_weights(call):
    code, out, err = call("train", "--quantize", "model", "--levels", "optimal,uniform", "--weight-levels", "5", *SMALL)
    assert code == 0
    lines = out.splitlines()
    assert "warning" not in err
    assert lines[0].split() == ["codec", "accuracy", "loss", "bits", "sent", "variance", "weights"]
    assert lines[1].split()[-1] == "-"
    optimal, uniform = (float(line.split()[-1]) for line in lines[2:4])
    assert 0 < optimal <= uniform < 0.2
    assert "2.32 bits each,\n63 % of the parameters (fc2.weight)" in out
    assert "digits-mlp-weights-optimal5-uniform5.jsonl" in out


def test_json_and_the_command_of_the_log(folder, call):
    arguments = ["--codec", "alq:bits=4", "--quantize", "model", "--bits", "3", *SMALL]
    code, out, _ = call("train", *arguments, "-o", "a.jsonl", "--json")
    assert code == 0
    summary = json.loads(out)
    assert [run["run"] for run in summary["runs"]] == ["none", "alq:bits=4 weights=optimal7"]
    assert summary["weights"][0]["tensors"] == ["fc2.weight"]
    assert summary["runs"][0]["weight_error"] is None
    assert 0 < summary["runs"][1]["weight_error"] < 1
    command = read_runlog(folder / "a.jsonl")[0]["command"].split()
    code, out, _ = call("train", *command[2:], "-o", "b.jsonl", "--json")
    assert code == 0
    again = json.loads(out)
    assert again["runs"][1]["loss"] == summary["runs"][1]["loss"]


def test_seeds_show_the_error_of_the_weights(call):
    code, out, _ = call("train", "--quantize", "model", "--bits", "2", "--seeds", "2", *SMALL)
    assert code == 0
    assert out.splitlines()[0].split()[-1] == "weights"
    assert "1.58 bits each" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quantize", "gradients", "--bits", "3"], "--quantize gradients: in a network only the weights"),
        (["--quantize", "model"], "give the levels of a weight by --weight-levels, or its --bits"),
        (["--quantize", "model", "--bits", "3", "--weight-levels", "5"], "by --weight-levels, or its --bits"),
        (["--quantize", "model", "--bits", "1"], "a weight takes 2 to 8"),
        (["--quantize", "model", "--weight-levels", "1"], "1 is not between 2 and 256"),
        (["--quantize", "model", "--bits", "3", "--levels", "common"], "'common' is unknown"),
        (["--weight-levels", "5", "--codec", "none"], "belongs to --quantize model"),
        (["--levels", "optimal", "--codec", "none"], "--levels optimal: belongs to --quantize"),
        (["--quantize", "model", "--bits", "3", "--kind", "neural"], "choose kind weight"),
        (["--codec", "none", "--quantize", "model", "x.py"], "--quantize is for built-in tasks"),
        (["--codec", "none", "--levels", "optimal", "x.py"], "choose own or common"),
    ],
)
def test_one_line_says_what_cannot_be(arguments, said, call):
    code, _, err = call("train", *arguments)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
