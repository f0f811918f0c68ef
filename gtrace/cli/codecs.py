"""``gtrace codecs``: what there is, and what each does."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.console import echo, plain_table
from gtrace.cli.groups import complete_codec
from gtrace.cli.options import PLUGIN, Command, load_plugins, options, pick, print_json
from gtrace.errors import GtraceError, printable
from gtrace.settings import option

if TYPE_CHECKING:
    from pathlib import Path

    from gtrace.codecs import Codec

#: parameter -> what a sweep over it looks like
_RANGES = {"bits": "--bits 2-8", "ratio": "--ratio 0.001-0.1", "sparsity": "--sparsity 0.5-0.95"}
_WIDEST = 100


@dataclass(frozen=True)
class _CodecsSettings:
    plugin: tuple[Path, ...] = option((), **PLUGIN)
    as_json: bool = option(False, help="Print JSON instead of text.")


@click.command("codecs", cls=Command)
@click.argument("name", required=False, shell_complete=complete_codec)
@options(_CodecsSettings)
def command(settings: _CodecsSettings, name: str | None) -> None:
    """List the codecs, or explain one: formula, parameters, payload, what to expect, what was corrected.

    Codecs of installed packages (entry points of the group gtrace.codecs) are listed with their package.

    \b
    Examples:
      gtrace codecs
      gtrace codecs qsgd
      gtrace codecs dither --plugin dither.py
    """
    load_plugins(settings.plugin)
    if name:
        found = describe(name.partition(":")[0])
        print_json(found) if settings.as_json else click.echo(_page(found))
        return
    described = _all()
    print_json(described) if settings.as_json else _list(described)


def _all() -> list[dict[str, Any]]:
    from gtrace.codecs import codec_names, wrapper_names
    from gtrace.codecs.plugins import hidden, installed_names, origins

    for line in filter(None, map(hidden, origins())):
        echo(f"gtrace: warning: {line}", err=True)
    described = [describe(name) for name in (*codec_names(), *wrapper_names())]
    for name in installed_names():
        try:
            described.append(describe(name))
        except GtraceError as error:
            echo(f"gtrace: warning: {error}", err=True)
    return described


def describe(name: str) -> dict[str, Any]:
    """Everything that there is to say about a codec or a prefix."""
    from gtrace.codecs import codec, codec_class, kind_of, parameter_fields, wrapper_names
    from gtrace.codecs.plugins import origin_of, plugin_of

    cls = codec_class(name)
    origin, file = origin_of(cls), plugin_of(cls)
    # Words about a class are not about one that extends it.
    own = {word: vars(cls).get(word, "") for word in ("about", "sends", "behavior", "related")}
    prefix = name in wrapper_names()
    parameters = parameter_fields(cls)
    names = [item.name for item in parameters]
    plugin = "" if file is None else f" --plugin {file.name}"
    defaults = ",".join(f"{item.name}={_written(item.default)}" for item in parameters)
    return {
        **pick(cls, "name", "summary", "word", "formula", "paper", "unbiased", "stateful", "declared"),
        "prefix": prefix,
        "package": origin.package if origin is not None else file.name if file is not None else "",
        "synopsis": f"{cls.name}{f'[:{defaults}]' if defaults else ''}{':CODEC' if prefix else ''}",
        "description": [*filter(None, [own["about"]]), *_paragraphs(cls)],
        "corrections": list(cls.corrections),
        "closed_forms": not prefix and codec(name).expects,
        "needs": "what the codec inside needs" if prefix else _needs(codec(name)),
        "payload": own["sends"],
        "expect": own["behavior"],
        "examples": [line + plugin for line in _examples(name, names, prefix=prefix)],
        "see": list(own["related"]),
        "parameters": [
            {
                "name": item.name,
                "type": kind_of(item),
                "default": item.default,
                **{word: item.metadata[word] for word in ("help", "choices", "minimum", "maximum")},
            }
            for item in parameters
        ],
    }


def _needs(made: Codec) -> str:
    """What the default codec wants to be fitted on or for its closed forms."""
    needs = made.needs
    if needs is None:
        return "nothing but the gradient"
    bucket = "the whole tensor" if needs.bucket_size is None else f"buckets of {needs.bucket_size}"
    norm = "values as they are" if needs.norm == "none" else f"values over the {needs.norm} norm of {bucket}"
    return f"a moment sketch of {norm}"


def _examples(name: str, parameters: list[str], *, prefix: bool) -> list[str]:
    spec = f"{name}:topk:ratio=0.01" if prefix and name != "rotate" else f"{name}:qsgdinf:bits=3" if prefix else name
    ranges = next((_RANGES[p] for p in _RANGES if p in parameters), "") if not prefix else ""
    trained = f"{name}:bits=4" if "bits" in parameters and not prefix else spec
    return [
        f"gtrace sweep run.zarr --methods {spec} {ranges}".rstrip(),
        f"gtrace train --codec {trained} --task digits-cnn --workers 4",
        f"gtrace study bench {spec}",
    ]


def _paragraphs(cls: type[Codec]) -> list[str]:
    """The paragraphs of a class's docstring as plain text, without what concerns its callers alone."""
    text = cls.__doc__ or ""
    if text.startswith(f"{cls.__name__}("):
        return []  # a dataclass without a docstring has its signature there
    plain = re.sub(r":\w+:`~?([^`]*)`|``([^`]*)``", lambda m: m[1] or m[2], inspect.cleandoc(text))
    parts = [" ".join(part.split()) for part in plain.split("\n\n")]
    return [part for part in parts if part and not part.startswith(("Raises:", "Attributes:", "Args:"))]


