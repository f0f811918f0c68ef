"""The one grammar of what people type: steps, ranges, sizes, speeds and times, e.g. ``0,100-200+4``, ``25Gbit/s``.

Every parser takes ``where``, the option or key that the text comes from, for its messages. It raises ``UsageError`` for
what it cannot read, and for what is too large.
"""

from __future__ import annotations

import math
import re
import sys
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SPEEDS = {
    f"{prefix}{unit}/s": scale * bits for prefix, scale in _PREFIXES.items() for unit, bits in (("bit", 1), ("B", 8))
}
_VALUES = {f"{prefix}values/s": scale for prefix, scale in _PREFIXES.items()}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?P<unit>[^\d\s.].*)?", re.ASCII)
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?i?b?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_STEPS = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18})(?::(?P<stride>\d{1,18}))?|\+(?P<burst>\d{1,18}))?")
_RANGE = re.compile(r"^(?P<low>[^:]*?\d)-(?P<high>\d[^:]*|\.\d[^:]*)(?::(?P<step>.+))?$")
#: A typo like 2-80000000 must not fill the memory.
MAX_VALUES = 100_000
MAX_EXPONENT = 400


def parse_bandwidth(text: str, where: str) -> float:
    """Read ``1Gbit/s`` or ``10MB/s``: bits per second, more than 0.

    >>> parse_bandwidth("10MB/s", "--network")
    80000000.0
    """
    return _positive(_quantity(text, where, "speed", _SPEEDS, "Gbit/s"), text, where)


def parse_seconds(text: str, where: str) -> float:
    """Read ``50us``, ``180ms`` or ``1.5s``."""
    return _quantity(text, where, "time", _TIMES, "ms")


def parse_values(text: str, where: str) -> float:
    """Read ``4Gvalues/s``: values per second, more than 0."""
    return _positive(_quantity(text, where, "rate", _VALUES, "Gvalues/s"), text, where)


def parse_size(text: str, where: str = "size") -> int:
    """Read a number of bytes: ``4GB``, ``500M``, ``1.5GiB`` or ``1000``.

    >>> parse_size("1.5GiB", "--budget")
    1610612736
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{where}: '{text}' is not a valid size; write e.g. 4GB, 500MB or 1GiB.")
    unit = match["unit"].lower().removesuffix("b")
    base = 1024 if unit.endswith("i") else 1000
    size = float(match["number"]) * base ** _POWERS[unit.removesuffix("i")]
    if size > sys.maxsize:
        raise UsageError(f"{where}: '{text}' is more than any disk holds.")
    return int(size)


def parse_bits(text: str, where: str) -> float:
    """Read bits per value, more than 0: ``3``, ``2.5bits``."""
    bits = _quantity(text, where, "number of bits", dict.fromkeys(("", "b", "bit", "bits"), 1.0), "bits")
    return _positive(bits, text, where)


def _quantity(text: str, where: str, what: str, units: Mapping[str, float], usual: str) -> float:
    """A number with one of the units; ``usual`` is the unit that messages suggest."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{where}: '{text}' is not a valid {what}; write e.g. {'3' if usual == 'bits' else '25'}{usual}."
        )
    unit = (match["unit"] or "").strip()
    if unit not in units:
        wrong = "has an unknown unit; write" if unit else "needs a unit,"
        raise UsageError(f"{where}: '{text}' {wrong} e.g. {match['number']}{usual}.")
    # In decimals: 20 times 1e-6 in floats is not the float 20e-6.
    try:
        value = float(Decimal(match["number"]) * Decimal(repr(units[unit])))
    except ArithmeticError:
        value = math.inf
    if not math.isfinite(value):
        raise UsageError(f"{where}: '{text}' is too large.")
    return value


def _positive(value: float, text: str, where: str) -> float:
    if value <= 0:
        raise UsageError(f"{where}: '{text}' must be more than 0.")
    return value


def rate_text(bandwidth: float, unit: str = "bit/s", digits: int = 6) -> str:
    """A rate with the prefix that suits it.

    >>> rate_text(25e9), rate_text(1.2345e9, "values/s", 2)
    ('25 Gbit/s', '1.2 Gvalues/s')
    """
    prefix = next((p for p in ("T", "G", "M", "k") if bandwidth >= _PREFIXES[p]), "")
    rounded = float(f"{bandwidth / _PREFIXES[prefix]:.{digits}g}")
    return f"{rounded:g} {prefix}{unit}"


