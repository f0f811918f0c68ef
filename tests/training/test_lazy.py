import subprocess
import sys

import pytest

import gtrace.training
from gtrace.errors import UsageError


def test_every_public_name_is_there():
    for name in gtrace.training.__all__:
        assert getattr(gtrace.training, name).__name__ == ("RankExchange" if name == "State" else name)
    assert set(gtrace.training.__all__) <= set(dir(gtrace.training))
    with pytest.raises(AttributeError, match="no attribute 'compres'"):
        _ = gtrace.training.compres


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, gtrace.training, gtrace.training.tasks; gtrace.training.RefitSchedule\n"
        "print([m for m in ('torch', 'numpy', 'numba', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_missing_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for use in (
        lambda: gtrace.training.train,
        lambda: gtrace.training.compress,
        lambda: gtrace.training.load_task("digits-cnn"),
    ):
        with pytest.raises(UsageError, match=r"needs PyTorch.*pip install torch"):
            use()
