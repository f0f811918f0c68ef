"""The samples that use gtrace from Python: each runs, small, and says what its page says."""

import re
import runpy
import sys
import tomllib

import pytest
from helpers_capture import SAMPLES
from helpers_installed import write_sample

import gtrace
from gtrace.codecs import plugins
from gtrace.testing import check_codec
from gtrace.torch_hooks.launcher import Program, run_program

FOLDER = SAMPLES / "my_codec"
PAGE = (SAMPLES.parent / "docs" / "own-codec.md").read_text()


def test_the_notebook_records_sweeps_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["notebook_style.py", "--steps", "12", "--folder", str(tmp_path)])
    runpy.run_path(str(SAMPLES / "notebook_style.py"))
    said = capsys.readouterr().out
    variances = re.findall(r"^(\w+) +loses ([\d.]+)% of gradient energy at 2\.00 measured bits", said, re.MULTILINE)
    # nuqsgd was not measured near 2 bits.
    assert {name for name, _ in variances} == {"qsgdinf", "alq"}
    assert [float(v) for _, v in variances] == sorted(float(v) for _, v in variances)
    assert (tmp_path / "digits.report.html").stat().st_size > 50_000


def test_two_ranks_train_through_the_hook(capfd):
    assert run_program(Program(str(SAMPLES / "ddp.py"), ("--steps", "6"))).exit_code == 0
    said = capfd.readouterr().out
    assert "2 ranks, qsgdinf:bits=4: loss" in said
    assert "after 6 steps" in said
    assert float(re.search(r"([\d.]+) times fewer bits", said)[1]) > 8


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning_trains_through_a_codec(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning_sample.py", "--steps", "6"])
    runpy.run_path(str(SAMPLES / "lightning_sample.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert float(re.search(r"6 steps with qsgdinf:bits=4: ([\d.]+) times fewer bits", said)[1]) > 8


@pytest.fixture
def dither(tmp_path, monkeypatch):
    """The sample as an installed package, which needs no network to fake."""
    monkeypatch.syspath_prepend(str(write_sample(tmp_path)))
    monkeypatch.setattr(plugins, "_INSTALLED", {})
    yield gtrace.codecs.codec_class("dither")
    sys.modules.pop("dither", None)


def test_the_codec_obeys_the_laws_and_has_at_most_sixty_lines_which_the_page_shows(dither):
    check_codec(dither)
    check_codec(dither(bits=2), spike=False)
    check_codec(dither(bits=8), spike=False)
    source = (FOLDER / "dither.py").read_text().rstrip("\n")
    assert source.count("\n") < 60
    shown, other = re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL)
    assert shown == source
    exec(compile(other, "own-codec.md", "exec"), {})
    project = (FOLDER / "pyproject.toml").read_text().rstrip("\n")
    assert f"```toml\n{project}\n```" in PAGE
    assert tomllib.loads(project)["project"]["entry-points"]["gtrace.codecs"] == {"dither": "dither:Dither"}
