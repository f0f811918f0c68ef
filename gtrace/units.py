"""Rates and times as people write them: ``25Gbit/s``, ``4Gelem/s``, ``180ms``."""

from __future__ import annotations

import math
import re

from gtrace.errors import UsageError

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RATE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)(bit|B)/s")
_ELEMENTS = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)elem/s")
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"([0-9.]+(?:e-?[0-9]+)?)\s*(ns|us|ms|s)")


def parse_bandwidth(text: str, what: str) -> float:
    """Read ``1Gbit/s`` or ``10MB/s``: bits per second; ``what`` is the option, for messages.

    Raises:
        UsageError: it is no rate, or not positive.

    >>> parse_bandwidth("10MB/s", "network")
    80000000.0
    """
    rate = _RATE.fullmatch(text.strip())
    if rate is None:
        raise UsageError(f"{what}: '{text}' is no rate; write 1Gbit/s or 10MB/s")
    bits = _number(rate[1], what) * _PREFIXES[rate[2]] * (8 if rate[3] == "B" else 1)
    if bits <= 0:
        raise UsageError(f"{what}: {text} is no speed")
    return bits


def parse_seconds(text: str, what: str) -> float:
    """Read ``50us``, ``180ms`` or ``1.5s``; ``what`` is the option, for messages.

    Raises:
        UsageError: it is no time.
    """
    time = _TIME.fullmatch(text.strip())
    if time is None:
        raise UsageError(f"{what}: '{text}' is no time; write 50us or 1ms")
    return _number(time[1], what) * _TIMES[time[2]]


def parse_elements(text: str, what: str) -> float:
    """Read ``4Gelem/s``: elements per second; ``what`` is the option, for messages.

    Raises:
        UsageError: it is no rate, or not positive.
    """
    rate = _ELEMENTS.fullmatch(text.strip())
    if rate is None or not (value := _number(rate[1], what) * _PREFIXES[rate[2]]):
        raise UsageError(f"{what}: '{text}' is no rate; write 4Gelem/s or 500Melem/s")
    return value


def rate_text(bandwidth: float, unit: str = "bit/s", digits: int = 6) -> str:
    """A rate with the prefix that suits it.

    >>> rate_text(25e9), rate_text(1.2345e9, "elem/s", 2)
    ('25 Gbit/s', '1.2 Gelem/s')
    """
    prefix = next((p for p in ("T", "G", "M", "k") if bandwidth >= _PREFIXES[p]), "")
    return f"{bandwidth / _PREFIXES[prefix]:.{digits}g} {prefix}{unit}"


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{what}: '{text}' is no number") from None
    if not math.isfinite(value):
        raise UsageError(f"{what}: '{text}' is no finite number")
    return value
