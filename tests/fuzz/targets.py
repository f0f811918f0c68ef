"""What is fuzzed: functions of bytes that must answer or refuse, and seeds that lead deep into them.

A target raises ``GtraceError`` to refuse. Anything else that it raises, time or memory out of proportion, and an answer
that breaks a promise (an AssertionError here) is a finding.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import sqlite3
import struct
import tempfile
import unicodedata
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import numpy as np
from helpers_plan import curves_of_laws
from helpers_trace import write_steps
from helpers_variants import VARIANTS
from rich.console import Console

import gtrace
from gtrace.capture.options import parse_steps
from gtrace.codecs import codec_names, parse_spec, wrapper_names
from gtrace.codecs.spec import split_specs
from gtrace.coding.envelope import open_envelope, seal
from gtrace.costs import Network
from gtrace.errors import TraceError
from gtrace.planning import Budget, make_plan, save_plan
from gtrace.report.html import pieces
from gtrace.report.inputs import make_report
from gtrace.report.section import Cell, Column, Table
from gtrace.report.text import print_report
from gtrace.runlog import RunLogWriter
from gtrace.schedule import RefitSchedule
from gtrace.sweep import ResultStore, expand
from gtrace.testing import fitted
from gtrace.trace import create_trace, open_trace
from gtrace.trace.foreign import READERS
from gtrace.trace.guard import Guard
from gtrace.trace.journal import parse_journal
from gtrace.trace.sketches import SketchPlan
from gtrace.types import Key
from gtrace.units import parse_range, parse_size
from gtrace_experiments.reproduce.runner import read_result

Run = Callable[[bytes], None]


class Target(NamedTuple):
    """Inputs to start from, and what is done with each; ``text`` inputs are UTF-8."""

    seeds: tuple[bytes, ...]
    run: Run
    text: bool = False


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="gtrace-fuzz-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


#: elements of the tensor behind the seeds, and what an input may claim instead
_SIZE = 97
_SIZES = (_SIZE, 0, 1, _SIZE + 1, _SIZE - 1, 2**16, 2**20)
_HEADER = struct.Struct("<BBHH")


def _decoder(name: str) -> Target:
    """Payloads of all configurations of a codec or wrapper; the checksums of each input are made right."""
    specs = [
        spec
        for spec in VARIANTS
        if name in (parse_spec(spec).name, *(prefix for prefix, _ in parse_spec(spec).wrappers))
    ]
    codecs = [gtrace.codec(spec) for spec in specs]
    values = np.random.default_rng(7).standard_t(3, _SIZE).astype(np.float32)
    seeds = []
    for k, item in enumerate(codecs):
        state, _ = fitted(item, values)
        shared, payload = item.shared(state), item.encode(state, values, Key.derive(0, tensor="fuzz"))
        body, flags = open_envelope(payload, codec=item.wire_name, size=_SIZE, shared=shared)
        seeds.append(_HEADER.pack(k, 0, flags, len(shared)) + shared + bytes(body))

    def run(data: bytes) -> None:
        if len(data) < _HEADER.size:
            return
        which, claim, flags, length = _HEADER.unpack_from(data)
        item, size = codecs[which % len(codecs)], _SIZES[claim % len(_SIZES)]
        shared, body = data[_HEADER.size :][:length], data[_HEADER.size + length :]
        payload = seal(body, codec=item.wire_name, size=size, shared=shared, flags=flags)
        decoded = item.decode(shared, payload, size)
        assert decoded.dtype == np.float32, decoded.dtype
        assert decoded.shape == (size,), decoded.shape

    return Target(tuple(seeds), run)


def _envelope() -> Target:
    body = b"body" * 5
    seeds = (seal(body, codec="qsgd", size=9, shared=b"s"), seal(b"", codec="qsgd", size=2**36, shared=b""))
    return Target(seeds, lambda data: open_envelope(data, codec="qsgd", size=9, shared=b"s") and None)


def _parser(parse: Callable[[str], object], *seeds: str) -> Target:
    return Target(tuple(seed.encode() for seed in seeds), lambda data: parse(data.decode()) and None, text=True)


def _spec(text: str) -> None:
    for part in split_specs(text):
        made = gtrace.codec(part)
        assert gtrace.codec(str(made)) == made, str(made)
    assert len(set(map(str, expand(text, {"bits": [3]})))) <= 100_000


def _read_all(path: Path) -> None:
    with open_trace(path) as trace:
        assert trace.fingerprint
        trace.scalars()
        for info in trace.tensors:
            assert info.name
            trace.statistics(info.name)
            for step in trace.steps(info.name):
                values = trace.read(info.name, step)
                assert values.dtype == np.float32
                assert values.size < 10**6, "a small trace gave a large tensor"


def _made(suffix: str) -> Path:
    path = _folder() / f"seed{suffix}"
    if not path.exists():
        with create_trace(path, attrs={"seed": 3, "model": "made up"}) as writer:
            for step in range(3):
                writer.append(step, "fc.weight", np.full((2, 3), step, np.float32))
                writer.append(step, "fc.bias", np.ones(3, np.float32))
                writer.commit(step, loss=1.0)
    return path


def _zarr(*, metadata: bool) -> Target:
    """One of the JSON files of a trace, or of its others, named by the first byte, replaced by what follows."""
    files = [path for path in sorted(_made(".zarr").rglob("*")) if path.is_file()]
    files = [path for path in files if (path.name == "zarr.json") == metadata]
    files = [path for path in files if metadata or path.stat().st_size < 4096]

    def run(data: bytes) -> None:
        file = files[data[0] % len(files)] if data else files[0]
        whole = file.read_bytes()
        file.write_bytes(data[1:])
        try:
            _read_all(_made(".zarr"))
        finally:
            file.write_bytes(whole)

    return Target(tuple(bytes([k]) + file.read_bytes() for k, file in enumerate(files)), run)


def _hdf5_attributes() -> Target:
    """The attribute ``metadata`` of one of the nodes of a file, named by the first byte."""
    import h5py

    path = _made(".h5")
    nodes: list[tuple[str, bytes]] = []
    with h5py.File(path, "r") as file:
        file.visititems(lambda name, node: nodes.append((name, node.attrs.get("metadata", b""))) or None)
        nodes.append(("/", file.attrs["metadata"]))
    texts = [(name, text.encode() if isinstance(text, str) else bytes(text)) for name, text in nodes]
    copy = path.with_name("forged.h5")

    def run(data: bytes) -> None:
        name = texts[data[0] % len(texts)][0] if data else "/"
        copy.write_bytes(path.read_bytes())
        with h5py.File(copy, "r+", libver="v110") as file:
            text = data[1:].replace(b"\0", b"0")[:60_000]
            file[name].attrs.create("metadata", text, dtype=h5py.string_dtype("utf-8", max(1, len(text))))
        _read_all(copy)

    return Target(tuple(bytes([k]) + text for k, (_, text) in enumerate(texts) if text), run)


def _file(suffix: str, seeds: tuple[bytes, ...], read: Callable[[Path], object], *, text: bool = False) -> Target:
    def run(data: bytes) -> None:
        path = _folder() / f"input{suffix}"
        path.write_bytes(data)
        read(path)

    return Target(seeds, run, text)


@cache
def _guard() -> Guard:
    guard = Guard([_folder()], READERS)
    atexit.register(guard.__exit__)
    return guard


def _foreign(path: Path) -> None:
    guard = _guard()
    try:
        with guard.open(path, path.suffix) as file:
            for entry in file.entries:
                file.read(entry)
    except TraceError:
        if not Path(f"/proc/{guard.process.pid}").exists():
            _guard.cache_clear()
        raise


def _arrays() -> dict[str, bytes]:
    folder = _folder()
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float16)}
    np.save(folder / "a.npy", arrays["a"])
    np.savez_compressed(folder / "a.npz", **arrays)
    head = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    return {
        "npy": (folder / "a.npy").read_bytes(),
        "npz": (folder / "a.npz").read_bytes(),
        "safetensors": len(head).to_bytes(8, "little") + head + bytes(24),
    }


def _store() -> bytes:
    path = _folder() / "seed.db"
    trace = gtrace.trace.Trace.from_arrays({"w": {0: [1.0, -2.0, 0.5], 1: [0.25, 3.0, -1.0]}})
    gtrace.run_sweep(trace, ["qsgdinf:bits=3", "alq:bits=2"], output=path, force=True)
    return path.read_bytes()


def _texts() -> Target:
    """One of the JSON texts of a result file, named by the first byte; the report that is made of it."""
    whole = _store()
    path = _folder() / "texts.db"
    path.write_bytes(whole)
    with contextlib.closing(sqlite3.connect(path)) as sql:
        texts = sql.execute("SELECT 'meta', key, value FROM meta WHERE key = 'provenance'").fetchall()
        texts += sql.execute("SELECT 'details', what, value FROM details").fetchall()

    def run(data: bytes) -> None:
        table, key, _ = texts[data[0] % len(texts)] if data else texts[0]
        path.write_bytes(whole)
        with contextlib.closing(sqlite3.connect(path)) as sql, sql:
            sql.execute("PRAGMA synchronous=OFF")
            column = "key" if table == "meta" else "what"
            sql.execute(f"UPDATE {table} SET value = ? WHERE {column} = ?", (data[1:].decode(), key))
        _shown(sweeps=[path])

    return Target(tuple(bytes([k]) + text.encode() for k, (_, _, text) in enumerate(texts)), run, text=True)


def _shown(**inputs: list[Path]) -> None:
    """The report as the terminal shows it: all that a page says, without the time that figures take."""
    shown = io.StringIO()
    print_report(make_report(**inputs), Console(file=shown, width=100))
    assert not {unicodedata.category(char) for char in shown.getvalue() if char != "\n"} & {"Cc", "Cf", "Cs"}


def _runlog() -> Target:
    path = _folder() / "seed.jsonl"
    with RunLogWriter(path, {"task": "t", "workers": 2, "seed": 0, "parameters": 3}, force=True) as log:
        for run in ("none", "qsgd:bits=4"):
            log.write("step", run=run, seed=0, step=0, loss=2.5, bits=96, bits_float32=96, relative_variance=0.1)
            log.write("shadow", run=run, seed=0, step=0, tensor="w", cosine=0.9, error=0.1)
            log.write("eval", run=run, seed=0, step=0, loss=0.5, accuracy=0.9)
            log.write("end", run=run, seed=0, steps=1, loss=0.5, accuracy=0.9, bits=96, ratio=1.0, seconds=1.0)
    return _file(".jsonl", (path.read_bytes(),), lambda path: _shown(runs=[path]), text=True)


def _plan(suffix: str) -> Target:
    path = _folder() / f"seed{suffix}"
    budget = Budget("bits", 3.0, "--budget 3bits")
    save_plan(make_plan(curves_of_laws(steps=3, options=4), budget, name="p", provenance={"trace": "t.zarr"}), path)
    return _file(suffix, (path.read_bytes(),), lambda path: _shown(plans=[path]))


class _Tags(HTMLParser):
    """Tags of a table that has a name wherever a name can be."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[str]]] = []
        self.data = ""
        self.feed(pieces.table(Table(name, (Column(name, name),), ((Cell(name, name, hint=name),),), (name,))))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data: str) -> None:
        self.data += data


