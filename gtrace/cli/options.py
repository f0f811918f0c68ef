"""Option types and checks that several commands share."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
import sys
import tomllib
from dataclasses import MISSING, Field, dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gtrace.errors import TraceError, UsageError
from gtrace.report.names import pick as pick
from gtrace.report.names import plain
from gtrace.settings import option
from gtrace.units import parse_range, step_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gtrace.codecs import Codec
    from gtrace.costs import Cluster

F = TypeVar("F", bound="Callable[..., Any]")


class NumberList(click.ParamType[tuple[Any, ...]]):
    """Numbers that a function makes of an option's text and name."""

    def __init__(self, name: str, parse: Callable[[str, str], tuple[Any, ...]]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        return self._parse(value, "range" if param is None else max(param.opts, key=len))


def _integers(text: str, where: str) -> tuple[int, ...]:
    numbers = parse_range(text, where)
    if any(v != int(v) for v in numbers):
        raise UsageError(f"{where}: '{text}' must hold whole numbers, e.g. 2-8 or 2,4,8.")
    return tuple(int(v) for v in numbers)


#: a range of integers such as ``2-8`` or ``2,4,8``
INTEGERS = NumberList("range", _integers)


def fractions(step: str | None = None) -> NumberList:
    """The type of ``0.5-0.95:0.05``; a range without a step goes by ``step``, else 1, 2, 5, 10 through each decade."""

    def parse(text: str, where: str) -> tuple[float, ...]:
        return tuple(float(v) for v in parse_range(text, where, decades=step is None, step=Decimal(step or 1)))

    return NumberList("range", parse)


#: how a file begins or ends that is not a trace -> what it is, and the command that reads it
_OTHERS = {
    ".py": ("a script", "record its gradients with gtrace capture {}"),
    ".jsonl": ("a run log", "read it with gtrace report {}"),
    ".toml": ("a plan or a format table", "read a plan with gtrace plan show {}"),
    ".html": ("a page", "open it in a browser"),
}
_SWEEP = (b"SQLite format 3", "sweep results", "read them with gtrace report {}")
_HDF5 = b"\x89HDF"


class TracePath(click.ParamType["Path | str"]):
    """The path of a trace, with ``sweeps`` of results, too; or an address, e.g. s3://b/a.zarr, which a path spoils."""

    name = "path"

    def __init__(self, *, sweeps: bool = False) -> None:
        self._sweeps = sweeps

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        if "://" in str(value):
            return str(value)
        path = Path(value)
        if path.is_file() and not (ctx is not None and ctx.resilient_parsing):
            self._check(path)
        return path

    def _check(self, path: Path) -> None:
        start = _start(path)
        if start.startswith(_HDF5) or path.suffix in (".h5", ".hdf5") or (self._sweeps and start == _SWEEP[0]):
            return
        if start == _SWEEP[0]:
            what, remedy = _SWEEP[1:]
        else:
            what, remedy = _OTHERS.get(path.suffix, ("another file", "a trace is a folder .zarr or a file .h5"))
        raise TraceError(f"{path} is {what}, not a trace; {remedy.format(shlex.quote(str(path)))}.")


def is_sweep(path: Path) -> bool:
    """Whether a file has results of a sweep, whatever its name; also one of their usual name that is not there."""
    return _start(path) == _SWEEP[0] if path.is_file() else path.name.endswith(".sweep.db")


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_SWEEP[0]))


