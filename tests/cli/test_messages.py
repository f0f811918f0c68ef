"""What a newcomer's mistakes are answered with: command line, exit code, the exact line."""

import shlex

import numpy as np
import pytest
from helpers_trace import write_arrays

from ..helpers_report import rows_of, write_sweep

TRACE = "make one with gtrace capture SCRIPT, or gtrace trace import FILES"
CODEC = "no codec 'qsgdd'; did you mean qsgd or nuqsgd or qsgdinf?"
STUDY = "is an option of gtrace study compare, which trains built-in tasks."
NUMBER = "is not a number; write e.g. 2-8, 2,4,8 or 0.5-0.95:0.05."
SHOWS = "--help shows the commands)"
SWEEP = "net.sweep.db is sweep results, not a trace; read them with gtrace report net.sweep.db."
LIMIT = "plan: give one limit: --max-bits 3, --ratio 12, --max-error 0.1 or --step-time 50ms"
HAS = "it has 3 steps from 0 to 2"

#: command line -> exit code, what follows ``gtrace: ``
MESSAGES = {
    # words that are not commands
    "swep": (2, f"'swep' is not a command; did you mean sweep? (gtrace {SHOWS}"),
    "xyzzy": (2, f"'xyzzy' is not a command (gtrace {SHOWS}"),
    "comprae": (2, f"'comprae' is not a command; did you mean study compare? (gtrace {SHOWS}"),
    "train.py": (2, f"'train.py' is not a command; did you mean gtrace capture train.py? (gtrace {SHOWS}"),
    "net.zarr": (2, f"'net.zarr' is not a command; did you mean gtrace info net.zarr? (gtrace {SHOWS}"),
    "net.sweep.db": (2, f"'net.sweep.db' is not a command; did you mean gtrace report net.sweep.db? (gtrace {SHOWS}"),
    "trace chek": (2, f"'chek' is not a command of gtrace trace; did you mean check? (gtrace trace {SHOWS}"),
    "study predcit": (2, f"'predcit' is not a command of gtrace study; did you mean predict? (gtrace study {SHOWS}"),
    # files of another kind
    "info net.sweep.db": (3, SWEEP),
    "sweep net.sweep.db": (3, SWEEP),
    "check net.sweep.db": (3, SWEEP),
    "info train.py": (3, "train.py is a script, not a trace; record its gradients with gtrace capture train.py."),
    "sweep run.jsonl": (3, "run.jsonl is a run log, not a trace; read it with gtrace report run.jsonl."),
    "plan p.toml --max-bits 3": (
        3,
        "p.toml is a plan or a format table, not a trace; read a plan with gtrace plan show p.toml.",
    ),
    "trace export notes.txt": (3, "notes.txt is another file, not a trace; a trace is a folder .zarr or a file .h5."),
    "info folder": (3, f"folder: not a gtrace trace; {TRACE}"),
    "plan show net.zarr": (
        3,
        "net.zarr: is a folder, not a plan; make a plan with gtrace plan TRACE --max-bits 3 -o plan.toml",
    ),
    "sweep empty.zarr": (3, "empty.zarr: the trace is empty: no gradients were captured into it."),
    # steps and ranges
    "sweep net.zarr --methods qsgd --steps 5-1": (2, "--steps: '5-1' is reversed; write 1-5."),
    "sweep net.zarr --methods qsgd --steps x": (
        2,
        "--steps: 'x' is not a valid step; write e.g. 0,10,100-200 or 1000+50.",
    ),
    "sweep net.zarr --methods qsgd --steps 3+0": (
        2,
        "--steps: '3+0' holds no step; a burst and a stride are at least 1.",
    ),
    "sweep net.zarr --methods qsgd --steps 7+2": (2, f"--steps: none of these steps is in the trace; {HAS}"),
    "export net.zarr --steps 7,8": (2, f"--steps: none of these steps is in the trace; {HAS}"),
    "formats net.zarr --steps 0-9999999": (2, "--steps: '0-9999999' has more than 100000 steps."),
    "capture --steps 5-1 train.py": (2, "--steps: '5-1' is reversed; write 1-5."),
    "capture --steps 0 --every 2 train.py": (2, "--every and --steps exclude each other; --steps 0-1000:10 says both."),
    "capture --every 0 train.py": (2, "--every: 0 must be at least 1."),
    "sweep net.zarr --methods qsgd --bits 8-2": (2, "--bits: '8-2' is reversed; write 2-8."),
    "sweep net.zarr --methods qsgd --bits two": (2, f"--bits: 'two' {NUMBER}"),
    "sweep net.zarr --methods qsgd --bits 2.5": (2, "--bits: '2.5' must hold whole numbers, e.g. 2-8 or 2,4,8."),
    "plan net.zarr --max-bits 3 --bits 2-8:0": (2, "--bits: '2-8:0' needs a positive step, e.g. 0.5-0.95:0.05."),
    # quantities
    "capture --budget lots train.py": (2, "--budget: 'lots' is not a valid size; write e.g. 4GB, 500MB or 1GiB."),
    "train --codec qsgd --network 25": (2, "--network: '25' needs a unit, e.g. 25Gbit/s."),
    "train --codec qsgd --network 25Gbps": (2, "--network: '25Gbps' has an unknown unit; write e.g. 25Gbit/s."),
    "train --codec qsgd --network 1Gbit/s,50us": (2, "--network: '50us' needs a key: latency=, topology=, compute=."),
    "train --codec qsgd --cluster 8x25Gbit/s": (
        2,
        "--cluster: '8x25Gbit/s' needs the compute time of a step here, e.g. 8x25Gbit/s,180ms.",
    ),
    "report net.sweep.db --cluster 25Gbit/s": (2, "--cluster: '25Gbit/s' needs ranks and link speed, e.g. 8x25Gbit/s."),
    "plan net.zarr --step-time 50 --cluster 8x25Gbit/s": (2, "--step-time: '50' needs a unit, e.g. 50ms."),
    "plan net.zarr --step-time 50ms": (2, "--step-time 50ms: needs the machines, e.g. --cluster 8x25Gbit/s,25ms."),
    "plan net.zarr --max-bits 3GB": (2, "--max-bits: '3GB' has an unknown unit; write e.g. 3bits."),
    "plan net.zarr --max-bits three": (2, "--max-bits: 'three' is not a valid number of bits; write e.g. 3bits."),
    "plan net.zarr --max-error 0": (2, "--max-error 0: must be more than 0."),
    "plan net.zarr": (2, f"{LIMIT}."),
    "plan net.zarr --max-bits 3 --ratio 9": (2, f"{LIMIT}, not several."),
    # codecs
    "sweep net.zarr --methods qsgdd": (2, CODEC),
    "train --codec qsgdd": (2, CODEC),
    "study compare qsgdd": (2, CODEC),
    "codecs qsgdd": (2, CODEC),
    "sweep net.zarr --methods ef:ef:topk": (2, "codec 'ef:ef:topk': ef: is there twice; write ef:topk."),
    "train --codec ef:topk --error-feedback": (2, "codec 'ef:ef:topk': ef: is there twice; write ef:topk."),
    "sweep net.zarr --methods topk --bits 3": (
        2,
        "--bits: topk has no bits; leave it out (gtrace codecs topk shows what it has).",
    ),
    # training
    "train": (2, "name a codec, e.g. --codec qsgdinf --bits 3 (gtrace codecs lists them), or a --plan."),
    "train train.py": (2, "name a codec, e.g. --codec qsgdinf --bits 3 (gtrace codecs lists them), or a --plan."),
    "train --codec qsgd --compare alq": (2, "give one of --codec and --compare, not both."),
    "train --codec qsgd -m": (2, "-m: name the module to run, e.g. gtrace train --codec alq -m package.train."),
    "train --codec qsgd --kind neural": (2, f"--kind: {STUDY}"),
    "train --codec qsgd --shadow 5": (2, f"--shadow: {STUDY}"),
    "study compare": (2, "name at least one codec, e.g. gtrace study compare qsgdinf:bits=3,alq:bits=3."),
    "study compare qsgd --weights best": (2, "levels of weights: 'best' needs a placement and a count, e.g. optimal5."),
    "study predict run.jsonl --first ten": (2, "--first: 'ten' is not a share of the steps; write e.g. 10%."),
    # nothing captured
    "capture train.py": (2, "nothing was captured: it took no step of a torch optimizer"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with one file of each kind."""
    folder = tmp_path_factory.mktemp("messages")
    write_sweep(folder / "net.sweep.db", rows_of(bits=[2], layers=("w",), steps=(0,)), (), {"tensors": {"w": 8}})
    (folder / "folder").mkdir()
    texts = {"train.py": "import torch\n", "run.jsonl": "{}\n", "p.toml": "a = 1\n", "notes.txt": "hi"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    write_arrays(folder / "empty.zarr", {})
    write_arrays(folder / "net.zarr", {"w": dict.fromkeys(range(3), np.ones(8))})
    return folder


@pytest.mark.parametrize("line", MESSAGES)
def test_a_mistake_is_answered_in_one_line(call, made, monkeypatch, line):
    monkeypatch.chdir(made)
    before = sorted(made.rglob("*"))
    code, out, err = call(*shlex.split(line))
    assert (code, err, out) == (MESSAGES[line][0], f"gtrace: {MESSAGES[line][1]}\n", "")
    assert sorted(made.rglob("*")) == before


_LONG = "9" * 5000
#: what no person types, as a list of words
HOSTILE = [
    ["sweep", "net.zarr", "--methods", "rotate:" * 1000 + "qsgd:bits=3"],
    ["sweep", "net.zarr", "--methods", f"qsgd:bits={_LONG}"],
    ["sweep", "net.zarr", "--methods", "qsgd\ud800"],
    ["sweep", "net.zarr", "--methods", "qsgd\x1b[2J\x9b2J\u202e"],
    ["sweep", "net.zarr", "--methods", "qsgd", "--bits", _LONG],
    ["plan", "net.zarr", "--max-bits", f"1e{_LONG}"],
    ["plan", "net.zarr", "--max-bits", "3", "--weight", f"w=1e{_LONG}"],
    ["plan", "net.zarr", "--step-time", "1ms", "--cluster", f"8x1e{_LONG}Gbit/s,1ms"],
    ["info", "net.zarr\udcff\x85"],
]


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_what_no_person_types_is_answered_in_one_short_line(call, made, monkeypatch, words):
    monkeypatch.chdir(made)
    code, out, err = call(*words)
    assert (code in (2, 3), out, err.count("\n")) == (True, "", 1), err
    assert err[:-1].isprintable()
    assert len(err) < 5000
