"""What the package never does, whatever it is given: run data as code, build SQL from data, use the network."""

import ast
import os
import socket
import stat
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers_trace import write_trace

import gtrace
import gtrace_experiments
from gtrace.cli import main
from gtrace.report.render.files import put
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
    # Literals of numpy's header, at most ten kilobytes of them; nothing is called.
    # renameat2 of the C library, which Python has no call for: an HDF5 file and the folder before it change places.
    # prctl, likewise: a forked worker ends with its parent.
    "ctypes.CDLL": {"trace/files.py", "sweep/engine.py"},
}
FORBIDDEN = {
    *("eval", "exec", "compile", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.dumps", "pickle.dump"),
    *("marshal.load", "marshal.loads", "shelve.open", "dill.load"),
    *("ast.literal_eval", "tempfile.mktemp", "os.execv", "os.execvp", "ctypes.CDLL"),
}
#: What may stand in braces in the text of an SQL statement: names of columns and tables from gtrace.sweep.schema.
SQL_NAMES = {
    *("', '.join(KEY)", "', '.join(names)", "columns", "counts", "marks", "name", "table", "ROWS", "statement", "query")
}


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
        last = called.rpartition(".")[2]
        if called in FORBIDDEN and name not in ALLOWED.get(called, ()):
            yield f"{name}:{node.lineno}: {called}"
        if given.get("shell") == "True" or given.get("allow_pickle") == "True":
            yield f"{name}:{node.lineno}: {called} with shell or pickle"
        if called == "torch.load" and given.get("weights_only") != "True":
            yield f"{name}:{node.lineno}: torch.load without weights_only=True"
        if called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
            yield f"{name}:{node.lineno}: {called} without allow_pickle=False"
        if "." in called and last in ("execute", "executemany", "executescript"):
            first = node.args[0]
            if not isinstance(first, (ast.Constant, ast.JoinedStr)) and ast.unparse(first) not in SQL_NAMES:
                yield f"{name}:{node.lineno}: SQL from {ast.unparse(first)}"
    for node in nodes(file):
        # gtrace.sweep.schema makes its statements of its own constants alone.
        if isinstance(node, ast.JoinedStr) and name != "sweep/schema.py" and is_sql(node):
            for part in node.values:
                if isinstance(part, ast.FormattedValue) and ast.unparse(part.value) not in SQL_NAMES:
                    yield f"{name}:{node.lineno}: SQL with {{{ast.unparse(part.value)}}}"


def is_sql(node):
    start = node.values[0]
    words = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ", "PRAGMA ", "CREATE ", "ALTER ", "DROP ", "ATTACH ")
    return isinstance(start, ast.Constant) and str(start.value).startswith(words)


def test_no_data_is_run_as_code_and_no_sql_is_made_of_data():
    assert [line for name, file in sources() for line in violations(name, file)] == []


def test_what_is_allowed_is_there():
    """An exception that nobody needs any more is taken out of the list."""
    made = {(called, name) for name, file in sources() for called, _ in calls(file)}
    assert {(called, name) for called, names in ALLOWED.items() for name in names} <= made


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "subprocess.run(text, shell=True)",
        "sql.execute(f'SELECT {tensor} FROM cells')",
        "sql.execute('SELECT * FROM cells WHERE tensor = ' + name)",
        "sql.execute('SELECT {}'.format(name))",
        "sql.executescript(script + '')",
    ],
)
def test_the_check_sees_each_of_them(line, tmp_path):
    (tmp_path / "bad.py").write_text(line)
    assert list(violations("bad.py", tmp_path / "bad.py"))


class Network:
    """A socket that tells on whoever reaches for another machine."""

    def __init__(self):
        self.used = []

    def refuse(self, *args, **_):
        self.used.append(args[1:2])
        raise OSError("there is no network")


@pytest.fixture
def network(monkeypatch):
    found = Network()
    for name in ("connect", "connect_ex", "bind", "sendto"):
        # Local sockets, as between the processes of a pool, have a path for an address.
        real = getattr(socket.socket, name)

        def guarded(self, *args, real=real):
            return real(self, *args) if self.family == socket.AF_UNIX else found.refuse(self, *args)

        monkeypatch.setattr(socket.socket, name, guarded)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, found.refuse)
    return found


def test_no_command_uses_the_network(network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "run.zarr")
    commands = [
        "info run.zarr",
        "check run.zarr",
        "sweep run.zarr --methods qsgdinf,alq --bits 3",
        "report run.sweep.db -o page.html",
        "report run.sweep.db -o table.csv",
        "pack run.zarr -o run.h5",
        "sketch run.zarr -o small.zarr",
        "export run.zarr --to npz -o all",
        "import all -o again.zarr",
        "formats run.zarr --bits 5 -o formats.toml",
        "codecs alq",
        "train --task digits-mlp --codec qsgdinf --steps 1 --workers 2 -o log.jsonl",
    ]
    ended = {}
    for command in commands:
        with pytest.raises(SystemExit) as end:
            main(command.split())
        ended[command] = end.value.code
    assert network.used == []
    assert {command: code for command, code in ended.items() if code} == {}


def test_the_guard_sees_who_uses_the_network(network):
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("localhost", 9))
    with socket.socket() as tried, pytest.raises(OSError, match="no network"):
        tried.connect(("127.0.0.1", 9))
    assert len(network.used) == 2


def test_unfinished_files_follow_no_link_and_folders_for_the_time_being_are_private(tmp_path, monkeypatch):
    """The names of unfinished files can be guessed; a link put there by somebody else must not be written through."""
    victim = tmp_path / "thesis.txt"
    for k, write in enumerate(
        (
            lambda path: put(path, b"page"),
            lambda path: RunLogWriter(path, {}).close(),
            lambda path: checkpoint.save(path, {"step": 1}),
        )
    ):
        victim.write_text("years of work")
        path = tmp_path / f"out{k}"
        path.with_name(f".{path.name}.{os.getpid()}.new").symlink_to(victim)
        write(path)
        assert victim.read_text() == "years of work"
        assert not path.is_symlink()
        assert path.stat().st_size
    seen = []
    real = os.mkdir
    monkeypatch.setattr(
        os, "mkdir", lambda path, mode=0o777, **how: (seen.append((path, mode)), real(path, mode, **how))
    )
    gtrace.run_sweep(gtrace.trace.Trace.from_arrays({"w": [1.0, -2.0]}), ["qsgdinf:bits=3"])
    assert [stat.S_IMODE(mode) for path, mode in seen if "gtrace-" in str(path)] == [0o700]


def test_only_the_standard_library_s_and_known_packages_are_imported():
    """A new dependency is a decision, not an accident."""
    known = {
        *(
            "gtrace",
            "gtrace_experiments",
            "click",
            "google_crc32c",
            "h5py",
            "jinja2",
            "markupsafe",
            "matplotlib",
            "numba",
            "numcodecs",
            "numpy",
            "rich",
        ),
        *(
            "llvmlite",
            "triton",
            "scipy",
            "zarr",
            "torch",
            "distributed",
            "dask",
            "fsspec",
            "pyarrow",
            "pandas",
            "aiohttp",
            "torchvision",
            "xarray",
        ),
        "_typeshed",
    }
    found = set()
    for _, file in sources():
        for node in nodes(file):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    assert found - set(sys.stdlib_module_names) - known == set()
