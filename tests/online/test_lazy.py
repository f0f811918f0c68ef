import subprocess
import sys

import pytest

import gtrace.online
from gtrace.errors import UsageError


def test_every_public_name_is_there():
    for name in gtrace.online.__all__:
        assert getattr(gtrace.online, name).__name__ == name
    assert set(gtrace.online.__all__) <= set(dir(gtrace.online))
    with pytest.raises(AttributeError, match="no attribute 'compres'"):
        _ = gtrace.online.compres


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, gtrace.online, gtrace.online.tasks; gtrace.online.RefitSchedule\n"
        "print([m for m in ('torch', 'numpy', 'numba', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_missing_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for use in (
        lambda: gtrace.online.train,
        lambda: gtrace.online.compress,
        lambda: gtrace.online.load_task("digits-cnn"),
    ):
        with pytest.raises(UsageError, match=r"needs PyTorch.*pip install 'gtrace\[torch\]'"):
            use()
