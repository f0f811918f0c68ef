"""``--policy``: what is printed, what is logged, and what is refused."""

import json

from gtrace.runlog import read_runlog


def test_the_command_says_what_was_chosen(tmp_path, succeed):
    words = "study compare minmax:bits=4 --task digits-mlp --steps 12 --batch-size 2 --workers 2 --down same"
    words += " --min-size 500"
    words += " --network 1MB/s,topology=ps,compute=0.5s --policy fixed --policy schedule:0=2,6=3"
    out, _ = succeed(*words.split(), "--json")
    told = json.loads(out)
    assert [run["run"] for run in told["runs"]] == ["none", "minmax:bits=4", "minmax@schedule:0=2,6=3"]
    assert [run["codec_bits"] for run in told["runs"]] == [[], [], [[0, 2], [6, 3]]]
    assert told["runs"][1]["down_bits"] > 0 == told["runs"][0]["down_bits"]
    assert told["output"] == "digits-mlp-compare.jsonl"
    reached = [run["seconds_to_common_loss"] for run in told["runs"] if not run["diverged"]]
    assert any(seconds is not None and 0 < seconds <= told["runs"][0]["sim_seconds"] for seconds in reached)
    head = read_runlog(tmp_path / "digits-mlp-compare.jsonl")[0]
    assert head["command"].endswith(
        "--network 8Mbit/s,latency=0s,topology=ps,compute=0.5s --min-size 500 --down same "
        "--policy fixed --policy schedule:0=2,6=3"
    )
    out, _ = succeed(*head["command"].split()[1:], "--force")
    assert "bits of minmax@schedule:0=2,6=3: 2, 3 from 6" in out
    assert "to loss: simulated time to a training loss of" in out
    assert "sent:" not in out


def test_scripts_are_refused_in_one_line(tmp_path, refuse):
    (tmp_path / "s.py").write_text("")
    err = refuse("train", "--codec", "minmax", "--policy", "mqgrad", str(tmp_path / "s.py"))
    assert "gtrace.training.MQGrad" in err
