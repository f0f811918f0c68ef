"""Option types and checks that several commands share."""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gtrace.errors import OutputExistsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_RANGE = re.compile(r"^(?P<low>[^:]*?\d)-(?P<high>\d[^:]*|\.\d[^:]*)(?::(?P<step>.+))?$")
#: A typo like 2-80000000 must not fill the memory.
MAX_VALUES = 100_000
MAX_EXPONENT = 400


def _number(text: str, where: str) -> Decimal:
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        raise UsageError(f"{where}: '{text}' is no number; write 2-8, 2,4,8 or 0.5-0.95:0.05") from None
    if not value.is_finite():
        raise UsageError(f"{where}: '{text}' is not finite")
    # Beyond that no float is; sums of decimals would overflow, and decades go on for hours.
    if value and abs(value.adjusted()) > MAX_EXPONENT:
        raise UsageError(f"{where}: '{text}' is out of range")
    return value


def parse_range(text: str, where: str = "range", *, decades: bool = False, step: Decimal = Decimal(1)) -> list[Decimal]:
    """Read ``2-8``, ``2,4,8`` or ``0.5-0.95:0.05``; both ends count. Order is kept, repetitions are dropped.

    Args:
        text: the range.
        where: the option, for messages.
        decades: a range without a step goes 1, 2, 5, 10 through each decade instead of by ``step``.
        step: of a range that names none.

    >>> [str(v) for v in parse_range("2-4,8")]
    ['2', '3', '4', '8']
    >>> [str(v) for v in parse_range("0.5-0.6:0.05")]
    ['0.50', '0.55', '0.60']
    >>> [str(v) for v in parse_range("0.01-0.2", decades=True)]
    ['0.01', '0.02', '0.05', '0.1', '0.2']

    Raises:
        UsageError: not a range, falling, or more than a hundred thousand values.
    """
    values: dict[Decimal, None] = {}
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            values[_number(part, where)] = None
            continue
        low, high = _number(match["low"], where), _number(match["high"], where)
        by = _number(match["step"], where) if match["step"] else step
        if by <= 0 or high < low:
            raise UsageError(f"{where}: '{part}' must rise with a positive step, as in 2-8 or 0.5-0.95:0.05")
        if decades and match["step"] is None:
            values.update(dict.fromkeys(_decades(low, high, where)))
            continue
        if (high - low) / by > MAX_VALUES:
            raise UsageError(f"{where}: '{part}' has more than {MAX_VALUES} values")
        for k in range(int((high - low) / by) + 1):
            values[low + k * by] = None
    return list(values)


def _decades(low: Decimal, high: Decimal, where: str) -> list[Decimal]:
    if low <= 0:
        raise UsageError(f"{where}: '{low}-{high}' must be positive, or have a step, as in 0.5-0.95:0.05")
    inner = [
        factor * Decimal(10) ** exponent
        for exponent in range(low.adjusted(), high.adjusted() + 1)
        for factor in (Decimal(1), Decimal(2), Decimal(5))
    ]
    return sorted({low, high, *(value for value in inner if low < value < high)})


class Integers(click.ParamType[tuple[int, ...]]):
    """A range of integers such as ``2-8`` or ``2,4,8``."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        where = f"--{param.name}" if param is not None and param.name else "range"
        numbers = parse_range(str(value), where)
        if any(v != int(v) for v in numbers):
            raise UsageError(f"{where}: '{value}' must hold integers")
        return tuple(int(v) for v in numbers)


class Fractions(click.ParamType[tuple[float, ...]]):
    """A range of numbers such as ``0.5-0.95:0.05``.

    Args:
        step: of a range that names none, as in 0.05; None for 1, 2, 5, 10 through each decade.
    """

    name = "range"

    def __init__(self, step: str | None = None) -> None:
        self._step = None if step is None else Decimal(step)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        where = f"--{param.name}" if param is not None and param.name else "range"
        step = self._step
        return tuple(float(v) for v in parse_range(str(value), where, decades=step is None, step=step or Decimal(1)))


class TracePath(click.ParamType["Path | str"]):
    """The path of a trace, or an address such as s3://bucket/run.zarr, which a path would spoil."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        return value if isinstance(value, Path) or "://" in str(value) else Path(value)


def patterns(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Shell patterns of an option that may be repeated or hold several with commas; a callback of click."""
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def steps_option(text: str | None) -> list[int] | None:
    """``--steps 0,10,100-200`` as numbers, None for none given."""
    return None if text is None else [int(value) for value in parse_range(text, "--steps")]


def codec_options(function: F) -> F:
    """``--error-feedback`` and ``--plugin``, which every command that takes codecs has."""
    function = click.option(
        "--plugin",
        type=click.Path(path_type=Path, dir_okay=False),
        multiple=True,
        help="A Python file with codecs of your own; it is run.",
    )(function)
    return click.option(
        "--error-feedback",
        is_flag=True,
        help="Send with each gradient what the codec lost of the last: the prefix ef:.",
    )(function)


def load_plugins(files: tuple[Path, ...]) -> None:
    """Run the files of ``--plugin``; their codecs are then known by name."""
    if files:
        from gtrace.codecs.plugins import load_plugin

        for file in files:
            load_plugin(file)


def check_output(path: Path, *, force: bool) -> None:
    """Refuse to overwrite.

    Raises:
        OutputExistsError: ``path`` exists and ``force`` is off.
        UsageError: its folder does not exist.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist; create it or choose another -o")
    if path.exists() and not force:
        raise OutputExistsError(f"{path}: exists already and was left untouched; pass --force or another -o")


def print_json(value: Any) -> None:
    """One JSON document on stdout; NaN and infinities become null, as JSON has no word for them."""

    def clean(item: Any) -> Any:
        if isinstance(item, dict):
            return {str(k): clean(v) for k, v in item.items()}
        if isinstance(item, (list, tuple)):
            return [clean(v) for v in item]
        if hasattr(item, "tolist"):
            return clean(item.tolist())
        if isinstance(item, float) and (item != item or item in (float("inf"), float("-inf"))):
            return None
        return item

    json.dump(clean(value), sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
