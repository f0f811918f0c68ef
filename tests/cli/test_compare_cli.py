"""``gtrace study compare --measure`` and ``gtrace study predict``, also by its earlier name."""

import json

CODECS = "qsgdinf:bits=2,qsgdinf:bits=4,terngrad,natural,topk:ratio=0.05,ef:topk:ratio=0.1"


def test_from_a_study_to_a_table_and_a_figure(succeed, refuse, folder):
    succeed(f"study compare {CODECS} --task digits-mlp --steps 3 --measure 2 --workers 2 --json -o run.jsonl")
    out, _ = succeed("compare -o predicts.svg run.jsonl")
    assert "rank correlation" in " ".join(out.split())
    for measure in ("relative variance", "noise ratio", "bias", "update error", "step error", "1 - cosine"):
        assert measure in out
    assert out.endswith("\npredicts.svg\n")
    assert (folder / "predicts.svg").read_bytes().startswith(b"<?xml")
    assert "--force" in refuse("compare -o predicts.svg run.jsonl", code=4)
    (study,) = json.loads(succeed("study predict --json --exclude ef:* --first 50% run.jsonl")[0])["studies"]
    assert study["codecs"] == CODECS.split(",")[:-1]