def _escaping(name: str) -> None:
    """A name that comes from a trace adds no element, no attribute and no control character to a page."""
    found, harmless = (_Tags(f"a{words}") for words in (name, "b"))
    assert found.tags == harmless.tags, found.tags
    # The lines of the page itself are there for every name.
    assert found.data.count("\n") == harmless.data.count("\n")
    shown = found.data.replace("\n", "")
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}, found.data


def _journal() -> Target:
    path = _folder() / "journal.zarr"
    writer = create_trace(path)
    write_steps(writer, range(3))
    seeds = tuple(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file() and "journal" in file.name)
    writer.close()

    def refuse(error: TraceError) -> None:
        raise error

    return Target(seeds, lambda data: parse_journal(data, "weight", "here", refuse) and None)


def _made_up_result() -> Target:
    from experiments.test_hostile_results import RESULT

    return _file(".json", (json.dumps(RESULT.to_json()).encode(),), read_result, text=True)


MAKERS: dict[str, Callable[[], Target]] = {
    **{f"decoder-{name}": (lambda name=name: _decoder(name)) for name in (*codec_names(), *wrapper_names())},
    "envelope": _envelope,
    "spec": lambda: _parser(_spec, *VARIANTS[:40], "alq:bits=3,bucket_size=64,ef:topk,ratio=0.1,qsgd", "all"),
    "range": lambda: _parser(parse_range, "2-8", "2,4,8", "0.5-0.95:0.05", "1e3-1e9:1e-3", "-3", "0x1"),
    "decades": lambda: _parser(lambda text: parse_range(text, decades=True), "0.01-0.2", "1e-300-1e300"),
    "steps": lambda: _parser(parse_steps, "auto", "0,10,100-200", "1000+50", "0-1000:10"),
    "budget": lambda: _parser(parse_size, "4GB", "1.5 MB", "100", "1e9kB"),
    "schedule": lambda: _parser(RefitSchedule.parse, "0,100,2000,+10000", "every", "once", "0"),
    "network": lambda: _parser(lambda text: Network.parse(*text.split("|", 2)), "10MB/s|50us", "1e3kbit/s|1e-3s|ps"),
    "sketch-plan": lambda: _parser(SketchPlan.parse, "l2:8192,linf:8192", "none:none", "l1:1"),
    "escaping": lambda: _parser(_escaping, "fc.weight", "<script>alert(1)</script>", "\"'&\x1b[2J\u202e"),
    "zarr-metadata": lambda: _zarr(metadata=True),
    "zarr-chunks": lambda: _zarr(metadata=False),
    "hdf5-attributes": _hdf5_attributes,
    "hdf5-file": lambda: _file(".h5", (_made(".h5").read_bytes(),), _read_all),
    "journal": _journal,
    "npy": lambda: _file(".npy", (_arrays()["npy"],), _foreign),
    "npz": lambda: _file(".npz", (_arrays()["npz"],), _foreign),
    "safetensors": lambda: _file(".safetensors", (_arrays()["safetensors"],), _foreign),
    "result-store": lambda: _file(".sweep.db", (_store(),), ResultStore.load),
    "result-texts": _texts,
    "run-log": _runlog,
    "experiment-result": _made_up_result,
    "plan-toml": lambda: _plan(".toml"),
    "plan-json": lambda: _plan(".json"),
}


@cache
def target(name: str) -> Target:
    """A target by its name, made at first use."""
    return MAKERS[name]()
