"""What the package never does, whatever it is given: run data as code, build SQL from data, use the network."""

import ast
import ctypes
import errno
import json
import os
import socket
import stat
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest
from helpers_installed import ROOT, benchmark
from helpers_trace import write_trace
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gtrace
import gtrace_experiments
from gtrace.cli import main
from gtrace.report.files import put
from gtrace.runlog import RunLogWriter
from gtrace.training import checkpoint

PACKAGE = Path(gtrace.__file__).parent
EXPERIMENTS = Path(gtrace_experiments.__file__).parent

#: call -> files that may make it, and why
ALLOWED = {
    # Plugins and captured scripts are code that the user names.
    "exec": {"codecs/plugins.py", "torch_hooks/launcher.py"},
    "compile": {"codecs/plugins.py", "torch_hooks/launcher.py"},
    # Blocks of a sweep from the workers of the user's own Dask cluster, which could run anything anyway.
    # An exception that was just raised: can it be sent through a pipe?
    "pickle.loads": {"sweep/cluster.py", "sweep/engine.py"},
    "pickle.dumps": {"sweep/cluster.py", "sweep/engine.py"},
    # Calls of the C library that Python has none for. renameat2: an HDF5 file and the folder before it change places.
    # prctl and Landlock's calls: a child that reads foreign files gives up its rights.
    # prctl and malloc_trim: a forked worker ends with its parent, and gives memory back.
    # signal: the default action while the main thread is in C. madvise: memory of rows is there before it is written.
    "ctypes.CDLL": {
        *("trace/files.py", "trace/guard.py", "sweep/engine.py", "torch_hooks/processes.py", "capture/buffers.py"),
    },
    # memmove, under the interpreter's lock: of a gradient into the row that keeps it, both of checked sizes.
    "ctypes.PyDLL": {"capture/buffers.py"},
    # Arrays that lie apart reach a kernel as their addresses; this is the same in plain Python.
    ".from_address": {"kernels/drawing.py"},
}
FORBIDDEN = {
    *("eval", "exec", "compile", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.dumps", "pickle.dump"),
    *("marshal.load", "marshal.loads", "shelve.open", "dill.load"),
    *("ast.literal_eval", "tempfile.mktemp", "os.execv", "os.execvp", "ctypes.CDLL", "ctypes.PyDLL", ".from_address"),
}
#: What may stand in braces in the text of an SQL statement: names of columns and tables from gtrace.sweep.schema.
SQL_NAMES = {
    *("', '.join(KEY)", "', '.join(names)", "columns", "counts", "marks", "name", "table", "ROWS", "statement", "query")
}
SQL = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ", "PRAGMA ", "CREATE ", "ALTER ", "DROP ", "ATTACH ")


@cache
def nodes(path):
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def calls(path):
    """(dotted name, node) of every call in a file."""
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            yield dotted(node.func), node


def dotted(node):
    """``a.b.c`` of an attribute; the last part alone where it is of something else than a name."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def sources():
    files = [(root, file) for root in (PACKAGE, EXPERIMENTS) for file in sorted(root.rglob("*.py"))]
    assert len(files) > 200
    return [(file.relative_to(root).as_posix(), file) for root, file in files]


def violations(name, file):
    for called, node in calls(file):
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        where, last = f"{name}:{node.lineno}: {called}", called.rpartition(".")[2]
        if called in FORBIDDEN and name not in ALLOWED.get(called, ()):
            yield where
        if given.get("shell") == "True" or given.get("allow_pickle") == "True":
            yield f"{where} with shell or pickle"
        if called == "torch.load" and given.get("weights_only") != "True":
            yield f"{where} without weights_only=True"
        if called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
            yield f"{where} without allow_pickle=False"
        if "." in called and last in ("execute", "executemany", "executescript"):
            first = node.args[0]
            if not isinstance(first, (ast.Constant, ast.JoinedStr)) and ast.unparse(first) not in SQL_NAMES:
                yield f"{where} of {ast.unparse(first)}"
    for node in nodes(file):
        # gtrace.sweep.schema makes its statements of its own constants alone.
        if isinstance(node, ast.JoinedStr) and name != "sweep/schema.py":
            start, parts = node.values[0], [one.value for one in node.values if isinstance(one, ast.FormattedValue)]
            if isinstance(start, ast.Constant) and str(start.value).startswith(SQL):
                inside = [ast.unparse(part) for part in parts]
                yield from (f"{name}:{node.lineno}: SQL with {{{one}}}" for one in inside if one not in SQL_NAMES)


def test_no_data_is_run_as_code_and_no_sql_is_made_of_data():
    assert [line for name, file in sources() for line in violations(name, file)] == []


def test_what_is_allowed_is_there():
    """An exception that nobody needs any more is taken out of the list."""
    made = {(called, name) for name, file in sources() for called, _ in calls(file)}
    assert {(called, name) for called, names in ALLOWED.items() for name in names} <= made


BAD = """
eval(text)
torch.load(path)
torch.load(path, weights_only=False)
np.load(path)
subprocess.run(text, shell=True)
sql.execute(f'SELECT {tensor} FROM cells')
sql.execute('SELECT * FROM cells WHERE tensor = ' + name)
sql.execute('SELECT {}'.format(name))
sql.executescript(script + '')
"""


def test_the_check_sees_each_of_them(tmp_path):
    (tmp_path / "bad.py").write_text(BAD.strip())
    seen = [line.split(":")[1] for line in violations("bad.py", tmp_path / "bad.py")]
    assert sorted(seen) == [str(number) for number in range(1, 10)]


def watched(monkeypatch):
    """Refuse every socket but local ones, as between the processes of a pool: what was asked for."""
    used = []

    def refuse(*args, **_):
        used.append(args)
        raise OSError("there is no network")

    for name in ("connect", "connect_ex", "bind", "sendto"):
        real = getattr(socket.socket, name)

        def guarded(self, *args, real=real):
            return real(self, *args) if self.family == socket.AF_UNIX else refuse(*args)

        monkeypatch.setattr(socket.socket, name, guarded)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    return used


COMMANDS = [
    "capture train.py -o mine.zarr",
    "info run.zarr",
    "check run.zarr",
    "sweep run.zarr --methods qsgdinf,alq --bits 3",
    "report run.sweep.db -o page.html",
    "report run.sweep.db -o table.csv",
    "plan run.zarr --max-bits 3",
    "pack run.zarr -o run.h5",
    "sketch run.zarr -o small.zarr",
    "export run.zarr --to npz -o all",
    "import all -o again.zarr",
    "formats run.zarr --bits 5 -o formats.toml",
    "codecs alq",
    "train --task digits-mlp --codec qsgdinf --steps 1 --workers 2 -o log.jsonl",
]
TRAIN = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
"""
#: of <linux/sched.h>
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def test_every_main_command_runs_in_a_network_namespace_that_reaches_nothing(tmp_path):
    write_trace(tmp_path / "run.zarr")
    (tmp_path / "train.py").write_text(TRAIN)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, json.dumps(run_without_network(tmp_path)).encode())
        except BaseException as error:  # noqa: BLE001 - raised by the parent
            os.write(writing, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        found = json.loads(told.read())
    os.waitpid(child, 0)
    assert isinstance(found, dict), found
    assert found["used"] == []
    assert {command: code for command, code in found["ended"].items() if code} == {}
    if not found["alone"]:
        pytest.skip("this system permits no network namespace; only the guard around sockets was tried")
    assert found["reached"] == errno.ENETUNREACH


def run_without_network(folder):
    """How each command ended, in this process, which leaves the network for good."""
    os.chdir(folder)
    libc = ctypes.CDLL(None)
    alone = not libc.unshare(CLONE_NEWNET) or not libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)
    with socket.socket() as tried:
        reached = tried.connect_ex(("127.0.0.1", 9))
    used = watched(pytest.MonkeyPatch())
    ended = {}
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for command in COMMANDS:
            try:
                main(command.split())
            except SystemExit as end:
                ended[command] = end.code
    return {"alone": alone, "reached": reached, "used": used, "ended": ended}


