"""A short run of ``benchmarks/killed_commands.py``."""

import importlib.util
import random
from pathlib import Path

from helpers_capture import Command


def test_a_command_that_is_killed_leaves_nothing_half_done(tmp_path):
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "killed_commands.py"
    spec = importlib.util.spec_from_file_location("killed_commands", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.kill(tmp_path, 1, random.Random(0), start=Command, outputs=["plan.toml"])
