"""Settings of every test."""

import os

from hypothesis import HealthCheck, settings

# Examples are the same on every run; a shared machine may be slow without anything being wrong.
settings.register_profile("gtrace", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gtrace")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