def test_the_guard_sees_who_uses_the_network(monkeypatch):
    used = watched(monkeypatch)
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("localhost", 9))
    with socket.socket() as tried, pytest.raises(OSError, match="no network"):
        tried.connect(("127.0.0.1", 9))
    assert len(used) == 2


def test_unfinished_files_follow_no_link_and_folders_for_the_time_being_are_private(tmp_path, monkeypatch):
    """The names of unfinished files can be guessed; a link put there by somebody else must not be written through."""
    victim = tmp_path / "thesis.txt"
    writers = {
        "page": lambda path: put(path, b"page"),
        "log": lambda path: RunLogWriter(path, {}).close(),
        "checkpoint": lambda path: checkpoint.save(path, {"step": 1}),
    }
    for name, write in writers.items():
        victim.write_text("years of work")
        path = tmp_path / name
        path.with_name(f"{path.name}.partial").symlink_to(victim)
        write(path)
        assert victim.read_text() == "years of work"
        assert not path.is_symlink()
        assert path.stat().st_size
    seen, real = [], os.mkdir

    def noted(path, mode=0o777, **how):
        seen.append((path, mode))
        real(path, mode, **how)

    monkeypatch.setattr(os, "mkdir", noted)
    gtrace.run_sweep(gtrace.trace.Trace.from_arrays({"w": [1.0, -2.0]}), ["qsgdinf:bits=3"])
    assert [stat.S_IMODE(mode) for path, mode in seen if "gtrace-" in str(path)] == [0o700]


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_what_is_written_has_the_permissions_of_the_umask(umask, tmp_path):
    """Nobody sees more of a file, finished or not, than its owner's umask says, and no less."""
    modes = {}
    real = os.open

    def noted(path, flags, mode=0o777, **how):
        descriptor = real(path, flags, mode, **how)
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            modes[path] = stat.S_IMODE(os.fstat(descriptor).st_mode)
        return descriptor

    before = os.umask(umask)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", noted)
            write_trace(tmp_path / "run.zarr")
            write_trace(tmp_path / "run.h5")
            put(tmp_path / "page.html", b"page")
            RunLogWriter(tmp_path / "log.jsonl", {}).close()
            checkpoint.save(tmp_path / "checkpoint", {"step": 1})
            with gtrace.open_trace(tmp_path / "run.zarr") as trace:
                gtrace.run_sweep(trace, ["qsgdinf:bits=3"], output=tmp_path / "run.sweep.db")
    finally:
        os.umask(before)
    assert any(path.endswith((".partial", "~")) or "/." in path for path in map(str, modes)), modes
    assert set(modes.values()) == {0o666 & ~umask}
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~umask, path


