import importlib
import subprocess
import sys

import pytest

from gtrace.torch_hooks.children import after_import


@pytest.fixture
def module_name(tmp_path, monkeypatch):
    name = "a_module_to_wait_for"
    (tmp_path / f"{name}.py").write_text("done = False\nvalue = 1\ndone = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_runs_right_after_the_import_and_once(module_name):
    seen = []
    with after_import(module_name, lambda: seen.append(sys.modules[module_name].done)):
        assert seen == []
        importlib.import_module(module_name)
        assert seen == [True]
        importlib.import_module(module_name)
    assert seen == [True]
    # For a module that is there, at once.
    with after_import(module_name, lambda: seen.append("at once")):
        assert seen == [True, "at once"]


def test_nothing_stays_behind(module_name):
    before = list(sys.meta_path)
    with after_import(module_name, lambda: pytest.fail("nobody imports it in the block")):
        assert sys.meta_path != before
    assert sys.meta_path == before
    module = importlib.import_module(module_name)
    assert "exec_module" not in vars(module.__spec__.loader)


def test_the_module_keeps_its_loader_and_spec(module_name):
    plain = importlib.import_module(module_name).__spec__
    del sys.modules[module_name]
    with after_import(module_name, lambda: None):
        watched = importlib.import_module(module_name).__spec__
    assert type(watched.loader) is type(plain.loader)
    assert watched.loader.get_source(module_name) == plain.loader.get_source(module_name)
    assert watched.origin == plain.origin


def test_a_module_that_fails_to_import_can_be_tried_again(tmp_path, module_name):
    good = (tmp_path / f"{module_name}.py").read_text()
    (tmp_path / f"{module_name}.py").write_text("raise RuntimeError('not yet')\n")
    seen = []
    with after_import(module_name, lambda: seen.append(1)):
        with pytest.raises(RuntimeError, match="not yet"):
            importlib.import_module(module_name)
        assert seen == []
        # Another length, so that the bytecode of the failing text is not taken for it.
        (tmp_path / f"{module_name}.py").write_text(good + "# now it works\n")
        importlib.invalidate_caches()
        importlib.import_module(module_name)
    assert seen == [1]


def test_waiting_for_torch_does_not_import_it():
    code = (
        "import sys; from gtrace.torch_hooks import children, launcher\n"
        "with children.after_import('torch', lambda: print('here')): pass\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imported early'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
