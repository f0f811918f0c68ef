"""What mistakes are answered with: command line, exit code, the one line. Nothing is left behind."""

import re
import shlex

import numpy as np
import pytest
from helpers_trace import write_arrays

from ..helpers_report import rows_of, write_sweep

CODEC = "no codec 'qsgdd'; did you mean qsgd or nuqsgd or qsgdinf?"
NAME = "name a codec, e.g. --codec qsgdinf --bits 3 (gtrace codecs lists them), or a --plan."
NONE_OF = "--steps: none of these steps is in the trace; it has 3 steps from 0 to 2"
SWEEP = "a.sweep.db is sweep results, not a trace; read them with gtrace report a.sweep.db."
TRACKER = "--to tensorbord: unknown tracker 'tensorbord'; did you mean tensorboard?"

#: command line -> what follows ``gtrace: ``, where ``...`` is any text; the exit code is 2
WRONG = {
    # words that are not commands, and names that moved
    "swep": "'swep' is not a command; did you mean sweep? (gtrace --help shows the commands)",
    "xyzzy": "'xyzzy' is not a command (gtrace --help shows the commands)",
    "comprae": "'comprae' is not a command; did you mean study compare? (gtrace --help shows the commands)",
    "train.py": "'train.py' is not a command; did you mean gtrace capture train.py? (gtrace --help shows the commands)",
    "a.zarr": "'a.zarr' is not a command; did you mean gtrace info a.zarr? (gtrace --help shows the commands)",
    "a.sweep.db": "'a.sweep.db' is not a command; did you mean gtrace report a.sweep.db? ...",
    "trace chek": "'chek' is not a command of gtrace trace; did you mean check? (gtrace trace --help ...",
    "study predcit": "'predcit' is not a command of gtrace study; did you mean predict? ...",
    "train --task svm": "linear models have a command of their own; use gtrace linear --task svm",
    "train svm": "linear models have a command of their own; use gtrace linear --task svm",
    # capture
    "capture --steps 0 --every 2 train.py": "--every and --steps exclude each other; --steps 0-1000:10 says both.",
    "capture --every 0 train.py": "--every: 0 must be at least 1.",
    "capture train.py": "nothing was captured: it took no step of a torch optimizer",
    "capture --to tensorbord train.py": TRACKER,
    "capture nowhere.py": "nowhere.py: no such script",
    "capture -o x.npz train.py": "x.npz: a trace ends in .zarr or .h5; choose another name",
    "capture -o nowhere/x.zarr train.py": "nowhere/x.zarr: the folder nowhere does not exist; ...",
    "capture --forse train.py": "No such option '--forse'. ... '--force', ...",
    "capture": "Missing argument 'SCRIPT'. (gtrace capture --help shows the options)",
    "capture -m no_package.train": "-m no_package.train: Error while finding module specification ...",
    "capture -c -m x": "-m and -c exclude each other",
    "capture --kind all train.py": "--kind: unknown kind 'all'; known: both, momentum, neural, outer, update, weight",
    "capture --sketch l2:8192,foo train.py": "--sketch: 'l2:8192,foo' is not a list of norms with ...",
    "capture --sketch-mantissa 5 train.py": "--sketch-mantissa is for sketches; add --sketch l2:8192,linf:8192,none",
    # traces
    "export a.zarr --steps 7,8": NONE_OF,
    "formats a.zarr --steps 0-9999999": "--steps: '0-9999999' has more than 100000 steps.",
    "info a.zarr --steps 0": "--steps: says at which steps laws are fitted; pass --fit with it",
    "info a.zarr --fit --steps 7": NONE_OF,
    "info --follow s3://a/b.zarr": "s3://a/b.zarr: --follow needs a trace on this machine",
    "info --follow a.zarr --json": "--follow: shows one view and has no other options; leave them out",
    "formats a.zarr --bits 2": "--bits: 2 to 2; formats have 3 to 8 bits",
    "formats a.zarr --bits 9": "--bits: 9 to 9; formats have 3 to 8 bits",
    "formats a.zarr --bits x": "--bits: 'x' is not a number; write e.g. 2-8, 2,4,8 or 0.5-0.95:0.05.",
    # sweeps
    "sweep a.zarr --methods qsgd --steps 5-1": "--steps: '5-1' is reversed; write 1-5.",
    "sweep a.zarr --methods qsgd --steps x": "--steps: 'x' is not a valid step; write e.g. 0,10,100-200 or 1000+50.",
    "sweep a.zarr --methods qsgd --steps 3+0": "--steps: '3+0' holds no step; a burst and a stride are at least 1.",
    "sweep a.zarr --methods qsgd --steps 7+2": NONE_OF,
    "sweep a.zarr --methods qsgd --bits 8-2": "--bits: '8-2' is reversed; write 2-8.",
    "sweep a.zarr --methods qsgd --bits two": "--bits: 'two' is not a number; write e.g. 2-8, 2,4,8 or 0.5-0.95:0.05.",
    "sweep a.zarr --methods qsgd --bits 2.5": "--bits: '2.5' must hold whole numbers, e.g. 2-8 or 2,4,8.",
    "sweep a.zarr --methods qsgdd": CODEC,
    "sweep a.zarr --methods ef:ef:topk": "codec 'ef:ef:topk': ef: is there twice; write ef:topk.",
    "sweep a.zarr --methods topk --bits 3": "--bits: topk has no bits; leave it out (gtrace codecs topk ...",
    "sweep --mehtods all x": "No such option '--mehtods'. Did you mean '--methods'? (gtrace sweep --help ...",
    "sweep a.zarr --methods qsgd --tensors nope.*": "--tensors: no tensor matches 'nope.*'; known: w",
    "sweep a.zarr --methods qsgd --refit sometimes": "... choose pooled, previous, each, once or steps such as 0,100",
    "sweep a.zarr --methods qsgd --bucket-size 0": "codec qsgd: bucket_size=0 is out of range; it must be at least 1",
    "sweep a.zarr --methods qsgd -o missing/out.db": "missing/out.db: the folder missing does not exist; ...",
    "sweep a.zarr --all --bits 3": "--all measures everything: leave out --bits",
    # reports
    "report a.sweep.db --cluster 25Gbit/s": "--cluster: '25Gbit/s' needs ranks and link speed, e.g. 8x25Gbit/s.",
    "report a.sweep.db --ranks 0": "Invalid value for '--ranks': 0 is not in the range x>=1. ...",
    "report a.sweep.db --cluster 8x1Mbit/s,10ms --ranks 4": "... already says how many ranks; leave one out.",
    "report a.sweep.db --figure savings": "... needs --cluster with a compute time, e.g. 8x25Gbit/s,180ms.",
    "report a.sweep.db --cluster 1x25Gbit/s": "--cluster: ranks: 1 is too few; gradients travel between at least 2.",
    "report a.sweep.db --cluster 8x25": "--cluster: '25' needs a unit, e.g. 25Gbit/s.",
    "report a.sweep.db --cluster 8x25Gbit/s,1ms,2ms": "--cluster: '2ms' needs a key: ... latency=, bucket=, codec=.",
    "report a.sweep.db --cluster 8x25Gbit/s,buckt=1MiB": "--cluster: 'buckt=' is unknown; did you mean bucket?",
    "report a.sweep.db --cluster 8x25Gbit/s,bucket=1MiB,bucket=2MiB": "--cluster: 'bucket=' is given twice.",
    "report a.sweep.db --cluster 8x25Gbit/s,bucket=big": "--cluster: bucket: 'big' is not a valid size; write ...",
    "report a.sweep.db --cluster 8x25Gbit/s,codec=2G": "... codec: '2G' has an unknown unit; write e.g. 2Gvalues/s.",
    "report a.sweep.db --cluster 8x25Gbit/s,backward=1ms": "... backward: needs the compute time of the step ...",
    "report a.sweep.db --cluster 8x25Gbit/s,1ms,backward=2ms": "... backward: 0.002 s is more than the step's ...",
    "report a.sweep.db --figure rate-distortion -o x.jpg": "x.jpg: a figure is written as .pdf, .png, .svg",
    "report a.sweep.db --figure rate-distortion --json": "... leave out --json, --pair and --group",
    "report a.sweep.db --pair qsgd:bits=2 alq": "... no comparable configuration 'qsgd:bits=2'; did you mean qsgd:...",
    "report a.sweep.db -o x.docx": "x.docx: a report is written as .html, .md, .csv, .jsonl, .parquet, .tex or ...",
    "report a.sweep.db --horizon 0": "Invalid value for '--horizon': 0 is not in the range x>=1. ...",
    "report a.sweep.db --horizon many": "Invalid value for '--horizon': 'many' is not a valid integer range. ...",
    "report a.sweep.db --batch-size 0": "Invalid value for '--batch-size': 0.0 is not in the range x>0. ...",
    # plans
    "plan a.zarr --max-bits 3 --bits 2-8:0": "--bits: '2-8:0' needs a positive step, e.g. 0.5-0.95:0.05.",
    "plan a.zarr --step-time 50 --cluster 8x25Gbit/s": "--step-time: '50' needs a unit, e.g. 50ms.",
    "plan a.zarr --step-time 50ms": "--step-time 50ms: needs the machines, e.g. --cluster 8x25Gbit/s,25ms.",
    "plan a.zarr --max-bits 3GB": "--max-bits: '3GB' has an unknown unit; write e.g. 3bits.",
    "plan a.zarr --max-bits three": "--max-bits: 'three' is not a valid number of bits; write e.g. 3bits.",
    "plan a.zarr --max-error 0": "--max-error 0: must be more than 0.",
    "plan a.zarr": "plan: give one limit: --max-bits 3, --ratio 12, --max-error 0.1 or --step-time 50ms.",
    "plan a.zarr --max-bits 3 --ratio 9": "plan: give one limit: ... or --step-time 50ms, not several.",
    "plan a.zarr --max-bits 3%": "--max-bits: '3%' has an unknown unit; write e.g. 3bits.",
    "plan a.zarr --max-bits 0": "--max-bits: '0' must be more than 0.",
    "plan a.zarr --ratio -2": "--ratio -2: must be more than 0.",
    "plan a.zarr --step-time 1us --cluster 4x1Gbit/s,latency=1ms --objective error": "... without any bits ...",
    "plan a.zarr --step-time 1ms --cluster 4x1Gbit/s,2ms": "--step-time 1ms: computing alone takes 0.002 s ...",
    "plan a.zarr --max-bits 3 --cluster 4x1Gbit/s": "--cluster: is for --step-time; give --step-time, e.g. 50ms.",
    "plan a.zarr --max-bits 0.1bits --objective error": "--max-bits 0.1: these codecs take at least 6 bits ...",
    "plan a.zarr --max-bits 3 --methods mcgq": "mcgq:bits=2: its error has no closed form; sweep ...",
    "plan a.zarr --max-bits 3 --weight nothing*=2": "--weight: no tensor matches 'nothing*'; known: w",
    "plan a.zarr --max-bits 3 --weight w=-2": "--weight w=-2: a weight is a positive number, e.g. fc*=2",
    "plan a.zarr --max-bits 3 --weight missing.toml": "--weight missing.toml: write GLOB=NUMBER, e.g. fc*=2, ...",
    "plan a.zarr --max-bits 3 --group g=nothing* --objective error": "--group: no tensor matches 'nothing*'; known: w",
    "plan a.zarr --max-bits 3 --tensors nothing*": "--tensors: no tensor matches 'nothing*'; known: w",
    "plan a.zarr --max-bits 3 -o plan.txt": "plan.txt: has no known suffix; choose a name that ends in .toml or .json",
    "plan a.zarr --max-bits 3 --objective cost --weight w=2": "--objective cost: is for predicted cost, ...",
    "plan a.zarr --max-error 0.1 --horizon 9": "--horizon: is for predicted cost, and --max-error is for error; ...",
    # training a script or a task
    "train --codec qsgd --cluster 8x25Gbit/s": "... needs the compute time of a step here, e.g. 8x25Gbit/s,180ms.",
    "train --codec qsgdd": CODEC,
    "train": NAME,
    "train --codec qsgd --compare alq": "give one of --codec and --compare, not both.",
    "train --codec qsgd -m": "-m: name the module to run, e.g. gtrace train --codec alq -m package.train.",
    "train --codec qsgd --kind neural": "--kind: is an option of gtrace study compare, which trains built-in tasks.",
    "train --codec qsgd --shadow 5": "--shadow: is an option of gtrace study compare, which trains built-in tasks.",
    "train --codec qsgd:bit=3": "codec qsgd: no parameter 'bit'; did you mean bits?",
    "train --codec qsgd --bits 99": "codec qsgd: bits=99 is out of range; it must be 2 to 15",
    "train --codec qsgd:bits=3 --bits 4": "--bits 4: the codec 'qsgd:bits=3' names its bits already; give it once",
    "train --codec ef:qsgdinf:bits=3 --bits 3": "... codec 'ef:qsgdinf:bits=3' names its bits already; give it once",
    "train --codec qsgd --workers 0": "Invalid value for '--workers': 0 is not in the range x>=1. ...",
    "train --codec qsgd -o no/a.jsonl": "no/a.jsonl: the folder no does not exist; create it or choose another -o",
    "train --codec minmax --policy mqgrad train.py": "--policy is for built-in tasks: ... gtrace.training.MQGrad ...",
    "train --codec none --network 1Gbit/s train.py": "--network is for built-in tasks; train.py has its own",
    "train --codec bf16 --every 2 --cluster 8x1Gbit/s,20ms train.py": "--cluster: is for ... leave out --every.",
    "train --codec qsgd --to tensorbord train.py": TRACKER,
    # studies
    "codecs qsgdd": CODEC,
    "study compare": "name at least one codec, e.g. gtrace study compare qsgdinf:bits=3,alq:bits=3.",
    "study compare qsgd --weights best": "levels of weights: 'best' needs a placement and a count, e.g. optimal5.",
    "study predict run.jsonl --first ten": "--first: 'ten' is not a share of the steps; write e.g. 10%.",
    "study compare --weights optimal5 --kind neural": "weights: with kind neural they stay exact; choose kind weight",
    "study compare bf16 --every 2 --cluster 8x1Gbit/s,20ms": "--cluster: is for gradients ... leave out every=2.",
    "study compare bf16 --every 2 --network 1Gbit/s": "network: is for gradients ... leave out every=2",
    "study compare bf16 --every 2 --kind neural": "kind neural: is for gradients ... leave out every=2",
    "study compare int8 --kind neural --cluster 8x1Mbit/s,10ms": "--cluster: neural gradients do not travel ...",
    "study compare topk --error-feedback --kind neural": "kind neural: ef:topk keeps memory ...",
    "study compare qsgd --shadow 2": "shadow: compares weight gradients under compressed neural ones; ...",
    "study compare qsgd --kind nerual": "Invalid value for '--kind': 'nerual' is not one of 'weight', 'neural'. ...",
    "study compare qsgd --kind neural --shadow 0": "Invalid value for '--shadow': 0 is not in the range x>=1. ...",
    "study compare prune:sparsity=0.9 --sparsity 0.9": "... names its sparsity already; give it once",
    "bench dihter --quick": "no codec 'dihter'; ...",
    "bench qsgd -o x.pdf": "x.pdf: tables are written as .md or .tex",
    "bench qsgd -o nowhere/x.md": "nowhere/x.md: the folder nowhere does not exist; create it or choose another -o",
    "bench qsgd --plugin nowhere.py": "plugin nowhere.py: no such file",
    "bench nowhere.py": "plugin nowhere.py: no such file",
    "study predict run.jsonl --first=0%": "--first: '0%' is not a share of the steps; write e.g. 10%.",
    "study predict run.jsonl --first=200%": "--first: '200%' is not a share of the steps; write e.g. 10%.",
    # advice
    "advise missing.py": "missing.py: no such script",
    "advise --bandwidth 1-2Gbit/s train.py": "--bandwidth: needs the number of ranks, e.g. --cluster 8x25Gbit/s.",
    "advise --cluster 8x1Gbit/s --bandwidth 2-1Gbit/s train.py": "--bandwidth: '2-1Gbit/s' must rise, ...",
    "advise --cluster 8x1Gbit/s --bandwidth fast train.py": "--bandwidth: 'fast' needs two speeds and a unit, ...",
    "advise --seconds 0 train.py": "--seconds: 0 must be more than 0.",
}
#: the same for files, with exit code 3
UNREADABLE = {
    "info a.sweep.db": SWEEP,
    "sweep a.sweep.db": SWEEP,
    "info train.py": "train.py is a script, not a trace; record its gradients with gtrace capture train.py.",
    "sweep run.jsonl": "run.jsonl is a run log, not a trace; read it with gtrace report run.jsonl.",
    "plan p.toml --max-bits 3": "p.toml is a plan or a format table, not a trace; ... gtrace plan show p.toml.",
    "trace export notes.txt": "notes.txt is another file, not a trace; a trace is a folder .zarr or a file .h5.",
    "info folder": "folder: not a gtrace trace; make one with gtrace capture SCRIPT, or gtrace trace import FILES",
    "plan show a.zarr": "a.zarr: is a folder, not a plan; make a plan with gtrace plan TRACE --max-bits 3 -o plan.toml",
    "sweep empty.zarr": "empty.zarr: the trace is empty: no gradients were captured into it.",
    "info missing.zarr": "missing.zarr: no such trace; `gtrace capture SCRIPT` makes one",
    "report missing.sweep.db": "missing.sweep.db: no such file; pass a .sweep.db, a run log or a trace",
    "info --follow missing.zarr": "missing.zarr: no such trace; `gtrace capture SCRIPT` makes one",
    "study predict notes.txt": "notes.txt: not a run log (its first record is not a study); `gtrace train` writes them",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with one file of each kind."""
    folder = tmp_path_factory.mktemp("messages")
    about = {"kind": "weight", "tensors": {"w": 8}}
    write_sweep(folder / "a.sweep.db", rows_of(bits=[2], layers=("w",), steps=(0,)), (), about)
    (folder / "folder").mkdir()
    texts = {"train.py": "import torch\n", "run.jsonl": "{}\n", "p.toml": "a = 1\n", "notes.txt": "hi"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    write_arrays(folder / "empty.zarr", {})
    write_arrays(folder / "a.zarr", {"w": dict.fromkeys(range(3), np.ones(8))})
    return folder


@pytest.fixture
def call(call, made, monkeypatch):
    """Run ``gtrace`` in that folder, which it leaves as it was."""
    monkeypatch.chdir(made)
    monkeypatch.setattr("gtrace.workflows.bench.cache_folder", None)  # nothing is trained for a mistake
    before = sorted(made.rglob("*"))
    yield call
    assert sorted(made.rglob("*")) == before


@pytest.mark.parametrize(("line", "code"), [*((line, 2) for line in WRONG), *((line, 3) for line in UNREADABLE)])
def test_a_mistake_is_answered_in_one_line(call, line, code):
    said = {**WRONG, **UNREADABLE}[line]
    done = call(*shlex.split(line))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert re.fullmatch(re.escape(f"gtrace: {said}\n").replace(r"\.\.\.", ".*"), done.stderr), done.stderr


_LONG = "9" * 5000
#: what no person types, as a list of words
HOSTILE = [
    ["sweep", "a.zarr", "--methods", "rotate:" * 1000 + "qsgd:bits=3"],
    ["sweep", "a.zarr", "--methods", f"qsgd:bits={_LONG}"],
    ["sweep", "a.zarr", "--methods", "qsgd\ud800"],
    ["sweep", "a.zarr", "--methods", "qsgd\x1b[2J\x9b2J\u202e"],
    ["sweep", "a.zarr", "--methods", "qsgd", "--bits", _LONG],
    ["plan", "a.zarr", "--max-bits", f"1e{_LONG}"],
    ["plan", "a.zarr", "--max-bits", "3", "--weight", f"w=1e{_LONG}"],
    ["plan", "a.zarr", "--step-time", "1ms", "--cluster", f"8x1e{_LONG}Gbit/s,1ms"],
    ["info", "a.zarr\udcff\x85"],
]


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_what_no_person_types_is_answered_in_one_short_line(call, words):
    code, out, err = call(*words)
    assert (code in (2, 3), out, err.count("\n")) == (True, "", 1), err
    assert err[:-1].isprintable()
    assert len(err) < 5000