KNOWN = """
_typeshed gtrace gtrace_experiments click google_crc32c h5py jinja2 markupsafe matplotlib numba llvmlite triton
numcodecs numpy rich scipy zarr torch distributed dask fsspec lightning transformers pyarrow pandas aiohttp torchvision
xarray
"""


def test_only_the_standard_library_s_and_known_packages_are_imported():
    """A new dependency is a decision, not an accident."""
    found = set()
    for _, file in sources():
        for node in nodes(file):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    assert found - set(sys.stdlib_module_names) - set(KNOWN.split()) == set()


def test_the_list_of_materials_is_that_of_the_pins():
    sbom = benchmark("sbom")
    written = json.loads(sbom.FILE.read_text())
    assert written == sbom.made(), "run python benchmarks/sbom.py"
    listed = {f"{part['name']}=={part['version']}": part["scope"] for part in written["components"]}
    assert set(listed) == set((ROOT / "constraints.txt").read_text().split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(text) for text in project["dependencies"]]
    pins = {canonicalize_name(pin.partition("==")[0]): pin for pin in listed}
    for one in needed:
        pin = pins[canonicalize_name(one.name)]
        assert listed[pin] == "required"
        assert one.specifier.contains(pin.partition("==")[2])
    bounded = {one.name for one in needed if "<" in str(one.specifier)}
    assert bounded == {"click", "h5py", "numba", "numpy", "zarr"}, "say why in pyproject.toml"
