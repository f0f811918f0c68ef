"""One figure of a report as a file of its own, for a paper or slides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.errors import UsageError
from gtrace.report.write import put, refuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.figure import Figure

    from gtrace.report.inputs import Report
    from gtrace.report.svg import FigureKind

_KINDS: dict[str, FigureKind] = {".pdf": "pdf", ".png": "png", ".svg": "svg"}


def write_figure(report: Report, name: str, output: Path, *, force: bool = False) -> Path:
    """Draw one figure into a file whose suffix says the format: .pdf, .png or .svg.

    Raises:
        UsageError: no such figure, another suffix, or no such folder.
        OutputExistsError: the file exists and ``force`` is off.
    """

    # matplotlib takes half a second to load; what is refused needs none of it.
    def drawn() -> Figure:
        from gtrace.report.gallery import draw

        return draw(report, name)

    return write_drawing(output, drawn, force=force)


def write_drawing(output: Path, draw: Callable[[], Figure], *, force: bool = False) -> Path:
    """Draw any figure into a file, see :func:`write_figure`; ``draw`` is called once nothing stands in the way.

    Raises:
        UsageError: another suffix, or no such folder.
        OutputExistsError: the file exists and ``force`` is off.
    """
    if output.suffix.lower() not in _KINDS:
        raise UsageError(f"{output}: a figure is written as {', '.join(_KINDS)}")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent} does not exist; create it or choose another -o")
    refuse([output], force=force)
    from gtrace.report.svg import render

    kind: FigureKind = _KINDS[output.suffix.lower()]
    put(output, render(draw(), kind))
    return output
