"""What a release holds beside code, and its wheel in an empty environment without torch: what needs no torch runs."""

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import numpy as np
import pytest
from helpers_installed import ROOT, benchmark, write_package

import gtrace
from gtrace import create_trace
from gtrace.cli.groups import GROUP, every_command

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_manual_page_is_that_of_the_commands():
    page = benchmark("manpage")
    assert page.FILE.read_text(encoding="utf-8") == page.made(), "run python benchmarks/manpage.py"
    codes = {value for name, value in vars(gtrace.errors).items() if name.startswith("EXIT_")}
    assert codes <= set(page.CODES)


def test_version_license_and_files():
    cited = dict(re.findall(r"^([\w-]+): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert (cited["version"], cited["license"]) == (gtrace.__version__, PROJECT["project"]["license"])
    targets, needed = PROJECT["tool"]["hatch"]["build"]["targets"], set(benchmark("release_check").IN_SDIST)
    assert needed - {"docs/gtrace.1", "pyproject.toml"} <= set(targets["sdist"]["include"])
    assert targets["wheel"]["shared-data"] == {"docs/gtrace.1": "share/man/man1/gtrace.1"}
    assert (ROOT / "gtrace" / "py.typed").is_file()


#: runs each list of words of stdin's JSON and prints how it ended, all in one process
RUNNER = """
import contextlib, io, json, sys
import gtrace
from gtrace.cli import main
ended = []
for words in json.load(sys.stdin):
    out, err, code = io.StringIO(), io.StringIO(), None
    sys.argv = ["gtrace", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    ended.append([code, out.getvalue(), err.getvalue()])
print(json.dumps([gtrace.__file__, ended]))
"""
#: what the environment must not have from this one
_ABSENT = ("torch", "functorch", "gtrace", "gradtrace", "__editable__", "_gtrace", "lightning", "transformers")
_TORCH = "needs PyTorch, which is not installed: pip install torch"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of an environment with the wheel, its dependencies, the experiments' folder, and no torch."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("install")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(wheel, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip())
    (made,) = folder.glob("*.whl")
    assert made.name.startswith("gradtrace-")
    install = ["install", "--no-deps", "--no-index", "--no-compile", "--target", str(site), str(made)]
    subprocess.run([*pip, *install], check=True)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(_ABSENT) and entry.suffix != ".pth" and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    (site / "gtrace_experiments").symlink_to(ROOT / "experiments" / "gtrace_experiments")
    write_package(site, "gtrace-experiments", {"reproduce": "gtrace_experiments:REPRODUCE"}, {}, group=GROUP)
    return python


def test_every_command_without_torch(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    # Kernels that are new to numba, as their folder is, would take half a minute to compile.
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    (tmp_path / "train.py").write_text("import torch\n")
    with create_trace(tmp_path / "run.zarr") as writer:
        for step in range(3):
            writer.append(step, "w", np.random.default_rng(step).standard_normal(64).astype(np.float32))
            writer.commit(step, loss=1.0)
    helps = ["", *(f"{name} --help" for name, _ in every_command() if name != "linear")]
    runs = [
        *("info run.zarr", "sweep run.zarr --methods qsgd,qsgdinf,nuqsgd --bits 2-3", "report run.sweep.db"),
        *("plan run.zarr --max-bits 3", "plan show run.plan.toml", "codecs", "codecs alq", "study tasks"),
        *("trace check run.zarr", "trace export run.zarr"),
    ]
    refused = {
        "capture train.py": f"gtrace: gtrace.capture {_TORCH}\n",
        "train --codec qsgd train.py": f"gtrace: training {_TORCH}\n",
        "train --codec qsgd": f"gtrace: training {_TORCH}\n",
        "study compare qsgd": f"gtrace: training {_TORCH}\n",
        "reproduce mqgrad-fig4": f"gtrace: training {_TORCH}\n",
    }
    lines = [*helps, *runs, *refused]
    asked = json.dumps([line.split() for line in lines])
    done = subprocess.run([installed, "-c", RUNNER], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    place, ended = json.loads(done.stdout)
    assert Path(place).is_relative_to(installed.parents[1])
    for line, (code, out, err) in zip(lines, ended, strict=True):
        if line in refused:
            assert (code, out, err) == (2, "", refused[line]), line
        else:
            assert (code, bool(out), "Traceback" in err) == (0, True, False), (line, out, err)


def test_packages_of_codecs_and_experiments_need_this_one_by_its_name_on_the_index():
    for place in ("samples/my_codec", "experiments"):
        needed = tomllib.loads((ROOT / place / "pyproject.toml").read_text())["project"]["dependencies"]
        assert [one.partition("[")[0] for one in needed] == [PROJECT["project"]["name"]]
