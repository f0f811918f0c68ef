"""Quantized weights on the command line: which levels are asked for, and what the column about them means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gtrace.errors import UsageError

if TYPE_CHECKING:
    from gtrace.training import Study


def chosen_levels(options: dict[str, Any]) -> list[str]:
    """The levels of weights that the options ask a task for, as in ``optimal5``; these options are taken out."""
    what, count = options.pop("quantize"), options.pop("weight_levels")
    if what is None:
        if count is not None:
            raise UsageError(f"--weight-levels {count}: belongs to --quantize model")
        if options["levels"] not in (None, "own", "common"):
            raise UsageError(f"--levels {options['levels']}: belongs to --quantize, or to a SCRIPT (own, common)")
        return []
    if what != "model":
        raise UsageError(f"--quantize {what}: in a network only the weights can be quantized; give --quantize model")
    bits, options["bits"] = options["bits"], None
    if (bits is None) == (count is None):
        raise UsageError("--quantize model: give the levels of a weight by --weight-levels, or its --bits")
    if bits is not None and not 2 <= bits <= 8:
        raise UsageError(f"--bits {bits}: a weight takes 2 to 8 here")
    if options["codec"] is None and options["compare"] is None:
        options["codec"] = "none"
    placements, options["levels"] = options["levels"] or "optimal", None
    return [f"{placement}{2**bits - 1 if count is None else count}" for placement in placements.split(",")]


def explain_weights(study: Study) -> str:
    """What the column on quantized weights says, in words."""
    total = sum(study.describe()["tensors"].values())
    first = study.quantized[0]
    bits = "/".join(dict.fromkeys(f"{one['bits']:.3g}" for one in study.quantized))
    return (
        f"weights: squared error of the quantized ones over their energy, in the last step; {bits} bits each,\n"
        f"{100 * first['elements'] / total:.0f} % of the parameters ({', '.join(first['tensors'])}). The first and the "
        "last layer,\nbiases and norms are exact, and so is what the optimizer steps."
    )