def patterns(_context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Shell patterns of an option that may be repeated or hold several with commas; a callback of click."""
    return tuple(words(",".join(values), option.opts[0])) if values else ()


def words(text: str, option: str | None = None) -> list[str]:
    """What an option holds, with commas between; UsageError if that is nothing and the option is named."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if option and not found:
        raise UsageError(f"{option}: is empty; name something, or leave it out")
    return found


#: the annotation of a field, or of its items -> what click makes of a text
_TYPES: dict[str, Any] = {"str": str, "int": int, "float": float, "Path": click.Path(path_type=Path)}
#: how options are written everywhere that are not ``--their-name``
_NAMES = {
    "output": ("-o", "--output"),
    "as_json": ("--json",),
    "is_module": ("-m",),
    "plans": ("--plan",),
    "groups": ("--group",),
}
#: what a field says about itself that is not an argument of ``click.option``
_OWN = {"help", "choices", "minimum", "maximum", "opposite", "commas", "names", "only", "call"}
#: in a context's ``meta``: the help shows every option
_ALL = "gtrace.help_all"


class RankedOption(click.Option):
    """An ``advanced`` option, which only ``--help-all`` shows, or one with an earlier name, which is not shown."""

    def __init__(
        self, declarations: Sequence[str], *, advanced: bool = False, formerly: str = "", **attributes: Any
    ) -> None:
        super().__init__(declarations, **attributes)
        self.advanced = advanced
        self._formerly = formerly

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, self._formerly] if self._formerly else shown
        super().add_to_parser(parser, ctx)
        self.opts = shown


