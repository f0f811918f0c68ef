"""One figure of a report as a file of its own, for a paper or slides."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from gtrace.errors import UsageError, suggest
from gtrace.report.write import put, refuse

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from gtrace.report.gallery import Plate
    from gtrace.report.inputs import Report

KINDS = (".pdf", ".png", ".svg")


def figure_plates(report: Report) -> dict[str, Plate]:
    """The figures that a report has, by name; where inputs of one sort share a name, ``-2``, ``-3`` tell them apart."""
    from gtrace.report.gallery import law_plates, run_plates, sweep_plates

    plates = [plate for sweep in report.sweeps for plate in sweep_plates(sweep)]
    plates += [plate for run in report.runs for plate in run_plates(run)]
    plates += [plate for trace in report.traces for laws in trace.laws for plate in law_plates(laws)]
    named: dict[str, Plate] = {}
    for plate in plates:
        name, again = plate.name, 2
        while name in named:
            name, again = f"{plate.name}-{again}", again + 1
        named[name] = plate
    return named


def report_figure(report: Report, name: str) -> Figure:
    """One figure of a report.

    Args:
        report: made by ``make_report`` or ``load_report``.
        name: as :func:`figure_plates` lists them, such as ``rate-distortion``.

    Raises:
        UsageError: the report has no such figure.
    """
    plates = figure_plates(report)
    if name not in plates:
        if not plates:
            raise UsageError(f"--figure {name}: these results have nothing to draw")
        raise UsageError(f"--figure {name}: these results have no such figure; {suggest(name, plates)}")
    return plates[name].draw()


def write_figure(report: Report, name: str, output: Path, *, force: bool = False) -> Path:
    """Draw one figure into a file whose suffix says the format: .pdf, .png or .svg.

    Raises:
        UsageError: no such figure, another suffix, or no such folder.
        OutputExistsError: the file exists and ``force`` is off.
    """
    if output.suffix.lower() not in KINDS:
        raise UsageError(f"{output}: a figure is written as {', '.join(KINDS)}")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent} does not exist; create it or choose another -o")
    refuse([output], force=force)
    put(output, _bytes(report_figure(report, name), output.suffix.lower()))
    return output


def _bytes(figure: Figure, suffix: str) -> bytes:
    from gtrace.report.style import styled
    from gtrace.report.svg import render

    if suffix != ".pdf":
        return render(figure, "png" if suffix == ".png" else "svg")
    buffer = io.BytesIO()
    with styled():
        # No date and no version, so that equal figures are equal bytes.
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None, "Creator": "gtrace", "Producer": None})
    return buffer.getvalue()
