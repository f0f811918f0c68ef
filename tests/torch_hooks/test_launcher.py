"""The launcher against Python itself: what a program sees, and how it ends."""

import json
import os
import subprocess
import sys
import textwrap
import zipfile

import pytest
from helpers_capture import run_python, write_script

from gtrace.errors import UsageError
from gtrace.torch_hooks.launcher import Program, run_program

PROBE = """
    import json, pickle, sys

    class Thing:
        pass

    thing = pickle.loads(pickle.dumps(Thing()))
    facts = {
        "argv": sys.argv,
        "path": sys.path[0],
        "name": __name__,
        "file": globals().get("__file__"),
        "package": __package__,
        "spec": getattr(__spec__, "name", None),
        "loader": type(__loader__).__name__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "pickled": type(thing) is Thing,
    }
    print(json.dumps(facts))
    """

LAUNCH = """
    import sys
    from gtrace.torch_hooks.launcher import Program, run_program

    is_module, is_code = sys.argv[1] == "-m", sys.argv[1] == "-c"
    target, *args = sys.argv[1 + is_module + is_code:]
    outcome = run_program(Program(target, tuple(args), is_module, is_code))
    sys.exit(outcome.exit_code)
    """

#: workers that are spawned find the script
SPAWNS = """
    import multiprocessing

    def double(x):
        return 2 * x

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(double, [1, 2, 3]))
    """


@pytest.fixture
def launch(tmp_path):
    """Run a program by Python and by the launcher; the launcher's own file lies in another folder."""
    launcher = write_script(tmp_path / "bin" / "launch.py", LAUNCH)

    def both(*args):
        return run_python(*args, cwd=tmp_path), run_python(launcher, *args, cwd=tmp_path)

    return both


def same(plain, launched):
    assert (launched.stdout, launched.stderr) == (plain.stdout, plain.stderr)
    assert launched.returncode == plain.returncode
    return launched


CODE = "import sys\ndef f(): print(sys.argv, sys.path[0], __name__, __spec__, sys.modules['__main__'].f is f)\nf()"


@pytest.mark.parametrize(
    "args",
    [
        ("probe.py", "--epochs", "3", "--", "-x"),
        ("./sub/probe.py",),
        ("link.py",),
        ("-m", "pkg.train", "--lr", "1"),
        ("app",),
        ("app.zip", "one"),
        ("spawns.py",),
        ("-c", CODE, "a", "-b"),
    ],
)
def test_a_program_sees_what_it_sees_under_python(tmp_path, launch, args):
    write_script(tmp_path / "probe.py", PROBE)
    write_script(tmp_path / "sub" / "probe.py", PROBE)
    (tmp_path / "link.py").symlink_to(tmp_path / "sub" / "probe.py")
    write_script(tmp_path / "pkg" / "__init__.py", "")
    write_script(tmp_path / "pkg" / "other.py", "VALUE = 7\n")
    write_script(tmp_path / "pkg" / "train.py", "from .other import VALUE\n" + textwrap.dedent(PROBE))
    write_script(tmp_path / "app" / "__main__.py", "import sys, helper\nprint(sys.path[:2], __package__, helper)\n")
    write_script(tmp_path / "app" / "helper.py", "")
    write_script(tmp_path / "spawns.py", SPAWNS)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import sys\nprint(sys.argv[1:], sys.path[:2])\n")
    result = same(*launch(*args))
    assert (result.returncode, bool(result.stdout)) == (0, True)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(-1)", 255),
        ("import sys; sys.exit(256)", 0),
        ("import sys; sys.exit('no data')", 1),
        ("def f(): raise ValueError('bad')\nf()", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x') from None", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x')", 1),
        ("def f(): raise OSError\ntry:\n    f()\nexcept OSError as e:\n    raise ExceptionGroup('g', [e])", 1),
        ("x = = 1", 1),
        ("import broken", 1),
        ("import sys\nsys.excepthook = lambda *a: print('own hook', a[0].__name__)\n1 / 0", 1),
    ],
)
def test_ends_and_tracebacks_are_those_of_python(tmp_path, launch, body, code):
    write_script(tmp_path / "broken.py", "def f(:\n")
    write_script(tmp_path / "script.py", body)
    assert same(*launch("script.py")).returncode == code


#: How installers begin the file of a command; the second is for paths that are too long for a first line.
BEGINNINGS = {
    "a path": "#!{python}\n",
    "a long path": "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n",
    "a name": "#!/usr/bin/env python\n",
}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Install a command ``tune`` whose file begins so."""
    monkeypatch.chdir(tmp_path)
    folder = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{folder}:{os.environ['PATH']}")

    def install(beginning):
        path = write_script(tmp_path / "bin" / "tune", beginning + textwrap.dedent(PROBE))
        path.chmod(0o755)
        return path

    return install


@pytest.mark.capture_case("installed console commands")
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_an_installed_command_sees_what_it_sees_in_a_shell(beginning, tmp_path, command, launch):
    (tmp_path / "tune").mkdir()  # a folder of that name, e.g. its source, is no script
    path = command(BEGINNINGS[beginning].format(python=sys.executable))
    shell = subprocess.run(["tune", "sft", "--fast"], capture_output=True, text=True, check=True)
    assert json.loads(shell.stdout)["argv"] == [str(path), "sft", "--fast"]
    assert launch("tune", "sft", "--fast")[1].stdout == shell.stdout
    write_script(tmp_path / "tune" / "__main__.py", "print('of the folder')")
    assert launch("tune")[1].stdout == "of the folder\n"


@pytest.mark.parametrize(
    ("beginning", "message"),
    [
        ("#!/opt/other/bin/python3\n", "runs with /opt/other/bin/python3, and gtrace with "),
        ("#!/bin/bash\n", "is not a Python script; write the script or -m MODULE that it starts"),
        ("#!/usr/bin/env -S nothing-like-that\n", "is not a Python script"),
        ("\x7fELF", "is not a Python script"),
    ],
)
def test_a_command_of_something_else_is_one_line(beginning, message, command):
    path = command(beginning)
    with pytest.raises(UsageError) as caught:
        Program("tune").check()
    assert str(caught.value).startswith(f"tune: {path} {message}")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (Program("nowhere.py"), "nowhere.py: no such script"),
        (Program("train"), "train: no such script; did you mean train.py?"),
        (Program("pkg.train"), "pkg.train: no such script; for a module write -m pkg.train"),
        (Program("pkg.nowhere", is_module=True), "-m pkg.nowhere: No module named pkg.nowhere"),
        (Program("python3", ("train.py",)), "python3: leave python3 out; write the script, -m MODULE or -c CODE"),
    ],
)
def test_what_cannot_be_run_is_the_users_mistake(tmp_path, monkeypatch, program, message):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "pkg/__init__.py", "pkg/train.py"):
        write_script(tmp_path / name, "")
    with pytest.raises(UsageError) as caught:
        run_program(program)
    assert str(caught.value) == message
    for name in [name for name in sys.modules if name.partition(".")[0] == "pkg"]:
        del sys.modules[name]
