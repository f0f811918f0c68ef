"""Settings of every test."""

import os
import signal
import threading

from hypothesis import HealthCheck, settings

# Examples are the same on every run; a shared machine may be slow without anything being wrong.
settings.register_profile("gtrace", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gtrace")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
# A shell's background jobs ignore SIGINT and hand that down; tests of Ctrl-C start children that must hear it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "capture_case(name, packages=()): a case of capture that is told in docs/capture-matrix.md, and which packages "
        "beside torch it was tried with",
    )
