"""``gtrace codecs``: what there is, and what each does."""

from __future__ import annotations

from typing import Any

import click

from gtrace.cli.options import print_json


@click.command("codecs")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(name: str | None, as_json: bool) -> None:
    """List the codecs, or explain one: formula, parameters, paper, what was corrected.

    \b
    Example:
      gtrace codecs qsgd
    """
    from gtrace.codecs import codec_class, codec_names, wrapper_names

    described = [_describe(n) for n in ([codec_class(name).name] if name else (*codec_names(), *wrapper_names()))]
    if as_json:
        print_json(described[0] if name else described)
    elif name:
        _explain(described[0])
    else:
        _list(described)


def _describe(name: str) -> dict[str, Any]:
    from gtrace.codecs import ExpectingCodec, codec_class, parameter_fields, wrapper_names

    cls = codec_class(name)
    return {
        "name": cls.name,
        "prefix": cls.name in wrapper_names(),
        "summary": cls.summary,
        "formula": cls.formula,
        "paper": cls.paper,
        "corrections": list(cls.corrections),
        "unbiased": cls.unbiased,
        "stateful": cls.stateful,
        "closed_forms": issubclass(cls, ExpectingCodec),
        "parameters": [
            {
                "name": item.name,
                "default": item.default,
                "help": item.metadata["help"],
                "choices": list(item.metadata["choices"]),
                "minimum": item.metadata["minimum"],
                "maximum": item.metadata["maximum"],
            }
            for item in parameter_fields(cls)
        ],
    }


def _list(described: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("codec", style="bold", no_wrap=True)
    table.add_column("what it does")
    table.add_column("parameters")
    for item in described:
        table.add_row(
            item["name"] + (":" if item["prefix"] else ""),
            item["summary"],
            ", ".join(p["name"] for p in item["parameters"]) or "-",
        )
    Console().print(table)
    click.echo("\ngtrace codecs NAME explains one; a spec is NAME:key=value,key=value")
    click.echo("a prefix goes before any spec, as in ef:topk:ratio=0.01")


def _explain(item: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{item['name']}[/bold]  {escape(item['summary'])}")
    console.print(f"\n  {escape(item['formula'])}", soft_wrap=True)
    console.print(f"\nPaper: {escape(item['paper'])}", soft_wrap=True)
    kind = "unbiased" if item["unbiased"] else "biased"
    memory = "keeps memory between steps" if item["stateful"] else "no memory between steps"
    closed = "error and bits in closed form" if item["closed_forms"] else "measured by encoding"
    console.print(f"Kind: {kind}; {memory}; {closed}")
    for line in item["corrections"]:
        console.print(f"Corrected: {escape(line)}", soft_wrap=True)
    if not item["parameters"]:
        return
    table = Table(box=None, pad_edge=False, title="\nParameters", title_justify="left", title_style="bold")
    for column in ("name", "default", "allowed", "meaning"):
        table.add_column(column, no_wrap=column != "meaning")
    for p in item["parameters"]:
        default = "none" if p["default"] is None else str(p["default"]).lower()
        table.add_row(p["name"], default, _allowed(p), escape(p["help"]))
    console.print(table)


def _allowed(p: dict[str, Any]) -> str:
    if p["choices"]:
        return ", ".join(p["choices"])
    if isinstance(p["default"], bool):
        return "true, false"
    low, high = p["minimum"], p["maximum"]
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if low is not None:
        return f"{low:g} or more"
    return "" if high is None else f"{high:g} or less"