def step_ranges(text: str, where: str = "--steps") -> tuple[range, ...]:
    """Read steps: ``0,10,100-200,500-900:100,1000+50``.

    ``A-B`` holds both ends, ``A-B:S`` every S-th of them, ``A+K`` is a burst of K steps from A on.

    >>> step_ranges("0,100-200:50,1000+50")
    (range(0, 1), range(100, 201, 50), range(1000, 1050))
    """
    ranges = []
    for part in text.split(","):
        word = part.strip()
        match = _STEPS.fullmatch(word)
        if match is None:
            raise UsageError(f"{where}: '{word}' is not a valid step; write e.g. 0,10,100-200 or 1000+50.")
        first = int(match["first"])
        last, stride = int(match["last"] or first), int(match["stride"] or 1)
        if match["burst"] is not None:
            last = first + int(match["burst"]) - 1
        if last < first and match["last"]:
            raise UsageError(f"{where}: '{word}' is reversed; write {last}-{first}.")
        if last < first or stride < 1:
            raise UsageError(f"{where}: '{word}' holds no step; a burst and a stride are at least 1.")
        ranges.append(range(first, last + 1, stride))
    return tuple(ranges)


def step_numbers(text: str, where: str = "--steps") -> tuple[int, ...]:
    """The steps of :func:`step_ranges` one by one, each once, and at most a hundred thousand."""
    ranges = step_ranges(text, where)
    if sum(len(one) for one in ranges) > MAX_VALUES:
        raise UsageError(f"{where}: '{text}' has more than {MAX_VALUES} steps.")
    return tuple(dict.fromkeys(step for one in ranges for step in one))


def parse_range(text: str, where: str = "range", *, decades: bool = False, step: Decimal = Decimal(1)) -> list[Decimal]:
    """Read ``2-8``, ``2,4,8`` or ``0.5-0.95:0.05``; both ends count. Order is kept, repetitions are dropped.

    A range that names no step goes by ``step``, or with ``decades`` 1, 2, 5, 10 through each decade.

    >>> [str(v) for v in parse_range("2-4,8")]
    ['2', '3', '4', '8']
    >>> [str(v) for v in parse_range("0.5-0.6:0.05")]
    ['0.50', '0.55', '0.60']
    >>> [str(v) for v in parse_range("0.01-0.2", decades=True)]
    ['0.01', '0.02', '0.05', '0.1', '0.2']
    """
    values: dict[Decimal, None] = {}
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            values[_number(part, where)] = None
            continue
        low, high = _number(match["low"], where), _number(match["high"], where)
        by = _number(match["step"], where) if match["step"] else step
        if high < low:
            raise UsageError(f"{where}: '{part.strip()}' is reversed; write {high}-{low}.")
        if by <= 0:
            raise UsageError(f"{where}: '{part.strip()}' needs a positive step, e.g. 0.5-0.95:0.05.")
        if decades and match["step"] is None:
            values.update(dict.fromkeys(_decades(low, high, where)))
            continue
        if (high - low) / by > MAX_VALUES:
            raise UsageError(f"{where}: '{part.strip()}' has more than {MAX_VALUES} values.")
        for k in range(int((high - low) / by) + 1):
            values[low + k * by] = None
    return list(values)


def _number(text: str, where: str) -> Decimal:
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        wrong = f"{where}: '{text.strip()}' is not a number; write e.g. 2-8, 2,4,8 or 0.5-0.95:0.05."
        raise UsageError(wrong) from None
    if not value.is_finite():
        raise UsageError(f"{where}: '{text.strip()}' is not finite.")
    # No float is beyond that; sums of decimals would overflow, and decades go on for hours.
    if value and abs(value.adjusted()) > MAX_EXPONENT:
        raise UsageError(f"{where}: '{text.strip()}' is out of range.")
    return value


def _decades(low: Decimal, high: Decimal, where: str) -> list[Decimal]:
    if low <= 0:
        raise UsageError(f"{where}: '{low}-{high}' must be positive, or have a step, e.g. 0.5-0.95:0.05.")
    inner = [
        factor * Decimal(10) ** exponent
        for exponent in range(low.adjusted(), high.adjusted() + 1)
        for factor in (Decimal(1), Decimal(2), Decimal(5))
    ]
    return sorted({low, high, *(value for value in inner if low < value < high)})
