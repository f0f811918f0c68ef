"""Settings of every test."""

import gc
import os
import signal
import sys
import threading

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Examples are the same on every run; a shared machine may be slow without anything being wrong.
settings.register_profile("gtrace", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gtrace")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
# A shell's background jobs ignore SIGINT and hand that down; tests of Ctrl-C start children that must hear it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    for marker, page in (("capture_case", "capture-matrix"), ("framework_case", "frameworks")):
        said = f"a case of docs/{page}.md, and which packages beside torch it was tried with"
        config.addinivalue_line("markers", f"{marker}(name, packages=()): {said}")


#: Their tests compile most kernels; one process does it while others run what needs few of them.
COMPILING = ("kernels", "coding", "fitting", "codecs")
#: What takes long and needs few kernels comes next, so that no long file is left to the end.
FIRST = (
    *(*COMPILING, "capture", "torch_hooks", "frameworks", "trace", "docs", "training", "cli", "sweep"),
    *("test_extreme_numbers.py", "experiments", "samples"),
)


def folder(nodeid):
    """The folder in ``tests``; a file's own name if it is in none."""
    return nodeid.removeprefix("tests/").partition("/")[0]


def pytest_collection_modifyitems(items):
    order = {name: rank for rank, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(folder(item.nodeid), len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What collection makes stays to the end: looking through it at every collection of garbage takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class ByFile(LoadScopeScheduling):
    """Hands out whole files, because fixtures of a module are made once, and as one what shares more.

    These are the folders that compile, and the experiments, whose longest runs are kept in memory.
    """

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        if file.rpartition("/")[0] == "tests/experiments":
            return "experiments"
        return "compiling" if folder(nodeid) in COMPILING else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(autouse=True)
def nothing_is_left_to_other_tests():
    """No capture or training goes on, whose children theirs would be; no hook of exceptions of torch stays."""
    hook = sys.excepthook
    yield
    sys.excepthook = hook
    for module, name in (("gtrace.capture.session", "_active"), ("gtrace.training.unmodified", "_settings")):
        assert not getattr(sys.modules.get(module), name, None)
