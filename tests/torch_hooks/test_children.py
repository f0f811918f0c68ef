"""Code that runs as soon as a module is imported: here, and in Python processes that a program launches."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from helpers_capture import write_script

import gtrace
from gtrace.torch_hooks.children import after_import, children_call

TOLD = {"path": "a b", "options": {"every": 3, "names": ["ä"]}}
START = f"start {sorted(TOLD.items())}"
SHOW = "import json, sys; print(json.dumps([sys.path, [m for m in sys.modules if m.startswith('gtrace')]]));"


def test_it_runs_right_after_the_import_and_once(tmp_path, monkeypatch):
    name, seen, before = "a_module_to_wait_for", [], list(sys.meta_path)
    write_script(tmp_path / f"{name}.py", "done = False\nvalue = 1\ndone = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with after_import(name, lambda: pytest.fail("nobody imports it in the block")):
        assert sys.meta_path != before
    assert sys.meta_path == before
    with after_import(name, lambda: seen.append(sys.modules[name].done)):
        assert seen == []
        for _ in range(2):
            loader = importlib.import_module(name).__spec__.loader
            assert seen == [True]
    # For a module that is there, at once.
    with after_import(name, lambda: seen.append("at once")):
        assert seen == [True, "at once"]
    assert "exec_module" not in vars(loader)
    del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A module of a few lines is torch there."""
    write_script(tmp_path / "lib" / "torch.py", "print('torch')")
    write_script(tmp_path / "lib" / "probe.py", "def start(told):\n    print('start', sorted(told.items()))")
    here = os.path.dirname(os.path.dirname(gtrace.__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((here, str(tmp_path / "lib"))))
    monkeypatch.delenv("GTRACE_CAPTURE", raising=False)
    return tmp_path


def launched(folder, code, **more):
    """Lines that a child prints on stdout and stderr; it imports nothing of the tests' own."""
    command, env = [sys.executable, "-c", code], {**os.environ, **more}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return result.stdout.splitlines(), result.stderr


def test_a_child_is_watched_from_its_import_of_torch_on(folder):
    plain = json.loads(launched(folder, SHOW)[0][0])
    grandchild = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {'import torch'!r}]))"
    with children_call("probe", TOLD):
        (first, *rest), errors = launched(folder, SHOW + "import torch; print('end')")
        (line,), no_errors = launched(folder, grandchild)
    paths, modules = json.loads(first)
    assert (rest, errors, no_errors) == (["torch", START, "end"], "", "")
    # In the same order: another order may find other packages.
    assert paths == plain[0]
    assert set(modules) <= {"gtrace", "gtrace.errors", "gtrace.torch_hooks", "gtrace.torch_hooks.children"}
    assert launched(folder, "import torch") == (["torch"], "")
    assert "start" in line


@pytest.mark.parametrize("change", [{"python": ["/elsewhere", 3, 11]}, {"python": [sys.prefix, 3, 1]}, None])
def test_another_python_and_another_environment_are_left_alone(change, folder):
    with children_call("probe", TOLD):
        told = "{}" if change is None else json.dumps(json.loads(os.environ["GTRACE_CAPTURE"]) | change)
        (first, *rest), errors = launched(folder, SHOW + "import torch", GTRACE_CAPTURE=told)
        without = {name: value for name, value in os.environ.items() if name != "GTRACE_CAPTURE"}
        command = [sys.executable, "-c", "import torch"]
        assert change or subprocess.check_output(command, env=without, text=True) == "torch\n"
    assert json.loads(first)[1] == []
    assert (rest, errors) == (["torch"], "")


def test_the_users_own_sitecustomize(folder):
    place = folder / "lib" / "sitecustomize.py"
    show = "import sitecustomize; print(sitecustomize.__file__, getattr(sitecustomize, 'OWN', None));"
    with children_call("probe", TOLD):
        assert launched(folder, show)[0][0].endswith(os.path.join("injected", "sitecustomize.py None"))
        place.write_text("OWN = 7\nprint('own')\n")
        assert launched(folder, show + "import torch")[0] == ["own", f"{place} 7", "torch", START]
        # Python says it and goes on, as it does without us.
        for code, error in (("import not_there_at_all", "No module named 'not_there_at_all'"), ("1 / 0", "ZeroDiv")):
            place.write_text(code)
            lines, errors = launched(folder, "import torch")
            assert error in errors
            assert lines == ["torch", START]
