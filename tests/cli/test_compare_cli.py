"""``gtrace study compare --measure`` and ``gtrace study predict``, also by its earlier name."""

import json

import pytest

from gtrace.cli import main

CODECS = "qsgdinf:bits=2,qsgdinf:bits=4,terngrad,natural,topk:ratio=0.05,ef:topk:ratio=0.1"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "run.jsonl"
    line = f"study compare {CODECS} --task digits-mlp --steps 3 --measure 2 --workers 2 --json -o"
    with pytest.raises(SystemExit) as end:
        main([*line.split(), str(path)])
    assert end.value.code == 0
    return path


def test_from_a_study_to_a_table_and_a_figure(log, succeed, refuse, folder):
    out, _ = succeed("compare -o predicts.svg", log)
    assert "rank correlation" in " ".join(out.split())
    for measure in ("relative variance", "noise ratio", "bias", "update error", "step error", "1 - cosine"):
        assert measure in out
    assert out.endswith("\npredicts.svg\n")
    assert (folder / "predicts.svg").read_bytes().startswith(b"<?xml")
    assert "--force" in refuse("compare -o predicts.svg", log, code=4)


def test_json_has_the_same_numbers(log, succeed):
    out, _ = succeed("study predict --json --exclude ef:* --first 50%", log)
    found = json.loads(out)
    assert found["first"] == 0.5
    (study,) = found["studies"]
    assert study["codecs"] == CODECS.split(",")[:-1]
    assert set(study["measures"]) >= {"relative_variance", "update_error", "step_error", "bias", "w1", "cosine"}
    assert len(study["measures"]["bias"]["values"]) == len(study["codecs"])