class Command(click.Command):
    """A command whose help shows the common options and ends with how to see the others."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        if self._advanced():
            every: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "hidden": True}
            self.params.append(click.Option(["--help-all"], callback=_show_every_option, **every))

    def _advanced(self) -> list[RankedOption]:
        return [param for param in self.params if isinstance(param, RankedOption) and param.advanced]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        advanced = self._advanced()
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        common = [param for param in options if param not in advanced]
        more: list[click.Option] = [*advanced] if _ALL in ctx.meta else []
        for heading, params in (("Options", common), ("More options", more)):
            if records := [record for param in params if (record := param.get_help_record(ctx)) is not None]:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if (more := len(self._advanced())) and _ALL not in ctx.meta:
            formatter.write_paragraph()
            formatter.write_text(f"{more} more option{'s' * (more > 1)}: {ctx.command_path} --help-all")


def _show_every_option(context: click.Context, _option: click.Parameter, chosen: bool) -> None:
    if chosen:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


def options(cls: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the options of a command from the fields of a settings class; the command gets an instance first.

    A field says in its metadata (:func:`gtrace.settings.option`) its ``help`` and, if they apply:

    - ``names``: how it is written if neither ``--its-name`` nor as in ``_NAMES``
    - ``choices``; ``minimum`` and ``maximum`` of an integer
    - ``commas``: may be given again, or hold several values with commas
    - ``opposite``: the flag's opposite, which is the default
    - ``call``: the calls that take it under its own name, for :func:`arguments`
    - ``advanced``: only ``--help-all`` shows it
    - ``formerly``: an earlier name, which is still read
    - ``only``: which part of the command it is for; the command checks that
    - anything else that ``click.option`` takes, e.g. ``metavar`` or ``type``
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**values: Any) -> Any:
            return function(_instance(cls, values), **values)

        for field in reversed(all_fields(cls)):
            command = _option(field)(command)
        return command

    return decorate


def all_fields(cls: type) -> list[Field[Any]]:
    """The options of a settings class, those of nested classes in their place."""
    found: list[Field[Any]] = []
    for field in fields(cls):
        found += all_fields(field.metadata["settings"]) if "settings" in field.metadata else [field]
    return found


def _instance(cls: type, values: dict[str, Any]) -> Any:
    """A settings class filled from values by option, which are taken out."""
    found = {}
    for field in fields(cls):
        inner = field.metadata.get("settings")
        found[field.name] = values.pop(field.name) if inner is None else _instance(inner, values)
    return cls(**found)


@dataclass(frozen=True)
class HorizonSettings:
    """For which training the cost of noise is predicted."""

    horizon: int | None = option(
        None,
        call=("report",),
        minimum=1,
        metavar="STEPS",
        help="Predict what noise costs after this many steps.  "
        "[default: the steps that the trace says are left, else as many as the captured run had]",
    )
    batch: float = option(
        math.nan,
        advanced=True,
        call=("report",),
        names=("--batch-size",),
        type=click.FloatRange(min=0, min_open=True),
        show_default=False,
        metavar="N",
        help="Samples of a step, over all workers.  [default: the trace's]",
    )


#: where a cluster may be written down: file -> the tables that its key is in
_FILES = {"gtrace.toml": (), "pyproject.toml": ("tool", "gtrace")}


@dataclass(frozen=True)
class ClusterSettings:
    """The machines between which gradients travel."""

    cluster: str | None = option(
        None,
        metavar="CLUSTER",
        help="Ranks x link speed, then the compute time of a step: 8x25Gbit/s,180ms. More parts: backward=120ms, "
        "latency=20us, bucket=25MiB, codec=2Gvalues/s.  [default: cluster in gtrace.toml or pyproject.toml here]",
    )

    def chosen(self, *, timed: bool = False) -> Cluster | None:
        """The cluster of ``--cluster``, else the one written down in the current folder; None without either.

        If it must be ``timed``, the option needs the compute time of a step; one written down without counts as none.
        """
        from gtrace.costs import parse_cluster

        text = self.cluster
        if text is None:
            place, written = _written_down()
            found = None if written is None else parse_cluster(written, place)
            return None if found is None or (timed and found.step_time is None) else found
        cluster = parse_cluster(text)
        if timed and cluster.step_time is None:
            raise UsageError(f"--cluster: '{text}' needs the compute time of a step here, e.g. {text},180ms.")
        return cluster


def _written_down() -> tuple[str, str | None]:
    """The cluster of ``gtrace.toml``, or of ``[tool.gtrace]`` in ``pyproject.toml``, behind its place for messages."""
    for file, tables in _FILES.items():
        path = Path(file)
        if not path.is_file():
            continue
        try:
            found: Any = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(f"{file}: cannot be read as TOML ({error}).") from None
        for table in tables:
            found = found.get(table) or {}
        text = found.get("cluster") if isinstance(found, dict) else None
        if text is not None:
            return f"{file}: cluster", str(text)
    return "", None


def arguments(settings: Any, call: str) -> dict[str, Any]:
    """The settings that a call takes under their own names."""
    names = (field.name for field in fields(settings) if call in field.metadata.get("call", ()))
    return pick(settings, *names)


def refuse(settings: object, only: str, why: str) -> None:
    """Refuse options that are given although they are only for something else."""
    for field in all_fields(type(settings)):
        given = getattr(settings, field.name, field.default)
        if field.metadata.get("only") == only and given != field.default:
            raise UsageError(f"{option_name(field)} {why}")


def option_name(field: Field[Any]) -> str:
    """How a user writes an option, e.g. ``--batch-size``."""
    return _names(field)[-1]


def _names(field: Field[Any]) -> tuple[str, ...]:
    usual = _NAMES.get(field.name, (f"--{field.name.replace('_', '-')}",))
    names: tuple[str, ...] = field.metadata.get("names", usual)
    return names


def _option(field: Field[Any]) -> Callable[[F], F]:
    about, kind = field.metadata, str(field.type).removesuffix(" | None")
    names = _names(field)
    given: dict[str, Any] = {"help": about["help"]}
    if kind == "bool":
        given |= {"is_flag": True, "default": field.default}
        if "opposite" in about:
            names = (f"--{about['opposite']}/{names[0]}",)
            given |= {"default": True, "callback": lambda _context, _option, value: not value}
        elif field.default:
            names = (f"{names[0]}/--no-{names[0][2:]}",)
            given["show_default"] = True
    else:
        several = about.get("multiple", "type" not in about and kind.startswith(("tuple", "Sequence")))
        shown = field.default is not MISSING and field.default not in (None, ())
        given |= {"type": _click_type(kind, about), "multiple": several, "show_default": shown}
        given |= {"required": True} if field.default is MISSING else {"default": field.default if shown else None}
    if kind == "int" and "choices" not in about and not given.get("is_flag"):
        given["metavar"] = "N"
    if about.get("commas"):
        given["callback"] = patterns
    given |= {key: value for key, value in about.items() if key not in _OWN}
    return click.option(*names, field.name, cls=RankedOption, **given)


def _click_type(kind: str, about: Mapping[str, Any]) -> Any:
    if "choices" in about:
        return click.Choice(about["choices"])
    if "minimum" in about or "maximum" in about:
        return click.IntRange(about.get("minimum"), about.get("maximum"))
    return about.get("type") or _TYPES.get(re.sub(r"^(tuple|Sequence)\[(\w+).*", r"\2", kind), str)


#: ``--plugin`` of commands that take codecs
PLUGIN: dict[str, Any] = {
    "type": click.Path(path_type=Path, dir_okay=False),
    "multiple": True,
    "help": "A Python file with codecs of your own; it is run.",
}


@dataclass(frozen=True)
class CodecSettings:
    """What every command has that takes codecs."""

    error_feedback: bool = option(
        False, advanced=True, help="Add to each gradient what the codec lost of the last one: the prefix ef:."
    )
    plugin: tuple[Path, ...] = option((), advanced=True, **PLUGIN)


#: ``--steps`` of commands that read a trace
STEPS: dict[str, Any] = {
    "type": NumberList("steps", step_numbers),
    "metavar": "STEPS",
    "help": "Only these steps, e.g. 0,10,100-200,1000+50.",
}
#: ``--tensors`` of commands that read a trace
TENSORS: dict[str, Any] = {"metavar": "GLOB", "commas": True, "help": "Only tensors with such names."}


def bucket_sizes(text: str) -> list[int | None]:
    """``--bucket-size 128,8192`` as numbers; ``none`` is a whole tensor."""
    return [
        None if part.strip() == "none" else int(value)
        for part in text.split(",")
        for value in ([0] if part.strip() == "none" else parse_range(part, "--bucket-size"))
    ]


def file_name(spec: str) -> str:
    """A spec as a part of a file name: ``qsgdinf:bits=3`` becomes ``qsgdinf-bits3``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", spec.replace("=", ""))


