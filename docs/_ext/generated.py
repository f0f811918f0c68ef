"""Parts of pages that are written from the program when the site is built, and formulas without a script.

A line ``<!-- generated: NAME -->`` or ``<!-- generated: NAME ARGUMENT ... -->`` in a page becomes what the function of
that name in ``PARTS`` returns, as Markdown. Nothing of it is kept in the repository, so nothing can go stale.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pkgutil
import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

from gtrace.cli import gtrace
from gtrace.cli.groups import every_command
from gtrace.codecs import Codec, codec, codec_class, codec_names, parameter_fields, wrapper_names
from gtrace.report.names import number
from gtrace.sweep.schema import COLUMNS
from gtrace_experiments.reproduce.page import PAPERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- generated: ([\w-]+)(.*?) -->$", re.MULTILINE)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars and angle brackets in cells are made harmless."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def prose(text: str) -> str:
    """Words of the program as Markdown that shows them as they are."""
    return re.sub(r"([\\<>*_`\[\]$~#])", r"\\\1", " ".join(text.split()))


def commands() -> str:
    """Every command: what it does, its example, usage and options, as click tells them."""
    parts = []
    parent = click.Context(gtrace, info_name="gtrace")
    for name, command in every_command():
        with command.make_context(name, [], parent=parent, resilient_parsing=True) as context:
            parts.append(f"## gtrace {name}\n\n{described(command.help or '')}\n")
            usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
            parts.append(f"```text\n{usage}\n```\n")
            records = [record for p in command.params if (record := p.get_help_record(context))]
            if not isinstance(command, click.Group):
                parts.append(table(("option", "meaning"), [(f"`{option}`", prose(help_)) for option, help_ in records]))
            if command.epilog:
                # An example in one line becomes one of its own.
                parts.append(described(re.sub(r"^(Examples?:) ", "\b\n\\1\n", command.epilog)))
    return "\n".join(parts)


def described(text: str) -> str:
    """A command's help; paragraphs that click is told not to wrap are code."""
    shown = []
    for paragraph in re.split(r"\n\s*\n", text):
        head, marked, code = paragraph.rpartition("\b\n")
        if not marked:
            shown.append(prose(paragraph))
            continue
        first, _, rest = textwrap.dedent(code).partition("\n")
        shown.append(prose(f"{head} {first}"))
        shown.append(f"```text\n{textwrap.dedent(rest).rstrip()}\n```")
    return "\n\n".join(shown) + "\n"


def codecs() -> str:
    """Every codec: formula, paper, what was corrected, parameters."""
    return "\n".join(_codec(name) for name in (*codec_names(), *wrapper_names()))


def _codec(name: str) -> str:
    cls = codec_class(name)
    kind = ", ".join(
        (
            "unbiased" if cls.unbiased else "biased",
            "keeps memory between steps" if cls.stateful else "no memory between steps",
            "error and bits in closed form"
            if name in codec_names() and codec(name).expects
            else "measured by encoding",
        )
    )
    shown = name + (":" if name in wrapper_names() else "")
    parts = [f"## `{shown}`\n\n{prose(cls.summary[:1].upper() + cls.summary[1:])}.\n\n```text\n{cls.formula}\n```\n"]
    if cls.paper != "-":
        parts.append(f"Paper: {prose(cls.paper)}.\n")
    parts.append(f"Kind: {kind}.\n")
    if name in codec_names():
        chosen = (
            (field.name, type(getattr(cls.parts, field.name)).__name__) for field in dataclasses.fields(cls.parts)
        )
        # A part that is just called Scale or Coder does nothing.
        named = [f"{part} `{kind}`" for part, kind in chosen if kind != part.capitalize()]
        parts.append(f"Parts: {', '.join(named)}.\n" if named else "")
    if cls.sends:
        parts.append(f"Payload: {prose(cls.sends)}\n")
    if cls.corrections:
        parts.append("Where it differs from the paper:\n\n" + "".join(f"- {prose(line)}\n" for line in cls.corrections))
    if fields := parameter_fields(cls):
        rows = [(f"`{f.name}`", f"`{_shown(f.default)}`", _allowed(f), prose(f.metadata["help"])) for f in fields]
        parts.append(table(("parameter", "default", "allowed", "meaning"), rows))
    return "\n".join(parts)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _allowed(item: Any) -> str:
    if item.metadata["choices"]:
        return ", ".join(item.metadata["choices"])
    if isinstance(item.default, bool):
        return "true, false"
    low, high = item.metadata["minimum"], item.metadata["maximum"]
    if low is None and high is None:
        return "any"
    if high is None:
        return f"{low:g} or more"
    return f"{high:g} or less" if low is None else f"{low:g} to {high:g}"


