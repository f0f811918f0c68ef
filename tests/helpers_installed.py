"""Packages that bring codecs or commands, faked by a folder on the path: a module and its dist-info."""

from __future__ import annotations

from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[1] / "samples" / "my_codec"


def write_package(
    folder: Path,
    name: str,
    entries: dict[str, str],
    modules: dict[str, str],
    version: str = "0.1",
    group="gtrace.codecs",
):
    """What installing a package with these entry points and modules leaves behind."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = "".join(f"{codec} = {target}\n" for codec, target in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    return folder


def write_sample(folder: Path) -> Path:
    """The sample codec, as if it were installed."""
    source = (SAMPLE / "dither.py").read_text()
    return write_package(folder, "gtrace-dither", {"dither": "dither:Dither"}, {"dither": source})
