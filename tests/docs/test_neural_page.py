"""``docs/neural-gradients.md``: its commands run, print what it shows, and its numbers are theirs."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml

from gtrace.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "neural-gradients.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
_NUMBER = re.compile(r"-?\d+(\.\d+)?|[▁▂▃▄▅▆▇█]+")


def shape(line):
    """A line without what another machine's rounding may change: numbers, names of laws, spaces."""
    line = re.sub(r"\b(lognormal|loglaplace|half-normal|half-laplace|laplace|normal|cauchy|uniform)\b", "LAW", line)
    return " ".join(_NUMBER.sub("N", line).split())


def output_of(arguments, folder):
    """What ``gtrace`` prints; only a capture, which patches torch, needs a process of its own."""
    if arguments[0] == "capture":
        command = [sys.executable, "-m", "gtrace", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        code, printed = done.returncode, done.stdout + done.stderr
    else:
        both = io.StringIO()
        with chdir(folder), redirect_stdout(both), redirect_stderr(both), pytest.raises(SystemExit) as ended:
            main(arguments)
        code, printed = ended.value.code, both.getvalue()
    assert code == 0, f"{arguments}\n{printed}"
    return printed


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Every command of the page in a folder of its own: command -> what it printed."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "samples").symlink_to(ROOT / "samples")
    found = {}
    for block in BLOCKS:
        for line in block.splitlines():
            if line.startswith("$ gtrace "):
                arguments = shlex.split(line.removeprefix("$ gtrace "))
                found[line] = output_of(arguments, folder)
    return folder, found


def test_commands_print_what_the_page_shows(ran):
    _, found = ran
    assert len(found) == 6
    for block in BLOCKS:
        command, printed = "", set()
        for line in block.splitlines():
            if line.startswith("$ "):
                command, printed = line, {shape(out) for out in found[line].splitlines()}
            elif line and line != "..." and not line.startswith(("Nearest law", "The lognormal law's mean", "Mind:")):
                assert shape(line) in printed, f"{command} does not print: {line}"


def test_the_recipe_has_what_the_page_shows(ran):
    (shown,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    layers = yaml.safe_load((ran[0] / "recipe.yaml").read_text())["layers"]
    (layer,) = [layer for layer in layers if layer["tensor"] == shown["tensor"]]
    assert set(shown) <= set(layer)
    assert set(shown["formats"][6]) <= set(layer["formats"][6])
    assert layer["formats"][6]["format"] == shown["formats"][6]["format"]


def test_what_is_said_to_reproduce_does(ran):
    from gtrace.fitting.magnitudes import LAWS
    from gtrace.report.analysis.traces import law_sections
    from gtrace.report.analysis.traces import mean_over_layers
    from gtrace.trace import open_trace

    with open_trace(ran[0] / "cnn.zarr") as trace:
        (section,) = law_sections(trace)
    steps, means = mean_over_layers(section)
    lognormal, normal, half = (LAWS.index(name) for name in ("lognormal", "normal", "half-normal"))
    assert (means[steps >= 100, normal] > 5 * means[steps >= 100, lognormal]).all()
    first = {layer.info.name: layer.fits[0] for layer in section.layers}
    for name in ("conv1", "conv2"):
        assert first[name].best == "half-normal"
        assert first[name].ks["half-normal"] < 0.03
    assert means[0, half] < means[-1, half]
    off = {rule: section.deviations(rule).mean() for rule in ("exact", "lognormal", "normal", "topk")}
    assert off["exact"] < 0.003
    assert section.deviations("exact").max() < 0.003
    assert off["lognormal"] < 0.03 < off["topk"]
    assert off["lognormal"] < 0.03 < off["normal"]
    for found in section.cosines:
        assert (found.heterogeneous >= found.homogeneous - 1e-9).all()
