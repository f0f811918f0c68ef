"""What the README shows of the demo: the figure, and what each codec does to the demo's gradients at its defaults.

    python benchmarks/readme.py            runs gtrace demo, then writes the table of README.md and docs/figures/
    python benchmarks/readme.py --demo DIR takes the files of a demo that has been run

Codecs are at their default parameters; prefixes go around a codec that they suit. Numbers are sums over the demo's 28
steps, with equal weight, from one keyed encoding of each tensor.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import numpy as np

import gtrace
from gtrace.cli.advise import SWEEP, TRACE, run_demo
from gtrace.codecs import codec_class, codec_names, wrapper_names
from gtrace.report import draw, load_report
from gtrace.report.files import write_drawing

ROOT = Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs" / "figures" / "rate-distortion.svg"
HEAD = "| codec | method | source | bits | error |\n|---|---|---|--:|--:|\n"
TABLE = re.compile(rf"(?<={re.escape(HEAD)}).*?(?=\n\n)", re.DOTALL)
#: what a prefix is shown around
INSIDE = {"ef": "topk", "accumulate": "mcgq", "momentum": "signsgd", "ef21": "topk", "rotate": "qsgd", "dct": "topk"}


def specs() -> dict[str, str]:
    """Name as the table shows it -> spec."""
    return {name: name for name in codec_names()} | {f"{name}:": f"{name}:{INSIDE[name]}" for name in wrapper_names()}


def sources() -> dict[str, str]:
    """The column that a person wrote, from the present table."""
    rows = TABLE.search((ROOT / "README.md").read_text(encoding="utf-8"))[0].splitlines()
    return {row.split(" | ")[0].strip("|` "): row.split(" | ")[2] for row in rows}


def table(trace: Path) -> str:
    """The rows, in the order of the registry."""
    result = gtrace.run_sweep(trace, list(specs().values()), optimal=False)
    drawn = result["draw"] == 0
    lines, written = [], sources()
    for shown, spec in specs().items():
        mine = drawn & (result["codec"] == str(gtrace.codec(spec)))
        bits = np.sum(result["bits_total"][mine] * result["n"][mine]) / np.sum(result["n"][mine])
        error = np.sum(result["squared_error"][mine]) / np.sum(result["energy"][mine])
        summary = codec_class(shown.strip(":")).summary
        source = written.get(shown.strip(":"), written.get(shown, "-"))
        lines.append(f"| `{shown}` | {summary} | {source} | {bits:.3g} | {error:.3g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--demo", type=Path, help="folder of a demo that has been run")
    folder = parser.parse_args().demo
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            folder = Path(scratch) / "demo"
            run_demo(folder, force=False, say=print)
        FIGURE.parent.mkdir(exist_ok=True)
        report = load_report([folder / SWEEP])
        write_drawing(FIGURE, lambda: draw(report, "rate-distortion"), force=True)
        readme = ROOT / "README.md"
        rows = table(folder / TRACE)
        readme.write_text(TABLE.sub(lambda _: rows, readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
