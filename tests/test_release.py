"""What a release holds beside code: types, manual page, citation; ``make release-check`` builds and installs one."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from helpers_installed import ROOT, benchmark

import gtrace

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_manual_page_is_that_of_the_commands():
    page = benchmark("manpage")
    assert page.FILE.read_text(encoding="utf-8") == page.made(), "run python benchmarks/manpage.py"
    codes = {value for name, value in vars(gtrace.errors).items() if name.startswith("EXIT_")}
    assert codes <= set(page.CODES)


def test_man_reads_the_page():
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("groff is not installed")
    done = subprocess.run([groff, "-man", "-ww", "-Tutf8", ROOT / "docs/gtrace.1"], capture_output=True, check=True)
    assert done.stderr == b""


def test_version_license_and_files():
    cited = dict(re.findall(r"^([\w-]+): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert (cited["version"], cited["license"]) == (gtrace.__version__, PROJECT["project"]["license"])
    targets, needed = PROJECT["tool"]["hatch"]["build"]["targets"], set(benchmark("release_check").IN_SDIST)
    assert needed - {"docs/gtrace.1", "pyproject.toml"} <= set(targets["sdist"]["include"])
    assert targets["wheel"]["shared-data"] == {"docs/gtrace.1": "share/man/man1/gtrace.1"}
    assert (ROOT / "gtrace" / "py.typed").is_file()


@pytest.mark.parametrize("names", [["gtrace/py.typed"], ["a.pyc"], ["tests/test_a.py"]])
def test_an_archive_that_lacks_or_holds_a_file_is_refused(names):
    check = benchmark("release_check")
    with pytest.raises(check.FailedError, match=r"lacks .*, holds"):
        check.check(Path("some.whl"), names, ("gtrace/py.typed", "LICENSE") if names[0].endswith("typed") else ())
