"""The options that say between which machines gradients travel, and what reports and training make of them."""

import json

import pytest

from ..helpers_report import rows_of, write_sweep

TEXT = "8x1Mbit/s,10ms,latency=20us"
MACHINES = ["--cluster", TEXT]
SMALL = ["--task", "digits-mlp", "--steps", "2", "--batch-size", "2", "--workers", "2"]
SCRIPT = """
import torch
model = torch.nn.Linear(40, 10)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(2, 40)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def sweep(tmp_path):
    provenance = {"kind": "weight", "tensors": {"w": 8, "v": 32}}
    return write_sweep(tmp_path / "net.sweep.db", rows_of(bits=[2, 4], layers=("w", "v"), steps=(0,)), (), provenance)


def test_a_report_has_a_section_on_savings_when_asked(call, sweep):
    code, out, err = call("report", sweep, "--full", "-o", "a.md", *MACHINES)
    assert (code, err) == (0, "")
    assert "\nSavings between 8 ranks: net.sweep.db\n" in out
    assert "On 8 ranks at 1 Mbit/s and 20.0 us a message, communication adds " in out
    assert "qsgd:bits=4,bucket_size=8192" in out[out.index("What codecs save") :]
    assert "Savings" not in call("report", sweep, "--full", "-o", "b.md")[1]


def test_json_and_the_figure_alone(call, succeed, sweep, folder):
    (folder / "gtrace.toml").write_text(f'cluster = "{TEXT},backward=4ms,bucket=4MiB,codec=2Gvalues/s"\n')
    out, _ = succeed("report", sweep, "--json")
    cluster = json.loads(out)["savings"][0]["cluster"]
    assert cluster.pop("network")["bandwidth"] == 1e6
    times = {"step_time": 0.01, "backward_time": 0.004}
    assert cluster == {"ranks": 8, **times, "bucket_mb": 4.0, "codec_rate": 2e9}
    assert call("report", sweep, "--figure", "savings", *MACHINES)[0] == 0
    assert (folder / "savings.svg").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0"], "0 is not in the range x>=1"),
        ([*MACHINES, "--ranks", "4"], f"--ranks 4: --cluster {TEXT} already says how many ranks; leave one out."),
        (["--figure", "savings"], "figure 'savings': needs --cluster with a compute time, e.g. 8x25Gbit/s,180ms."),
        (["--cluster", "1x25Gbit/s"], "--cluster: ranks: 1 is too few; gradients travel between at least 2."),
        (["--cluster", "8x25"], "--cluster: '25' needs a unit, e.g. 25Gbit/s."),
        (["--cluster", "8x25Gbit/s,180"], "--cluster: '180' needs a unit, e.g. 180ms."),
        (["--cluster", "8x25Gbit/s,1ms,2ms"], "--cluster: '2ms' needs a key: backward=, latency=, bucket=, codec=."),
        (["--cluster", "8x25Gbit/s,buckt=1MiB"], "--cluster: 'buckt=' is unknown; did you mean bucket?"),
        (["--cluster", "8x25Gbit/s,bucket=1MiB,bucket=2MiB"], "--cluster: 'bucket=' is given twice."),
        (["--cluster", "8x25Gbit/s,bucket=big"], "--cluster: bucket: 'big' is not a valid size; write e.g. 4GB"),
        (["--cluster", "8x25Gbit/s,codec=2G"], "--cluster: codec: '2G' has an unknown unit; write e.g. 2Gvalues/s."),
        (["--cluster", "8x25Gbit/s,backward=1ms"], "--cluster: backward: needs the compute time of the step"),
        (["--cluster", "8x25Gbit/s,1ms,backward=2ms"], "--cluster: backward: 0.002 s is more than the step's"),
    ],
)
def test_what_makes_no_machines_is_said(refuse, sweep, options, said):
    assert said in refuse("report", sweep, *options)


def test_ranks_without_a_compute_time_rank_codecs(call, sweep):
    code, out, err = call("report", sweep, "--full", "--cluster", "8x1Mbit/s", "-o", "a.md")
    assert (code, err) == (
        0,
        "gtrace: --cluster 8x1Mbit/s has no compute time, so no step times; add it: 8x1Mbit/s,180ms\n",
    )
    assert "Savings between" not in out
    assert "8 workers" in out


@pytest.mark.parametrize(
    ("file", "text"),
    [("gtrace.toml", "cluster = '8x25'"), ("pyproject.toml", "[tool.gtrace]\ncluster = '8x25'"), ("gtrace.toml", "x")],
)
def test_a_cluster_written_down_is_read_and_the_option_wins(call, sweep, folder, file, text):
    (folder / file).write_text(text)
    code, _, err = call("report", sweep)
    assert (code, err.count("\n")) == (3 if text == "x" else 2, 1)
    said = "cannot be read as TOML" if text == "x" else "cluster: '25' needs a unit, e.g. 25Gbit/s."
    assert err.startswith(f"gtrace: {file}: {said}")
    assert call("report", sweep, *MACHINES).returncode == 0


def test_a_cluster_written_down_does_not_disturb_what_has_no_use_for_it(succeed, folder):
    (folder / "pyproject.toml").write_text("[tool.gtrace]\ncluster = '8x25Gbit/s'\n")
    out, _ = succeed("train", "--codec", "qsgdinf:bits=3", *SMALL)
    assert "Savings" not in out


def test_training_says_what_ranks_would_save(succeed, tmp_path):
    out, _ = succeed("train", "--codec", "qsgdinf:bits=3", *SMALL, *MACHINES)
    assert "Savings between 8 ranks: digits-mlp-qsgdinf-bits3.jsonl" in out
    assert out.endswith("next: gtrace report digits-mlp-qsgdinf-bits3.jsonl\n")
    (tmp_path / "program.py").write_text(SCRIPT)
    out, err = succeed("train", "--codec", "qsgdinf:bits=3", "--json", *MACHINES, "program.py")
    assert json.loads(out)["savings"]["elements"] == 410
    assert "Savings between 8 ranks: program-qsgdinf-bits3.jsonl" in err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["study", "compare", "int8", "--kind", "neural", *MACHINES], "--cluster: neural gradients do not travel"),
        (["train", "--codec", "none", "--network", "1Gbit/s", "p.py"], "--network is for built-in tasks; p.py has its"),
    ],
)
def test_training_says_what_is_missing(refuse, command, said):
    assert said in refuse(*command)
