"""``docs/neural-gradients.md``: its commands run, print what it shows, and its numbers are theirs."""

import re
import tomllib
from contextlib import chdir

import pytest
from helpers_docs import ROOT, blocks, run_command

from gtrace.fitting.magnitudes import LAWS
from gtrace.report.analysis.traces import law_sections, mean_over_layers
from gtrace.trace import open_trace

BLOCKS = blocks("docs/neural-gradients.md")
_NUMBER = re.compile(r"-?\d+(\.\d+)?|[▁▂▃▄▅▆▇█]+")


def shape(line):
    """A line without what another machine's rounding may change: numbers, names of laws, spaces."""
    line = re.sub(r"\b(lognormal|loglaplace|half-normal|half-laplace|laplace|normal|cauchy|uniform)\b", "LAW", line)
    return " ".join(_NUMBER.sub("N", line).split())


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder in which every command of the page ran; what is shown below each, and what it printed."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "samples").symlink_to(ROOT / "samples")
    with chdir(folder):
        commands = [command for block in BLOCKS if block.language == "console" for command in block.commands]
        return folder, [(shown, run_command(words[1:])) for words, shown in commands]


def test_commands_print_what_the_page_shows(ran):
    _, found = ran
    assert len(found) == 6
    for shown, printed in found:
        there = {shape(line) for line in printed.splitlines()}
        for line in shown:
            if line and line != "..." and not line.startswith(("Nearest law", "The lognormal law's mean", "Mind:")):
                assert shape(line) in there, f"not printed: {line}"


def test_what_is_said_to_reproduce_does(ran):
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
