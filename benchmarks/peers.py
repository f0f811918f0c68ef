"""Other packages' methods beside gtrace's nearest codecs: measured bits and error on a trace, as a Markdown table.

    python benchmarks/peers.py TRACE PLUGIN...

The plugins are those of docs/how-to/peers.md. Numbers are sums over all tensors and steps, from one keyed encoding
each.
"""

from __future__ import annotations

import sys

import numpy as np

import gtrace

#: gtrace's codecs that do the same or nearly so
OWN = (
    "fp16,qsgd:bits=4,bucket_size=128,topk:ratio=0.01,powersgd:rank=4,warm=false,uniform8,quantile8,fp:mxfp8,fp:mxfp4,"
)
OWN += "qsgdinf:bits=4"


def rows(trace: str, plugins: list[str]) -> list[tuple[float, str]]:
    """A line for each codec, with the bits that it is sorted by."""
    theirs = [cls.name for path in plugins for cls in gtrace.codecs.load_plugin(path)]
    result = gtrace.sweep(trace, [*theirs, *gtrace.codecs.split_specs(OWN)], optimal=False, noise=False)
    drawn, found = result["draw"] == 0, []
    for spec in dict.fromkeys(result["codec"].tolist()):
        mine = drawn & (result["codec"] == spec)
        bits = np.sum(result["bits_total"][mine] * result["n"][mine]) / np.sum(result["n"][mine])
        error = np.sum(result["squared_error"][mine]) / np.sum(result["energy"][mine])
        whose = "" if spec in theirs else "gtrace"
        sent = "tensors" if gtrace.codec(spec).declared else "bytes"
        found.append((bits, f"| `{spec}` | {whose} | {bits:.3g} | {error:.3g} | {sent} |"))
    return sorted(found)


if __name__ == "__main__":
    print("| codec | | bits per value | error | bits of |\n|---|---|--:|--:|---|")
    print("\n".join(line for _, line in rows(sys.argv[1], sys.argv[2:])))