def load_plugins(files: tuple[Path, ...]) -> None:
    """Run the files of ``--plugin``; their codecs are then known by name."""
    if files:
        from gtrace.codecs.plugins import load_plugin

        for file in files:
            load_plugin(file)


def codecs_with(specs: Sequence[str], options: Mapping[str, float | None]) -> list[Codec]:
    """The codecs of specs; each takes the parameters that it has, that are not None, and that its spec does not name.

    Raises:
        UsageError: a parameter that none of them takes.
    """
    from gtrace.codecs import codec
    from gtrace.codecs.spec import parse_spec

    given = {name: value for name, value in options.items() if value is not None}
    has = [set(codec(spec).parameters) for spec in specs]
    takes = [known - set(parse_spec(spec).given) for spec, known in zip(specs, has, strict=True)]
    for name in given:
        if any(name in known for known in takes):
            continue
        fixed = next((spec for spec, known in zip(specs, has, strict=True) if name in known), None)
        if fixed is not None:
            raise UsageError(f"--{name}: {fixed} has {name} of its own; leave one of the two out")
        if len(specs) > 1:
            raise UsageError(f"--{name}: none of these codecs has {name} to choose; leave it out")
        about = f"gtrace codecs {parse_spec(specs[0]).name} shows what it has"
        raise UsageError(f"--{name}: {specs[0]} has no {name} to choose; leave it out ({about})")
    pairs = zip(specs, takes, strict=True)
    return [codec(spec, **{name: value for name, value in given.items() if name in known}) for spec, known in pairs]


def print_json(value: Any) -> None:
    """One JSON document on stdout, with escapes for what a terminal would act on.

    NaN and infinities become null, as JSON has no word for them.
    """

    def escaped(found: re.Match[str]) -> str:
        char = found[0]
        return char if char.isprintable() else "\\u007f" if char == "\x7f" else json.dumps(char)[1:-1]

    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    sys.stdout.write(re.sub(r"[^\n -~]", escaped, text) + "\n")
