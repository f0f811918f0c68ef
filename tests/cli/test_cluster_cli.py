"""The options that say between which machines gradients travel, and what reports and training make of them."""

import json

import pytest

from ..helpers_report import rows_of, write_sweep

TEXT = "8x1Mbit/s,10ms,latency=20us"
SMALL = "--task digits-mlp --steps 2 --batch-size 2 --workers 2"


@pytest.fixture(autouse=True)
def sweep(folder):
    provenance = {"kind": "weight", "tensors": {"w": 8, "v": 32}}
    return write_sweep(folder / "net.sweep.db", rows_of(bits=[2, 4], layers=("w", "v"), steps=(0,)), (), provenance)


def test_a_report_has_a_section_on_savings_when_asked(succeed):
    out, err = succeed(f"report net.sweep.db --full -o a.md --cluster {TEXT}")
    assert err == ""
    assert "\nSavings between 8 ranks: net.sweep.db\n" in out
    assert "On 8 ranks at 1 Mbit/s and 20.0 us a message, communication adds " in out
    assert "qsgd:bits=4,bucket_size=8192" in out[out.index("What codecs save") :]
    assert "Savings" not in succeed("report net.sweep.db --full -o b.md")[0]
    out, err = succeed("report net.sweep.db --full --cluster 8x1Mbit/s -o c.md")
    assert err == "gtrace: --cluster 8x1Mbit/s has no compute time, so no step times; add it: 8x1Mbit/s,180ms\n"
    assert "Savings between" not in out
    assert "8 workers" in out


def test_json_and_the_figure_alone(succeed, folder):
    (folder / "gtrace.toml").write_text(f'cluster = "{TEXT},backward=4ms,bucket=4MiB,codec=2Gvalues/s"\n')
    cluster = json.loads(succeed("report net.sweep.db --json")[0])["savings"][0]["cluster"]
    assert cluster.pop("network")["bandwidth"] == 1e6
    times = {"step_time": 0.01, "backward_time": 0.004}
    assert cluster == {"ranks": 8, **times, "bucket_mb": 4.0, "codec_rate": 2e9}
    succeed(f"report net.sweep.db --figure savings --cluster {TEXT}")
    assert (folder / "savings.svg").exists()


@pytest.mark.parametrize(
    ("file", "text"),
    [("gtrace.toml", "cluster = '8x25'"), ("pyproject.toml", "[tool.gtrace]\ncluster = '8x25'"), ("gtrace.toml", "x")],
)
def test_a_cluster_written_down_is_read_and_the_option_wins(succeed, refuse, folder, file, text):
    (folder / file).write_text(text)
    said = "cannot be read as TOML" if text == "x" else "cluster: '25' needs a unit, e.g. 25Gbit/s."
    assert refuse("report net.sweep.db", code=3 if text == "x" else 2).startswith(f"gtrace: {file}: {said}")
    succeed(f"report net.sweep.db --cluster {TEXT}")


@pytest.mark.usefixtures("script")
def test_training_says_what_ranks_would_save(succeed, folder):
    # Written down without a compute time, it does not disturb what has no use for it.
    (folder / "pyproject.toml").write_text("[tool.gtrace]\ncluster = '8x25Gbit/s'\n")
    assert "Savings" not in succeed(f"train --codec qsgdinf:bits=3 {SMALL}")[0]
    out, _ = succeed(f"train --codec qsgdinf:bits=3 {SMALL} --force --cluster {TEXT}")
    assert "Savings between 8 ranks: digits-mlp-qsgdinf-bits3.jsonl" in out
    assert out.endswith("next: gtrace report digits-mlp-qsgdinf-bits3.jsonl\n")
    out, err = succeed(f"train --codec qsgdinf:bits=3 --json --cluster {TEXT} train.py")
    assert json.loads(out[out.index("{") :])["savings"]["elements"] == 2949
    assert "Savings between 8 ranks: train-qsgdinf-bits3.jsonl" in err