def corrections(*names: str) -> str:
    """What each of these codecs does otherwise than its paper; what holds for several is said once."""
    said: dict[str, list[str]] = {}
    for name in names:
        for line in codec_class(name).corrections:
            said.setdefault(line, []).append(f"`{name}`")
    return "".join(f"- {', '.join(of)}: {prose(line)}\n" for line, of in said.items())


def columns() -> str:
    """The columns of a result file's rows."""
    return table(("column", "type", "meaning"), [(f"`{n}`", kind, prose(text)) for n, (kind, text) in COLUMNS.items()])


def verdicts(*prefixes: str) -> str:
    """The experiments of a paper with their verdicts, from the stored results."""
    rows = []
    for path in sorted((DOCS / "reproduction").glob("*.json")):
        if not path.name.startswith(prefixes):
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        checks = found["outcome"]["checks"]
        held = [prose(check["claim"]) for check in checks if check["holds"]]
        failed = [prose(check["claim"]) for check in checks if not check["holds"]]
        name = path.stem
        page = PAPERS[name.partition("-")[0]][0]
        rows.append(
            (f"[{name}](../reproduction/{page}.md#{name})", found["verdict"], "; ".join(held), "; ".join(failed))
        )
    return table(("experiment", "verdict", "what showed", "what did not"), rows)


def public(module: str) -> str:
    """Every public name of a module, from its docstrings; what ``gtrace`` itself offers stands there alone."""
    found = importlib.import_module(module)
    shown: list[str] = []
    made: list[tuple[str, str]] = []
    for name in found.__all__:
        if module != "gtrace" and name in sys.modules["gtrace"].__all__:
            continue
        value = getattr(found, name)
        if isinstance(value, type) and issubclass(value, Codec) and value.name:
            made.append((f"`{name}`", f"[`{value.name}`](../codecs.md#{value.name})"))
        elif isinstance(value, type):
            shown.append(f".. autoclass:: {module}.{name}\n   :members:\n")
        elif callable(value):
            shown.append(f".. autofunction:: {module}.{name}\n")
    listed = table(("class", "codec"), made) if made else ""
    return "```{eval-rst}\n" + "\n".join(shown) + "```\n\n" + listed


def interruptions() -> str:
    """Commands that were interrupted, from the stored counts."""
    return _benchmark("benchmarks/interruptions.py", "interruptions.json")


def fuzzing() -> str:
    """Every fuzzing target, from the stored runs."""
    return _benchmark("tests/fuzz/run.py", "fuzz.json")


def _benchmark(script: str, stored: str) -> str:
    """The table that a script makes of its stored results."""
    root = DOCS.parent
    made: str = runpy.run_path(str(root / script))["table"](
        json.loads((root / "benchmarks/results" / stored).read_text(encoding="utf-8"))
    )
    return made


def equal_bits(part: str) -> str:
    """A table of benchmarks/results/reference-table.json: ``leaders``, ``families``, ``rotation`` or ``levels``."""
    found = json.loads((DOCS.parent / "benchmarks" / "results" / "reference-table.json").read_text())
    bits = [f"{target:g} bit{'s' * (target != 1)}" for target in found["targets"]]
    coders = {"fixed": "fixed width", "huffman": "Huffman", "entropy": "entropy"}
    if part == "families":
        return "\n".join(_families(one, coders, bits) for one in found["traces"].values())
    rows = []
    for name, one in found["traces"].items():
        if part == "leaders":
            for coder, said in coders.items():
                places = range(len(bits))
                rows.append((f"`{name}`", said, *(_leader(one["errors"][coder], one["biased"], k) for k in places)))
        elif part == "rotation":
            for row in one["rotation"]:
                if row["plain"] is None or row["plain"] > 1:
                    continue
                gain = f"{row['rotate']} of {row['tensors']}"
                errors = (_share(row[key]) for key in ("plain", "rotated", "mixed"))
                rows.append((f"`{name}`", f"{row['bits']:g}", gain, f"{row['energy']:.0%}", *errors))
        else:
            for row in one["entropy"]:
                if row["ecq"] is not None:
                    errors = (_share(row[key]) for key in ("qsgdinf", "ecq", "bound"))
                    rows.append((f"`{name}`", f"{row['bits']:g}", *errors, f"{row['ecq'] / row['qsgdinf'] - 1:+.1%}"))
    heads = {
        "leaders": ("trace", "coder", *bits),
        "rotation": ("trace", "bits", "tensors that gain", "their energy", "not rotated", "rotated", "where it pays"),
        "levels": ("trace", "bits", "`qsgdinf`", "`ecq`", "bound", "`ecq` over `qsgdinf`"),
    }
    return table(heads[part], rows)


