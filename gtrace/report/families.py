"""Names of configurations: which belong together as one curve, and what tells the points of a curve apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Parameters that trade bits for error, with their short form; every other one makes a new family.
RATE_PARAMETERS = {
    "bits": "b{}",
    "ratio": "ratio {}",
    "sparsity": "sparsity {}",
    "amount": "amount {}",
    "rank": "rank {}",
    "bin_size": "bin {}",
}

#: Methods whose levels are fitted to data.
FITTED = ("alq", "alq-n", "alqg", "alqg-n", "amq", "amq-n", "zipml")


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of configurations, in their order.

    Attributes:
        families: the method, followed by the parameters in which its families differ.
        settings: value of the rate parameter, ``b3`` or ``ratio 0.01``; empty for a codec that has none.
        unreadable: specs whose parameters are missing; each is a family of its own.
    """

    families: tuple[str, ...]
    settings: tuple[str, ...]
    unreadable: tuple[str, ...]


def label(specs: Sequence[str], methods: Sequence[str], parameters: Sequence[Mapping[str, Any] | None]) -> Labels:
    """Group configurations into families: same method, equal in everything but the rate.

    Args:
        specs: canonical specs, all different.
        methods: codec name of each.
        parameters: parameters of each; None where they are not known.
    """
    fixed = [
        None if p is None else {k: _plain(v) for k, v in p.items() if k not in RATE_PARAMETERS} for p in parameters
    ]
    differing: dict[str, list[str]] = {}
    for method in dict.fromkeys(methods):
        known = [f for f, m in zip(fixed, methods, strict=True) if m == method and f is not None]
        names = dict.fromkeys(name for f in known for name in f)
        differing[method] = [name for name in names if len({f.get(name, "-") for f in known}) > 1]
    families = []
    for spec, method, own in zip(specs, methods, fixed, strict=True):
        if own is None:
            families.append(spec)
        else:
            families.append(" ".join([method, *(f"{k}={own.get(k, '-')}" for k in differing[method])]))
    settings = tuple("" if p is None else _setting(p) for p in parameters)
    unreadable = tuple(spec for spec, own in zip(specs, fixed, strict=True) if own is None)
    return Labels(tuple(families), settings, unreadable)


def short_spec(spec: str) -> str:
    """Method and rate of a spec, without the parameters that rarely matter to a reader.

    >>> [short_spec(s) for s in ("qsgdinf:bits=3,bucket_size=8192", "ef:topk:ratio=0.01", "terngrad")]
    ['qsgdinf b3', 'ef:topk ratio 0.01', 'terngrad']
    """
    items = (item.partition("=") for part in spec.split(":") if "=" in part for item in part.split(","))
    values = {key: value for key, _, value in items}
    return f"{method_of(spec)} {_setting(values)}".strip()


def method_of(spec: str) -> str:
    """The codec of a spec with everything around it, without parameters.

    >>> [method_of(s) for s in ("qsgdinf:bits=3", "ef:topk:ratio=0.01", "ef:rotate:block=64:qsgd:bits=3", "none")]
    ['qsgdinf', 'ef:topk', 'ef:rotate:qsgd', 'none']
    """
    return ":".join(part for part in spec.split(":") if "=" not in part)


def _setting(parameters: Mapping[str, Any]) -> str:
    given = {name: parameters[name] for name in RATE_PARAMETERS if parameters.get(name) is not None}
    if "bits" in given:
        # A budget of bits takes the place of an amount, whose default is among the parameters all the same.
        given.pop("amount", None)
    return ", ".join(RATE_PARAMETERS[name].format(_plain(value)) for name, value in given.items())


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
