"""``gtrace study compare --measure`` and ``gtrace study predict`` from the outside."""

import json
from functools import partial

import pytest

from gtrace.cli import main

CODECS = "qsgdinf:bits=2,qsgdinf:bits=4,terngrad,natural,topk:ratio=0.05,ef:topk:ratio=0.1"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "run.jsonl"
    options = ["--steps", "3", "--measure", "2", "--workers", "2", "-o", str(path), "--json"]
    with pytest.raises(SystemExit) as exit_:
        main(["study", "compare", CODECS, "--task", "digits-mlp", *options])
    assert exit_.value.code == 0
    return path


@pytest.fixture
def compare(call):
    return partial(call, "compare")


def test_from_a_study_to_a_table_and_a_figure(log, compare, tmp_path):
    figure = tmp_path / "predicts.svg"
    code, out, _ = compare(log, "-o", figure)
    assert code == 0
    assert "rank correlation" in " ".join(out.split())
    for measure in ("relative variance", "noise ratio", "bias", "update error", "step error", "1 - cosine"):
        assert measure in out
    assert out.rstrip().endswith(str(figure))
    assert figure.read_bytes().startswith(b"<?xml")
    code, _, err = compare(log, "-o", figure)
    assert code == 4
    assert "--force" in err


def test_json_has_the_same_numbers(log, compare):
    code, out, _ = compare(log, "--json", "--exclude", "ef:*", "--first", "50%")
    assert code == 0
    found = json.loads(out)
    assert found["first"] == 0.5
    (study,) = found["studies"]
    assert study["codecs"] == CODECS.split(",")[:-1]
    assert set(study["measures"]) >= {"relative_variance", "update_error", "step_error", "bias", "w1", "cosine"}
    assert len(study["measures"]["bias"]["values"]) == len(study["codecs"])


@pytest.mark.parametrize("share", ["0%", "200%", "-1"])
def test_a_share_that_is_none(share, log, compare):
    code, _, err = compare(log, f"--first={share}")
    assert code == 2
    assert "is not a share of the steps; write e.g. 10%." in err


def test_what_is_no_run_log(compare, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("nothing\n")
    code, _, err = compare(path)
    assert code == 3
    assert "run log" in err or "JSON" in err