def _leader(errors: dict[str, list[float | None]], biased: Sequence[str], place: int) -> str:
    """The codec without bias that has the least error, and the one with a bias if that has less."""
    # An error above 1 is more than sending nothing loses.
    known = sorted((row[place], label) for label, row in errors.items() if row[place] is not None and row[place] < 1)
    plain = next((one for one in known if one[1] not in biased), None)
    said = "–" if plain is None else f"**`{plain[1]}`** {_share(plain[0])}"
    return said if not known or known[0] == plain else f"{said}; biased: `{known[0][1]}` {_share(known[0][0])}"


def _families(one: dict[str, Any], coders: dict[str, str], bits: Sequence[str]) -> str:
    """Every family of a trace under every coder, by its error at three bits with Huffman codes."""
    every = dict.fromkeys(label for errors in one["errors"].values() for label in errors)
    none = [None] * len(bits)
    huffman = {label: [v or math.inf for v in one["errors"]["huffman"].get(label, none)] for label in every}
    order = sorted(every, key=lambda label: (huffman[label][2], huffman[label][1], huffman[label][3]))
    steps = ", ".join(map(str, one["steps"]))
    about = f"{one['about']}: {one['parameters']:,} parameters in {one['tensors']} tensors, steps {steps}"
    rows = [
        (
            f"`{label}`" + " (biased)" * (label in one["biased"]),
            *(_share(value) for coder in coders for value in one["errors"][coder].get(label, none)),
        )
        for label in order
    ]
    heads = [
        "codec",
        *(f"{said.partition(' ')[0]} {target.partition(' ')[0]}" for said in coders.values() for target in bits),
    ]
    return f"### {about}\n\n{table(heads, rows)}"


def _share(error: float | None) -> str:
    return "–" if error is None else f"{number(100 * error)}%" if error < 10 else ">1000%"


PARTS = {
    "cli": commands,
    "codecs": codecs,
    "columns": columns,
    "corrections": corrections,
    "equal-bits": equal_bits,
    "fuzzing": fuzzing,
    "interruptions": interruptions,
    "public": public,
    "verdicts": verdicts,
}


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the generated parts into a page; files outside of the site are named, not linked."""
    text = MARK.sub(lambda found: PARTS[found[1]](*found[2].split()), source[0])
    up = "../" * docname.count("/") + "../"
    source[0] = re.sub(rf"\[([^\]]+)\]\({re.escape(up)}(?!\.\.)([^)]+)\)", r"\1 (`\2`)", text)


def plain_bars(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Magnitudes such as |v| in docstrings are no substitutions."""
    lines[:] = [line if line.lstrip().startswith((">>>", "...")) else line.replace("|", "\\|") for line in lines]


def internal(app: Sphinx, env: Any, node: Any, shown: Any) -> Any:
    """A reference to what no page describes is shown as it is, provided that the program has it."""
    if node.get("refdomain") != "py":
        return None
    source = re.search(r"(gtrace/[\w/]+)\.py:", node.source or "")
    module = source[1].replace("/", ".") if source else node.get("py:module") or "gtrace"
    for name in (node["reftarget"], f"{module}.{node['reftarget']}"):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError):
            continue
        return shown
    return None


def _inline(writer: Any, node: Any) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(writer: Any, node: Any) -> None:
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", plain_bars, priority=400)
    app.connect("missing-reference", internal)
    # MathML, which browsers draw themselves: pages fetch nothing from elsewhere.
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
