"""What tests find beside the package: programs of the repository, and packages faked by a folder on the path."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "samples" / "my_codec"


def benchmark(name):
    """A program of the folder benchmarks as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_package(folder, name, entries, modules, version="0.1", group="gtrace.codecs"):
    """What installing a package with these entry points and modules leaves behind."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = "".join(f"{codec} = {target}\n" for codec, target in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    return folder


def write_sample(folder):
    """The sample codec, as if it were installed."""
    source = (SAMPLE / "dither.py").read_text()
    return write_package(folder, "gtrace-dither", {"dither": "dither:Dither"}, {"dither": source})
