"""What mistakes are answered with: command line, exit code, the one line. Nothing is left behind."""

import re
import shlex

import numpy as np
import pytest
from helpers_trace import write_arrays

from ..helpers_report import rows_of, write_sweep

#: command line -> what follows ``gtrace: ``, where ``...`` is any text; the exit code is 2
WRONG = {
    # words that are not commands, and names that moved
    "swep": "'swep' is not a command; did you mean sweep? (gtrace --help shows the commands)",
    "xyzzy": "'xyzzy' is not a command (gtrace --help shows the commands)",
    "train.py": "'train.py' is not a command; did you mean gtrace capture train.py? (gtrace --help shows the commands)",
    "a.zarr": "'a.zarr' is not a command; did you mean gtrace info a.zarr? (gtrace --help shows the commands)",
    "a.sweep.db": "'a.sweep.db' is not a command; did you mean gtrace report a.sweep.db? ...",
    "train --task svm": "linear models have a command of their own; use gtrace linear --task svm",
    # capture
    "capture --steps 0 --every 2 train.py": "--every and --steps exclude each other; --steps 0-1000:10 says both.",
    "capture train.py": "nothing was captured: it took no step of a torch optimizer",
    "capture": "Missing argument 'SCRIPT'. (gtrace capture --help shows the options)",
    "capture nowhere.py": "nowhere.py: no such script",
    "capture -o x.npz train.py": "x.npz: a trace ends in .zarr or .h5; choose another name",
    "capture --forse train.py": "No such option '--forse'. ... '--force', ...",
    "capture -m no_package.train": "-m no_package.train: Error while finding module specification ...",
    "capture --kind all train.py": "--kind: unknown kind 'all'; known: both, momentum, neural, outer, update, weight",
    "capture --sketch l2:8192,foo train.py": "--sketch: 'l2:8192,foo' is not a list of norms with ...",
    # traces
    "info a.zarr --steps 0": "--steps: says at which steps laws are fitted; pass --fit with it",
    "info --follow s3://a/b.zarr": "s3://a/b.zarr: --follow needs a trace on this machine",
    "export a.zarr --steps 7,8": "--steps: none of these steps is in the trace; it has 3 steps from 0 to 2",
    "formats a.zarr --bits 2": "--bits: 2 to 2; formats have 3 to 8 bits",
    # sweeps
    "sweep a.zarr --methods qsgd --steps 5-1": "--steps: '5-1' is reversed; write 1-5.",
    "sweep a.zarr --methods qsgd --steps x": "--steps: 'x' is not a valid step; write e.g. 0,10,100-200 or 1000+50.",
    "sweep a.zarr --methods qsgd --bits 2.5": "--bits: '2.5' must hold whole numbers, e.g. 2-8 or 2,4,8.",
    "sweep a.zarr --methods fp:all,bits=x": "codec fp: bits=x is not an integer",
    "sweep a.zarr --methods ef:ef:topk": "codec 'ef:ef:topk': ef: is there twice; write ef:topk.",
    "sweep a.zarr --methods topk --bits 3": "--bits: topk has no bits to choose; leave it out (gtrace ...",
    "sweep a.zarr --methods qsgd:bits=4,bf16 --bits 2-3": "--bits: qsgd:bits=4 has bits of its own; leave one of ...",
    "sweep a.zarr --methods topk:ratio=0.1 --ratio 0.2": "--ratio: topk:ratio=0.1 has ratio of its own; leave one ...",
    "sweep a.zarr --methods qsgd,bf16 --sparsity 0.9": "--sparsity: none of these codecs has sparsity to choose; ...",
    "sweep --mehtods all x": "No such option '--mehtods'. Did you mean '--methods'? (gtrace sweep --help ...",
    "sweep a.zarr --methods qsgd --tensors nope.*": "--tensors: no tensor matches 'nope.*'; known: w",
    "sweep a.zarr --methods qsgd -o b.db --tensors ''": "--tensors: is empty; name something, or leave it out",
    "info a.zarr --tensors ,": "--tensors: is empty; name something, or leave it out",
    "sweep a.zarr --methods qsgd --bucket-size 0": "codec qsgd: bucket_size=0 is out of range; it must be at least 1",
    "sweep a.zarr --methods qsgd -o missing/out.db": "missing/out.db: the folder missing does not exist; ...",
    "sweep a.zarr --methods qsgd --ranks 4": "--ranks: is for --exchange; name one, or leave it out.",
    "sweep a.zarr --methods qsgd --exchange ,": "--exchange: is empty; name something, or leave it out",
    "sweep a.zarr --plan p.toml --bits 3": "--bits: is for --methods; a plan names its codecs.",
    "sweep a.zarr --plan p.toml --error-feedback": "--error-feedback: is for --methods; a plan names its codecs.",
    "sweep a.zarr --methods topk --draws 0": "--draws 0: topk has no closed form, so nothing is measured; leave it out",
    "sweep a.zarr --all --bits 3": "--all measures everything: leave out --bits",
    # reports
    "report a.sweep.db --cluster 25Gbit/s": "--cluster: '25Gbit/s' needs ranks and link speed, e.g. 8x25Gbit/s.",
    "report a.sweep.db --cluster 8x1Mbit/s,10ms --ranks 4": "... already says how many ranks; leave one out.",
    "report a.sweep.db --cluster 8x25Gbit/s,buckt=1MiB": "--cluster: 'buckt=' is unknown; did you mean bucket?",
    "report a.sweep.db --cluster 8x25Gbit/s,backward=1ms": "... backward: needs the compute time of the step ...",
    "report a.sweep.db --to tensorboard --full": "--to sends numbers instead of writing a report: leave out all ...",
    "report a.sweep.db --figure rate-distortion --full": "--figure draws one figure alone: leave out --json, ...",
    "report a.sweep.db --figure rate-distortion -o x.jpg": "x.jpg: a figure is written as .pdf, .png, .svg",
    "report a.sweep.db --pair qsgd:bits=2 alq": "... no comparable configuration 'qsgd:bits=2'; did you mean qsgd:...",
    "report a.sweep.db -o x.docx": "x.docx: a report is written as .html, .md, .csv, .jsonl, .parquet, .tex or ...",
    # plans
    "plan a.zarr --max-bits 3 --bits 2-8:0": "--bits: '2-8:0' needs a positive step, e.g. 0.5-0.95:0.05.",
    "plan a.zarr --step-time 50ms": "--step-time 50ms: needs the machines, e.g. --cluster 8x25Gbit/s,25ms.",
    "plan a.zarr --max-bits 3GB": "--max-bits: '3GB' has an unknown unit; write e.g. 3bits.",
    "plan a.zarr": "plan: give one limit: --max-bits 3, --ratio 12, --max-error 0.1 or --step-time 50ms.",
    "plan a.zarr --step-time 1us --cluster 4x1Gbit/s,latency=1ms --objective error": "... without any bits ...",
    "plan a.zarr --max-bits 3 --cluster 4x1Gbit/s": "--cluster: is for --step-time; give --step-time, e.g. 50ms.",
    "plan a.zarr --max-bits 0.1bits --objective error": "--max-bits 0.1: these codecs take at least 6 bits ...",
    "plan a.zarr --max-bits 3 --methods qsgd:bits=4 --bits 2-3": "--bits: qsgd:bits=4 has bits of its own; leave ...",
    "plan a.zarr --max-bits 3 --methods qsgd --keep 0.1": "--keep: qsgd has no ratio to choose; leave it out ...",
    "plan a.zarr --max-bits 3 --methods mcgq": "mcgq:bits=2: its error has no closed form; sweep ...",
    "plan a.zarr --max-bits 3 --methods dct:qsgd --bits 4": "dct:qsgd:bits=4,...: its error has no closed form; ...",
    "plan a.zarr --max-bits 3 --tensors nothing*": "--tensors: no tensor matches 'nothing*'; known: w",
    "plan a.zarr --max-bits 3 --objective cost --weight w=2": "--objective cost: is for predicted cost, ...",
    # training a script or a task
    "train --codec qsgd --cluster 8x25Gbit/s": "... needs the compute time of a step here, e.g. 8x25Gbit/s,180ms.",
    "train --codec QSGDINF": "no codec 'QSGDINF'; did you mean qsgdinf?",
    "train --codec qsgdd": "no codec 'qsgdd'; did you mean qsgd or nuqsgd or qsgdinf?",
    "train --codec qsgd --workers 0": "Invalid value for '--workers': 0 is not in the range x>=1. ...",
    "train": "name a codec before SCRIPT, e.g. --codec qsgdinf --bits 3 (gtrace codecs lists them), or a --plan.",
    "train --codec qsgd --compare alq": "give one of --codec and --compare, not both.",
    "train --codec qsgd --kind neural": "--kind: is an option of gtrace study compare, which trains built-in tasks.",
    "train --codec qsgd --bits 99": "codec qsgd: bits=99 is out of range; it must be 2 to 15",
    "train --codec qsgd:bits=3 --bits 4": "--bits: qsgd:bits=3 has bits of its own; leave one of the two out",
    "train --codec topk --bits 3 train.py": "--bits: topk has no bits to choose; leave it out (gtrace ...",
    "train --compare topk,bf16 --bits 3": "--bits: none of these codecs has bits to choose; leave it out",
    "train --codec qsgd -o no/a.jsonl": "no/a.jsonl: the folder no does not exist; create it or choose another -o",
    "train --codec minmax --policy mqgrad train.py": "--policy is for built-in tasks: ... gtrace.training.MQGrad ...",
    "train --codec bf16 --every 2 --cluster 8x1Gbit/s,20ms train.py": "--cluster: is for ... leave out --every.",
    "train --codec qsgd --to tensorbord train.py": "--to tensorbord: unknown tracker ...; did you mean tensorboard?",
    # studies
    "study compare": "name at least one codec, e.g. gtrace study compare qsgdinf:bits=3,alq:bits=3.",
    "study compare qsgd --weights best": "levels of weights: 'best' needs a placement and a count, e.g. optimal5.",
    "study compare --weights optimal5 --kind neural": "weights: with kind neural they stay exact; choose kind weight",
    "study compare int8 --kind neural --cluster 8x1Mbit/s,10ms": "--cluster: neural gradients do not travel ...",
    "study compare int8 --layers all": "layers: is about neural gradients; choose kind neural",
    "study compare topk --error-feedback --kind neural": "kind neural: ef:topk keeps memory ...",
    "study compare prune:sparsity=0.9 --sparsity 0.9": "--sparsity: prune:sparsity=0.9 has sparsity ...",
    "bench qsgd -o x.pdf": "x.pdf: tables are written as .md or .tex",
    "bench qsgd --plugin nowhere.py": "plugin nowhere.py: no such file",
    "study predict run.jsonl --first=200%": "--first: '200%' is not a share of the steps; write e.g. 10%.",
    # advice
    "advise --bandwidth 1-2Gbit/s train.py": "--bandwidth: needs the number of ranks, e.g. --cluster 8x25Gbit/s.",
    "advise --cluster 8x1Gbit/s --bandwidth 2-1Gbit/s train.py": "--bandwidth: '2-1Gbit/s' must rise, ...",
    "advise --seconds 0 train.py": "--seconds: 0 must be more than 0.",
}
#: the same for files, with exit code 3
UNREADABLE = {
    "sweep a.sweep.db": "a.sweep.db is sweep results, not a trace; read them with gtrace report a.sweep.db.",
    "info train.py": "train.py is a script, not a trace; record its gradients with gtrace capture train.py.",
    "plan p.toml --max-bits 3": "p.toml is a plan or a format table, not a trace; ... gtrace plan show p.toml.",
    "plan show a.zarr": "a.zarr: is a folder, not a plan; make a plan with gtrace plan TRACE --max-bits 3 -o plan.toml",
    "sweep empty.zarr": "empty.zarr: the trace is empty: no gradients were captured into it.",
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
