"""What to run: methods, bits and other ranges turned into a list of codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gtrace.codecs import Codec, codec, codec_class, codec_names, parameter_fields, parse_spec, split_specs
from gtrace.errors import UsageError

if TYPE_CHECKING:
    import dataclasses
    from collections.abc import Iterable, Mapping, Sequence


def expand(
    methods: str | Iterable[str], ranges: Mapping[str, Sequence[Any]] | None = None, *, prefix: str = ""
) -> list[Codec]:
    """Every codec that the methods and ranges name, each once, in order.

    Args:
        methods: specs such as ``qsgd,nuqsgd:p=0.3``, as text or a list; ``all`` stands for every codec.
        ranges: parameter -> values. A codec takes those that it has and that its spec does not fix; one
            without the parameter runs once. ``bits`` gives way to ``amount``, which sets the same thing.
        prefix: put before every spec, such as ``ef:``.

    ``fp:all`` stands for every format of the asked bits.

    Raises:
        UsageError: an unknown codec or parameter, a value that a codec refuses, or a range that no codec takes.

    >>> [str(c) for c in expand("qsgd,terngrad", {"bits": [2, 3]})]
    ['qsgd:bits=2', 'qsgd:bits=3', 'terngrad']
    """
    specs = split_specs(methods) if isinstance(methods, str) else list(methods)
    specs = [name for spec in specs for name in (codec_names() if spec == "all" else _spelled(spec, ranges or {}))]
    found: dict[str, Codec] = {}
    unused = {name for name, values in (ranges or {}).items() if values}
    for spec in specs:
        parsed = parse_spec(spec)
        known = {item.name for item in parameter_fields(codec_class(parsed.name)) if _leaves_choice(item)}
        if "amount" in known and ("amount" in parsed.given or (ranges or {}).get("amount")):
            known.discard("bits")
        word = codec_class(parsed.name).word
        if parsed.given.get(word, "auto") != "auto":
            # What is named has its own bits.
            known.discard("bits")
        options: list[dict[str, Any]] = [{}]
        for key, values in (ranges or {}).items():
            if key in known and values:
                unused.discard(key)
                if key not in parsed.given:
                    options = [{**option, key: value} for option in options for value in values]
        for option in options:
            made = codec(prefix + spec, **option)
            found[str(made)] = made
    if unused - {"bits"}:
        raise UsageError(f"--{min(unused - {'bits'}).replace('_', '-')}: none of the chosen codecs takes it")
    return list(found.values())


def _spelled(spec: str, ranges: Mapping[str, Sequence[Any]]) -> Sequence[str]:
    """The specs that one with the word ``all`` stands for; other specs as they are."""
    parsed = parse_spec(spec)
    word = codec_class(parsed.name).word
    if not word or parsed.given.get(word) != "all":
        return (spec,)
    bits = (parsed.given["bits"],) if "bits" in parsed.given else ranges.get("bits", ())
    rest = {key: value for key, value in parsed.given.items() if key not in (word, "bits")}
    head = spec[: spec.rindex(f"{parsed.name}:")] + parsed.name
    words = codec_class(parsed.name).words(tuple(int(n) for n in bits))
    return [f"{head}:" + ",".join([name, *(f"{key}={value}" for key, value in rest.items())]) for name in words]


def _leaves_choice(item: dataclasses.Field[Any]) -> bool:
    """Whether a parameter leaves a choice at all: natural has a norm, but only one."""
    return len(item.metadata["choices"]) != 1 and item.metadata["maximum"] != 0
