"""The options that say between which machines gradients travel, and what reports and training make of them."""

import json

import pytest

from ..helpers_report import rows_of, write_sweep

MACHINES = ["--ranks", "8", "--network", "1Mbit/s", "--latency", "20us", "--step-time", "10ms"]
SMALL = ["--codec", "qsgdinf:bits=3", "--task", "digits-mlp", "--steps", "2", "--batch-size", "2", "--workers", "2"]
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
    code, out, err = call("report", sweep, "-o", "a.md", *MACHINES)
    assert (code, err) == (0, "")
    assert "\nSavings between 8 ranks: net.sweep.db\n" in out
    assert "Between 8 ranks with 1 Mbit/s and 20.0 us a message, a step of 10.0 ms waits " in out
    assert "qsgd:bits=4,bucket_size=8192" in out[out.index("What codecs save") :]
    assert "Savings" not in call("report", sweep, "-o", "b.md")[1]


def test_json_and_the_figure_alone(call, sweep, tmp_path):
    options = ["--backward-time", "4ms", "--bucket-mb", "4", "--codec-rate", "2Gelem/s"]
    code, out, _ = call("report", sweep, "--json", *MACHINES, *options)
    assert code == 0
    cluster = json.loads(out)["savings"][0]["cluster"]
    assert cluster["network"]["bandwidth"] == 1e6
    assert {name: cluster[name] for name in cluster if name != "network"} == {
        "ranks": 8,
        "step_time": 0.01,
        "backward_time": 0.004,
        "bucket_mb": 4.0,
        "codec_rate": 2e9,
    }
    assert call("report", sweep, "--figure", "savings", *MACHINES)[0] == 0
    assert (tmp_path / "savings.svg").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0"], "--ranks: 0 is not a valid number of workers"),
        (["--bucket-mb", "8"], "--bucket-mb: what codecs save needs --ranks 8 and --network 25Gbit/s and --step-time"),
        ([*MACHINES, "--ranks", "1"], "ranks: 1 exchange nothing"),
        (["--figure", "savings"], "figure 'savings': needs --ranks, --network and --step-time"),
        ([*MACHINES, "--network", "25Gbps"], "network: '25Gbps' is no rate"),
        ([*MACHINES, "--step-time", "180"], "step-time: '180' is no time"),
        ([*MACHINES, "--backward-time", "1s"], "backward-time: 1 s of a step of 0.01 s"),
        ([*MACHINES, "--codec-rate", "fast"], "codec-rate: 'fast' is no rate; write 4Gelem/s"),
    ],
)
def test_what_makes_no_machines_is_said(call, sweep, options, said):
    code, _, err = call("report", sweep, *options)
    assert code == 2
    assert said in err


def test_a_task_says_what_its_workers_would_save(call):
    machines = ["--network", "10Mbit/s", "--step-time", "10ms"]
    code, out, _ = call("train", *SMALL, *machines)
    assert code == 0
    assert "Savings between 2 ranks: digits-mlp-qsgdinf-bits3.jsonl" in out
    assert out.endswith("next: gtrace report digits-mlp-qsgdinf-bits3.jsonl\n")
    code, out, _ = call("train", *SMALL, *machines, "--ranks", "4", "--json", "--force")
    assert json.loads(out)["savings"]["cluster"]["ranks"] == 4


def test_a_program_says_what_ranks_would_save(call, tmp_path):
    (tmp_path / "program.py").write_text(SCRIPT)
    code, out, err = call("train", "--codec", "qsgdinf:bits=3", "--json", *MACHINES, "program.py")
    assert code == 0
    assert json.loads(out)["savings"]["elements"] == 410
    assert "Savings between 8 ranks: program-qsgdinf-bits3.jsonl" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*SMALL, "--step-time", "3ms"], "--step-time: what codecs save needs --network 25Gbit/s, too"),
        ([*SMALL, "--latency", "3ms"], "give its speed, as in --network 1Gbit/s"),
        ([*SMALL, "--kind", "neural", *MACHINES], "neural gradients do not travel"),
        (["--codec", "none", "--network", "1Gbit/s", "program.py"], "--network: what codecs save needs --ranks 8 and"),
    ],
)
def test_training_says_what_is_missing(call, options, said):
    code, _, err = call("train", *options)
    assert code == 2
    assert said in err
