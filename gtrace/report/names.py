"""Text of unknown origin made safe to show, and numbers made short enough to read or fit for JSON."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Shown for a value that was not measured or cannot be compared.
MISSING = "–"

#: Categories that a terminal or a browser acts on instead of showing: control, format, surrogate, separators.
_ACTIVE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_DIGITS = re.compile(r"(\d+)")


def literal(text: object, encoding: str = "utf-8") -> str:
    r"""``text`` with every character that would act instead of being seen written as an escape.

    Args:
        text: anything; its ``str`` is taken.
        encoding: characters that it lacks are escaped too.

    >>> literal("fc\x1b[31m.weight")
    'fc\\x1b[31m.weight'
    """
    shown = "".join(
        ch.encode("unicode_escape").decode("ascii") if unicodedata.category(ch) in _ACTIVE else ch for ch in str(text)
    )
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def shorten(text: str, width: int) -> str:
    """``text`` cut in the middle to ``width`` characters: both ends of a name tell it apart.

    >>> shorten("encoder.layers.11.self_attn.weight", 17)
    'encoder.…n.weight'
    """
    head = (width - 1) // 2
    return text if len(text) <= width else f"{text[:head]}…{text[head + 1 - width :]}"


def shorten_all(names: Sequence[str], width: int) -> list[str]:
    """Names cut to ``width`` characters that stay as different from each other as they were.

    >>> shorten_all([f"model.encoder.layers.{k}.attention.weight" for k in (3, 4)], 18)
    ['….3.atte…on.weight', '….4.atte…on.weight']
    """
    # What the first and the last share in sorted order, all share.
    first, last = (min(names), max(names)) if names else ("", "")
    shared = next((k for k, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), 0)
    head = max(first.rfind(".", 0, shared), 0)
    stripped = [f"…{name[head:]}" if head else name for name in names]
    whole = [shorten(name, width) for name in names]
    numbered = [_around_numbers(name, width) for name in names]
    for short in (whole, [shorten(name, width) for name in stripped], numbered):
        if len(set(short)) == len(set(names)):
            return short
    return [f"{shorten(name, max(width - 5, 3))} #{k}" for k, name in enumerate(names, 1)]


def _around_numbers(name: str, width: int) -> str:
    """A name cut so that its last number stays, which tells the layers of a model apart, and its end."""
    numbers = list(_DIGITS.finditer(name))
    if len(name) <= width or not numbers:
        return shorten(name, width)
    tail = (width - 2) // 2
    head = name[: numbers[-1].end()][-(width - 2 - tail) :]
    return f"…{head}…{name[-tail:]}"


def natural_order(names: Iterable[str]) -> list[str]:
    """Names sorted so that ``layers.2`` comes before ``layers.10``."""

    def key(name: str) -> list[tuple[int, int, str]]:
        # isdecimal, not isdigit: int() takes no superscripts.
        parts = [part for part in _DIGITS.split(name) if part]
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]

    return sorted(names, key=key)


def number(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits, and a dash for what is not a number.

    >>> [number(v) for v in (0.04116, 1.6, 12345.0, 2.5e-7, 0.0, float("nan"))]
    ['0.0412', '1.60', '12345', '2.50e-7', '0', '–']
    """
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    power = int(exponent)
    if -4 <= power < 6:
        return f"{value:.{max(digits - 1 - power, 0)}f}"
    return f"{mantissa}e{power}"


def plain(value: Any) -> Any:
    """``value`` in types that JSON has; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def pick(source: object, *names: str) -> dict[str, Any]:
    """Some attributes by their names, for a JSON document."""
    return {name: getattr(source, name) for name in names}


def count(value: float, noun: str) -> str:
    """A number of things in words.

    >>> count(1, "step"), count(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{value:,.0f} {noun}{'s' * (value != 1)}"


def listed(items: Iterable[str], limit: int = 6) -> str:
    """Items as prose; past ``limit`` the rest is counted.

    >>> listed(["a", "b", "c"]), listed("abcd", limit=2)
    ('a, b and c', 'a, b and 2 more')
    """
    every = list(items)
    if len(every) > limit:
        return f"{', '.join(every[:limit])} and {len(every) - limit} more"
    return " and ".join(filter(None, (", ".join(every[:-1]), every[-1]))) if every else ""


def size(count_of_bits: float) -> str:
    """A number of bits in the unit a reader thinks in, powers of 1000.

    >>> size(2.5e7), size(800)
    ('3.12 MB', '100 B')
    """
    if math.isnan(count_of_bits):
        return MISSING
    amount = count_of_bits / 8
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{number(amount)} {unit}"
        amount /= 1000
    return f"{number(amount)} TB"


def duration(seconds: float) -> str:
    """Seconds with three digits and a unit.

    >>> duration(0.1804), duration(2.5e-5), duration(1234), duration(0)
    ('180 ms', '25.0 us', '1234 s', '0 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        # What rounds up to 1000 takes the larger unit.
        if seconds * factor >= 0.9995 or unit == "us":
            break
    return f"{number(seconds * factor)} {unit}" if seconds > 0 else "0 s" if seconds == 0 else MISSING


def percent(share: float) -> str:
    """A part of a whole, and a dash for what is not a number.

    >>> percent(0.834), percent(float("nan"))
    ('83%', '–')
    """
    return MISSING if math.isnan(share) else f"{share:.0%}"


def bits_text(target: float) -> str:
    """``1 bit``, ``2.5 bits``."""
    return f"{target:g} {'bit' if target == 1 else 'bits'}"


def energy_share(error: float, digits: int = 2) -> str:
    """An error over the gradient's energy, as sentences show it; verdicts and the tables beside them with 3 digits.

    >>> energy_share(0.0459), energy_share(2.78), energy_share(0.0931, 3)
    ('4.6%', '278%', '9.31%')
    """
    return f"{number(100 * error, digits)}%" if math.isfinite(error) else MISSING


def signed_percent(change: float) -> str:
    """``-18%``, ``+4.2%``: two digits are all that such a mean is good for."""
    return f"{100 * change:+.{0 if abs(change) >= 0.0995 else 1}f}%"


_BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█×", "_.-:=+*#!"


def sparkline(values: Sequence[float], width: int = 16, encoding: str = "utf-8") -> str:
    """Values over time as up to ``width`` blocks from their smallest to their largest; NaN is a gap.

    A block of which more than half is infinite becomes ``×``, or ``!`` without Unicode.

    >>> sparkline([1.0, 2.0, float("nan"), 8.0]), sparkline([0.0, 1.0, float("inf")], encoding="ascii")
    ('▁▂ █', '_#!')
    """
    marks = _BLOCKS if literal(_BLOCKS, encoding) == _BLOCKS else _PLAIN_BLOCKS
    blocks, broken = marks[:-1], marks[-1]
    length = min(len(values), width)
    if not length:
        return ""
    parts = [values[k * len(values) // length : (k + 1) * len(values) // length] for k in range(length)]
    known = [[v for v in part if math.isfinite(v)] for part in parts]
    means = [sum(part) / len(part) if part else math.nan for part in known]
    finite = [m for m in means if math.isfinite(m)]
    bad = [2 * sum(map(math.isinf, part)) > len(part) for part in parts]
    if not finite and not any(bad):
        return ""
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        broken if infinite else " " if math.isnan(m) else blocks[round((m - low) * scale)]
        for m, infinite in zip(means, bad, strict=True)
    )