def _list(described: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape

    others = any(item["package"] for item in described)
    table = plain_table(1)
    table.add_column("codec", style="bold", no_wrap=True)
    table.add_column("what it does")
    table.add_column("parameters")
    if others:
        table.add_column("from")
    for item in described:
        table.add_row(
            item["name"] + (":" if item["prefix"] else ""),
            escape(item["summary"]),
            ", ".join(p["name"] for p in item["parameters"]) or "-",
            *([escape(item["package"] or "gtrace")] if others else []),
        )
    Console().print(table)
    echo("\ngtrace codecs NAME explains one; a spec is NAME:key=value,key=value")
    echo("a prefix goes before any spec, e.g. ef:topk:ratio=0.01")


def _page(item: dict[str, Any]) -> str:
    width = min(_WIDEST, shutil.get_terminal_size().columns)

    def text(value: str, indent: int = 4) -> list[str]:
        pad = " " * indent
        return textwrap.wrap(value, width, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)

    memory = "keeps memory between steps" if item["stateful"] else "no memory between steps"
    kind = [f"{'unbiased' if item['unbiased'] else 'biased'}; {memory}"]
    if item["prefix"]:
        kind.append("what the codec inside is and keeps counts as well")
    if item["declared"]:
        kind.append("bits are what the method declares, not what was encoded")
    closed = "squared error, bias, sparsity and bits per coordinate, by gtrace sweep --draws 0"
    parameters: list[str] = []
    for p in item["parameters"]:
        allowed = _allowed(p)
        parameters += [f"    {p['name']}={_written(p['default'])}" + (f"    ({allowed})" if allowed else "")]
        parameters += text(p["help"], 8)
    if item["word"]:
        parameters += text(f"A word without = sets {item['word']}: {item['name']}:WORD.")
    synopsis = item["synopsis"].replace(",", ", ")
    sections = {
        "NAME": text(" - ".join(filter(None, (item["name"], item["summary"])))),
        "SYNOPSIS": [line.replace(", ", ",") for line in text(synopsis)],
        "FROM": text(item["package"]),
        "DESCRIPTION": [line for part in item["description"] for line in (*text(part), "")][:-1],
        "FORMULA": text(item["formula"]),
        "PARAMETERS": parameters or ["    none"],
        "NEEDS": text(item["needs"]),
        "KIND": [line for part in kind for line in text(part)],
        "CLOSED FORMS": text(closed if item["closed_forms"] else "none: error and bits are measured by encoding"),
        "PAYLOAD": text(item["payload"]),
        "WHAT TO EXPECT": text(item["expect"]),
        "CORRECTIONS": [line for part in item["corrections"] for line in text(f"- {part}")],
        "EXAMPLES": [f"    {line}" for line in item["examples"]],
        "SEE ALSO": text(", ".join(f"gtrace codecs {name}" for name in item["see"])),
        "PAPER": text(item["paper"]),
    }
    shown = [[click.style(head, bold=True), *map(printable, lines)] for head, lines in sections.items() if lines]
    return "\n\n".join("\n".join(lines) for lines in shown)


def _written(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _allowed(p: dict[str, Any]) -> str:
    if p["choices"]:
        return ", ".join(p["choices"])
    if isinstance(p["default"], bool):
        return "true, false"
    kind = "integer" if p["type"].startswith("int") else "number" if p["type"].startswith("float") else "text"
    low, high = p["minimum"], p["maximum"]
    if low is not None and high is not None:
        return f"{kind}, {low:.9g} to {high:.9g}"
    if low is not None:
        return f"{kind}, {low:.9g} or more"
    return kind if high is None else f"{kind}, {high:.9g} or less"
