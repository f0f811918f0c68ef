"""``--every`` and optimizers that exchange by themselves, from the outside."""

import json

import pytest

SMALL = ("--steps", 3, "--workers", 2, "--task", "digits-mlp", "--json")


@pytest.mark.parametrize(
    ("words", "log", "runs"),
    [
        (("--optimizer", "onebit-adam"), "digits-mlp-onebit-adam.jsonl", ["none", "onebit-adam"]),
        (("bf16", "--every", 2), "digits-mlp-bf16-every2.jsonl", ["none", "bf16 every=2"]),
    ],
)
def test_a_study_needs_few_words_and_its_command_repeats_it(call, words, log, runs):
    code, out, err = call("study", "compare", *words, *SMALL)
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
