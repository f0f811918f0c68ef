"""How Python processes that a program launches come to be watched. A module of a few lines stands for torch."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from helpers_capture import write_script

import gtrace
from gtrace.torch_hooks import children
from gtrace.torch_hooks.children import children_call, watch, watch_no_more

TOLD = {"path": "a b", "options": {"every": 3, "names": ["ä"]}}
SHOW = "import json, sys; print(json.dumps([sys.path, [m for m in sys.modules if m.startswith('gtrace')]]));"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_script(tmp_path / "lib" / "torch.py", "print('torch')")
    write_script(
        tmp_path / "lib" / "probe.py", "def start(told):\n    print('start', sorted(told.items()))\nimport sys"
    )
    here = os.path.dirname(os.path.dirname(gtrace.__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((here, str(tmp_path / "lib"))))
    monkeypatch.delenv("GTRACE_CAPTURE", raising=False)
    return tmp_path


def launched(folder, code, **more):
    """Lines that a child prints on stdout and stderr; it imports nothing of the tests' own."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **more}, capture_output=True, text=True, check=False
    )
    return result.stdout.splitlines(), result.stderr


def test_a_child_is_watched_from_its_import_of_torch_on(folder):
    plain = json.loads(launched(folder, SHOW)[0][0])
    with children_call("probe", TOLD):
        (first, *rest), errors = launched(folder, SHOW + "import torch; print('end')")
    paths, modules = json.loads(first)
    assert (rest, errors) == (["torch", f"start {sorted(TOLD.items())}", "end"], "")
    # In the same order: another order may find other packages.
    assert paths == plain[0]
    assert set(modules) <= {"gtrace", "gtrace.errors", "gtrace.torch_hooks", "gtrace.torch_hooks.children"}
    assert launched(folder, "import torch") == (["torch"], "")


def test_a_child_of_a_child_is_watched_too(folder):
    code = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {'import torch'!r}]))"
    with children_call("probe", TOLD):
        ((line,), errors) = launched(folder, code)
    assert "start" in line
    assert errors == ""


@pytest.mark.parametrize("change", [{"python": ["/elsewhere", 3, 11]}, {"python": [sys.prefix, 3, 1]}, None])
def test_another_python_and_another_environment_are_left_alone(change, folder):
    with children_call("probe", TOLD):
        told = "{}" if change is None else json.dumps(json.loads(os.environ["GTRACE_CAPTURE"]) | change)
        (first, *rest), errors = launched(folder, SHOW + "import torch", GTRACE_CAPTURE=told)
    assert json.loads(first)[1] == []
    assert (rest, errors) == (["torch"], "")


def test_without_the_variable(folder):
    with children_call("probe", TOLD):
        lines, errors = launched(folder, "import os; print('GTRACE_CAPTURE' in os.environ)")
        assert (lines, errors) == (["True"], "")
        monkey = "import sitecustomize; print(sitecustomize.__file__)"
        assert launched(folder, monkey)[0][0].endswith(os.path.join("injected", "sitecustomize.py"))
        environment = {name: value for name, value in os.environ.items() if name != "GTRACE_CAPTURE"}
        command = [sys.executable, "-c", "import torch"]
        assert subprocess.check_output(command, env=environment, text=True) == "torch\n"


def test_the_users_own_sitecustomize(folder):
    place = folder / "lib" / "sitecustomize.py"
    show = "import sitecustomize; print(sitecustomize.__file__, sitecustomize.OWN);"
    place.write_text("OWN = 7\nprint('own')\n")
    with children_call("probe", TOLD):
        assert launched(folder, show + "import torch")[0] == [
            "own",
            f"{place} 7",
            "torch",
            f"start {sorted(TOLD.items())}",
        ]
        place.write_text("import not_there_at_all\n")
        lines, errors = launched(folder, "import torch")
        # Python says it and goes on, as it does without us.
        assert "No module named 'not_there_at_all'" in errors
        assert lines == ["torch", f"start {sorted(TOLD.items())}"]
        place.write_text("1 / 0\n")
        lines, errors = launched(folder, "import torch")
        assert "ZeroDivisionError" in errors
        assert lines == ["torch", f"start {sorted(TOLD.items())}"]


def test_the_environment_is_put_back(monkeypatch):
    names = ("PYTHONPATH", "GTRACE_CAPTURE")
    for before in (None, "own", f"own{os.pathsep}other"):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if before is not None:
            monkeypatch.setenv("PYTHONPATH", before)
        state = [os.environ.get(name) for name in names]
        inside = []
        with contextlib.suppress(KeyError), children_call("probe", TOLD):
            inside = os.environ["PYTHONPATH"].split(os.pathsep)
            raise KeyError
        assert os.path.isfile(os.path.join(inside[0], "sitecustomize.py"))
        assert os.pathsep.join(inside[1:]) == (before or "")
        assert [os.environ.get(name) for name in names] == state
    # What the program itself puts there stays.
    with children_call("probe", TOLD):
        monkeypatch.setenv("PYTHONPATH", "the program's")
    assert os.environ["PYTHONPATH"] == "the program's"
    assert "GTRACE_CAPTURE" not in os.environ


def test_a_process_that_looks_after_itself_is_left_alone(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder / "lib"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = sys.meta_path[:]
    watch({"module": "probe", "argument": {}})
    assert sys.meta_path != before
    watch_no_more()
    assert sys.meta_path == before
    assert children._call_off == []
    watch_no_more()
