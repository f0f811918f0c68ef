"""Writes ``sbom.cdx.json``: what gtrace is made of and tested with, as CycloneDX 1.6.

    python benchmarks/sbom.py

Versions are the pins of ``constraints.txt``. Packages that ``pip install gradtrace`` brings are ``required``; all
others are ``optional``: for extras, tests and documentation. Which package needs which is read from the environment
that runs the script, for Python 3.11 on Linux.
"""

import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "sbom.cdx.json"
#: where markers are evaluated
_PLACE = {"python_version": "3.11", "python_full_version": "3.11.7", "sys_platform": "linux", "extra": ""}


def made(root: Path = ROOT) -> dict:
    """The document."""
    pins = dict(line.split("==") for line in (root / "constraints.txt").read_text().split())
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = re.search(r'__version__ = "(.*)"', (root / "gtrace/__init__.py").read_text())[1]
    names = {canonicalize_name(name): (name, pin) for name, pin in pins.items()}
    direct = sorted(canonicalize_name(Requirement(text).name) for text in project["dependencies"])
    needs = {name: needed(name) for name in names}
    required, todo = set(), list(direct)
    while todo:
        if (name := todo.pop()) not in required:
            required.add(name)
            # A KeyError: a package without a pin.
            todo += needs[name]
    refs = {name: reference(*pair) for name, pair in names.items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(project["name"], version, "application", project["license"])},
        "components": [
            {**component(name, pin), "scope": "required" if key in required else "optional"}
            for key, (name, pin) in sorted(names.items())
        ],
        "dependencies": [
            {"ref": reference(project["name"], version), "dependsOn": [refs[name] for name in direct]},
            *(
                {
                    "ref": reference(*names[key]),
                    "dependsOn": [reference(*names[name]) for name in sorted(needs[key] & set(names))],
                }
                for key in sorted(required)
            ),
        ],
    }


def needed(name: str) -> set[str]:
    """What a package that is installed here needs, extras aside."""
    try:
        found = [Requirement(text) for text in requires(name) or ()]
    except PackageNotFoundError:
        return set()
    return {canonicalize_name(one.name) for one in found if one.marker is None or one.marker.evaluate(_PLACE)}


def component(name: str, version: str, kind: str = "library", terms: str = "") -> dict:
    """One package."""
    found = {"type": kind, "bom-ref": reference(name, version), "name": name, "version": version}
    return {**found, "purl": reference(name, version)} | ({"licenses": [{"license": {"id": terms}}]} if terms else {})


def reference(name: str, version: str) -> str:
    """A package's URL."""
    return f"pkg:pypi/{canonicalize_name(name)}@{version}"


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=1) + "\n")
    print(FILE)
