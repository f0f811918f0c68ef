import json
import os
import re

import pytest

from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.runlog import read_runlog

SMALL = ["--kind", "neural", "--task", "digits-mlp", "--steps", "4", "--batch-size", "16"]


@pytest.fixture(autouse=True)
def wide(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_a_table_with_the_cosines_and_a_log(folder, succeed):
    out, err = succeed("study", "compare", "qsgdinf", "--bits", "3", "--shadow", "2", *SMALL)
    assert err == ""
    lines = out.splitlines()
    assert re.split(r"  +", lines[0].strip()) == [
        *("codec", "accuracy", "loss", "bits", "a step", "smaller", "variance", "cosine", "worst", "codec CPU")
    ]
    assert re.match(r"none +\d+\.\d % +\d\.\d{4}  32\.00  16\.4 kB +1\.0x +0 +- +- +\d+ %", lines[1])
    found = re.match(r"qsgdinf:bits=3 +\d.* (0\.\d{4})  (0\.\d{4}) +\d+ %", lines[2])
    assert found
    assert float(found[2]) < float(found[1])
    assert "digits-mlp: 1 worker with 16 samples, 4 steps, seed 0." in out
    assert re.search(r"passes \(2\)\. worst: the tensor with the lowest, fc\d\.\w+\.", out)
    assert lines[-2] == "digits-mlp-neural-qsgdinf-bits3.jsonl"
    records = read_runlog(folder / lines[-2])
    assert (records[0]["kind"], records[0]["shadow"], records[0]["workers"]) == ("neural", 2, 1)
    assert records[0]["command"].split()[-6:] == ["--kind", "neural", "--layers", "inner", "--shadow", "2"]
    shadows = [r for r in records if r["type"] == "shadow"]
    assert len(shadows) == 2 * 6
    assert set(shadows[0]) == {
        *("type", "run", "seed", "step", "tensor", "cosine_alone", "error_alone", "cosine", "error")
    }
    assert {r["bits_float32"] for r in records if r["type"] == "step"} == {32 * 16 * (128 + 128)}
    (run,) = [run for run in analyze_runs(records).runs if run.shadow]
    assert run.spec == "qsgdinf:bits=3"


def test_json_carries_the_shadow(folder, succeed):
    out, _ = succeed("study", "compare", "terngrad", *SMALL, "--shadow", "1", "--json")
    said = json.loads(out)
    none, coded = said["runs"]
    assert said["kind"] == "neural"
    assert none["shadow"] is None
    shadow = coded["shadow"]
    assert shadow["steps"] == 4
    own = [r for r in read_runlog(folder / said["output"]) if r["type"] == "shadow"]
    assert [item["tensor"] for item in shadow["tensors"]] == [r["tensor"] for r in own[:6]]
    assert shadow["worst_cosine"] == min(item["cosine"] for item in shadow["tensors"])
    assert shadow["cosine"] == pytest.approx(sum(r["cosine"] for r in own) / len(own))


def test_the_report_shows_the_weight_gradients(call, succeed):
    assert call("study", "compare", "int8", *SMALL, "--shadow", "2", "-o", "a.jsonl").returncode == 0
    out, _ = succeed("report", "a.jsonl", "--full", "-o", "a.md")
    assert "Weight gradients under compressed neural gradients" in out
    assert re.search(r"\nfc1\.weight +(0\.99\d\d|1\.0000)", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ef:topk", *SMALL], "gtrace: kind neural: ef:topk keeps memory of each value between steps"),
        (["topk", "--error-feedback", *SMALL], "gtrace: kind neural: ef:topk keeps memory"),
        (["qsgd", "--shadow", "2"], "gtrace: shadow: compares weight gradients under compressed neural"),
        (["qsgd", "--kind", "nerual"], "gtrace: Invalid value for '--kind'"),
        (["qsgd", *SMALL, "--shadow", "0"], "gtrace: Invalid value for '--shadow'"),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(folder, arguments, message, refuse):
    assert refuse("study", "compare", *arguments).startswith(message)
    assert os.listdir(folder) == []


def test_sparsity(folder, refuse, succeed):
    out, _ = succeed("study", "compare", "prune", "--sparsity", "0.9", *SMALL, "--steps", "8", "--json")
    said = json.loads(out)
    assert said["output"] == "digits-mlp-neural-prune-sparsity0.9.jsonl"
    none, coded = said["runs"]
    assert none["sparsity"] < 0.75
    assert coded["sparsity"] == pytest.approx(0.9, abs=0.05)
    err = refuse("study", "compare", "prune:sparsity=0.9", "--sparsity", "0.9", *SMALL)
    assert "the codec 'prune:sparsity=0.9' names its sparsity already; give it once" in err


def test_sparsity_of_a_codec_without_it_is_ignored_aloud(call):
    done = call("study", "compare", "terngrad", "--sparsity", "0.8", *SMALL)
    assert (done.returncode, done.stderr) == (
        0,
        "gtrace: terngrad has no sparsity to choose; --sparsity 0.8 is ignored\n",
    )
