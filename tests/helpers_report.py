"""Results made up for the tests of reports: plausible in size and shape, exact in nothing."""

import itertools
import json
import math

import numpy as np

from gtrace.runlog import RunLogWriter
from gtrace.sweep import COLUMNS, EXPECTATION, ResultStore, SweepResult

LAYERS = tuple(f"{name}.{kind}" for name in ("conv1", "conv2", "fc1", "fc2") for kind in ("weight", "bias"))
RUNS = ("none", "qsgdinf:bits=3,bucket_size=8192")
STEPS = (0, 10, 20, 30, 40, 50)
METHODS = ("qsgd", "qsgdinf", "nuqsgd", "terngrad", "natural")

#: method -> bits -> (relative variance, measured bits) of a middling layer
_SHAPES = {
    "qsgd": lambda b: (90.0 / (2 ** (b - 1) - 1), 0.12 * 1.62 ** (b - 2)),
    "qsgdinf": lambda b: (5.0 / (2 ** (b - 1) - 1) ** 1.9, 0.62 + 0.93 * (b - 2)),
    "nuqsgd": lambda b: (90.0 / 2 ** (2 ** (b - 1) - 2) + 0.11, 3.52 - 3.4 * math.exp(-(b - 2) / 2.2)),
    "terngrad": lambda b: (5.2, 0.6),
    "natural": lambda b: (0.114, 3.9),
}


def spec_of(method, bits):
    """Spec, nominal bits and parameters of a made-up configuration."""
    if method in ("terngrad", "natural"):
        return f"{method}:bucket_size=8192", None, {"bucket_size": 8192, "coder": "huffman"}
    return f"{method}:bits={bits},bucket_size=8192", bits, {"bits": bits, "bucket_size": 8192, "coder": "huffman"}


def row(tensor="w", step=0, method="qsgd", bits=3, draw=EXPECTATION, n=1000, energy=1.0, **values):
    """One row of a sweep; the spec follows from method and bits unless ``codec`` is given."""
    spec, nominal, params = spec_of(method, bits)
    error = values.pop("squared_error", None)
    found = {"tensor": tensor, "step": step, "codec": spec, "draw": draw, "method": method, "bits": nominal}
    found |= {"params": json.dumps(params), "n": n, "energy": energy, "squared_error": error}
    return found | {"relative_variance": None if error is None else error / energy} | values


def rows_of(methods=METHODS, bits=range(2, 9), layers=LAYERS, steps=STEPS, draws=1, seed=0):
    """Rows of a whole made-up sweep: an expectation and ``draws`` encodings of everything."""
    random = np.random.default_rng(seed)
    sizes = {name: int(8 * 4 ** (1 + k % 5)) if "bias" not in name else 32 for k, name in enumerate(layers)}
    hardness = {name: math.exp(random.normal(0, 0.5)) for name in layers}
    for name in layers:
        for step in steps:
            energy = sizes[name] * 1e-4 * math.exp(-step / 40) * math.exp(random.normal(0, 0.3))
            for method in methods:
                single = method in ("terngrad", "natural")
                for b in [0] if single else bits:
                    variance, measured = _SHAPES[method](b)
                    variance *= hardness[name] * math.exp(random.normal(0, 0.08)) * (1 + step / 100)
                    common = {"tensor": name, "step": step, "method": method, "bits": b, "n": sizes[name]}
                    common["energy"] = energy
                    fixed = float({"terngrad": 2, "natural": 9}.get(method, b))
                    codes = {"bits_fixed": fixed, "bits_entropy": 0.95 * measured, "bits_huffman": measured}
                    yield row(**common, squared_error=variance * energy, sparsity=0.5, **codes)
                    for draw in range(draws):
                        noise = math.exp(random.normal(0, 0.05))
                        total = measured * math.exp(random.normal(0, 0.01))
                        lost = {
                            "squared_error": variance * energy * noise,
                            "cosine": 1 / math.sqrt(1 + variance * noise),
                        }
                        lost |= {"w1_normalized": variance**0.5 / 2, "mean_abs": math.sqrt(energy / sizes[name]) * 0.7}
                        sent = {"bits_payload": total, "bits_shared": 0.0, "bits_total": total}
                        yield row(**common, draw=draw, **lost, **sent, ratio_float32=32 / total)


def result_of(rows, warnings=(), provenance=None, details=None):
    """Rows as the store would load them, without a file."""
    found = list(rows)
    columns = {}
    for name, (kind, _) in COLUMNS.items():
        values = [r.get(name) for r in found]
        if kind == "TEXT":
            columns[name] = np.array(values, dtype=object)
        elif kind == "INTEGER" and None not in values:
            columns[name] = np.array(values, dtype=np.int64)
        else:
            columns[name] = np.array([math.nan if v is None else v for v in values], dtype=np.float64)
    return SweepResult(columns, dict(provenance or {}), tuple(warnings), details=dict(details or {}))


#: family -> method, scale, how many times the least error its levels make
FITTED = {
    "alq:bits={}": ("alq", "l2:8192", 1.25),
    "alq:bits={},law=truncnorm": ("alq", "l2:8192", 2.0),
    "nuqsgd:bits={}": ("nuqsgd", "l2:8192", 4.0),
    "zipml:bits={}": ("zipml", "linf:8192", 1.0),
    "terngrad": ("terngrad", "linf:8192", 1.5),
}


def fitted_rows(layers=("w", "v"), steps=(0, 10)):
    """Rows of a made-up sweep of fitted codecs: the optimum is 1 / 8^(bits - 2) of the energy everywhere."""
    for n, layer in enumerate(layers, 1):
        for step in steps:
            for form, (method, _, times) in FITTED.items():
                for b in [0] if method == "terngrad" else (3, 4):
                    law = "truncnorm" if "truncnorm" in form else "empirical"
                    best, energy = 8.0 ** (2 - b), float(n)
                    found = row(layer, step, method, b, n=1000 * n, energy=energy, squared_error=times * best * energy)
                    found["params"] = json.dumps({"bits": b, "law": law} if b else {})
                    found |= {"codec": form.format(b), "bits": b or None, "bits_total": 0.7 * b + 0.6}
                    found |= {"optimal_variance": best, "times_optimal": times}
                    model = best / 2 if law == "truncnorm" else None
                    yield found | {"model_variance": model, "fitted_on": "previous" if step else "itself"}


def fit_details(layers=("w", "v"), step=10):
    """The details that belong to :func:`fitted_rows`."""
    edges = 2.0 ** (np.arange(-120, 1) / 4)
    middle = np.sqrt(edges[1:] * edges[:-1])
    found = {}
    for layer in layers:
        for law, centre in (("l2:8192", 0.01), ("linf:8192", 0.1)):
            share = np.exp(-0.5 * (np.log(middle / centre)) ** 2)
            energy = share * middle**2
            shares = {"share": (0.7 * share / share.sum()).tolist(), "energy": (energy / energy.sum()).tolist()}
            found[layer, step, f"density {law}"] = {"edges": edges.tolist(), **shares, "zeros": 0.25, "below": 0.05}
        for form, (method, law, _) in FITTED.items():
            for b in [2] if method == "terngrad" else (3, 4):
                levels = [0.0, *(0.6 ** np.arange(2 ** (b - 1) - 1)[::-1]).tolist()]
                found[layer, step, f"levels {form.format(b)}"] = {"levels": levels, "zero": True, "law": law}
        found[layer, step, "convergence"] = {
            "codec": "alq:bits=3",
            "objective": {"uniform": [3.0, 2.0, 1.5], "exponential": [2.0, 1.0], "companding": [1.0 + 1e-9]},
            "best": 1.0,
        }
    return found


EVIL = (
    *("<script>alert(1)</script>", "a\"onload='x'&amp;", "$x^2$", "\x1b[31mred\x1b[0m", "[bold]x[/bold]", "\u202eevil"),
    *("a|b`c`*d*_e_", "中文"),
)

PROVENANCE = {
    "command": "gtrace sweep digits_cnn.zarr --methods qsgd,qsgdinf,nuqsgd,terngrad,natural --bits 2-8",
    "versions": {"gtrace": "0.1.0", "numpy": "2.4.6"},
    "seed": 0,
    "trace": "digits_cnn.zarr",
    "trace_fingerprint": "9d3c1f0a77",
    "trace_attrs": {"world_size": 1, "capture": {"stage": "local"}},
    "stages": ["local"],
}


def write_sweep(path, rows, warnings=(), provenance=None):
    """A result store on disk, filled and closed."""
    said = PROVENANCE if provenance is None else provenance
    store = ResultStore.create(path, said, "fingerprint", force=True)
    store.add(list(rows), warnings=warnings)
    store.close()
    return path


def write_runs(path, runs=RUNS, steps=120, workers=4, seeds=(0,), end=True):
    """A run log on disk with falling losses and rising accuracies."""
    parameters = 38_000
    command = "gtrace train --codec qsgdinf --bits 3 --workers 4 --task digits-cnn"
    study = {"command": command, "task": "digits-cnn", "workers": workers, "seed": seeds[0], "parameters": parameters}
    study |= {"tensors": {"conv1.weight": 72, "fc.weight": parameters - 72}, "versions": {"gtrace": "0.1.0"}}
    log = RunLogWriter(path, study, force=True)
    for seed in seeds:
        for k, run in enumerate(runs):
            random = np.random.default_rng([seed, k])
            per_worker = 32 if run == "none" else 2 + k
            total = 0.0
            for step in range(steps):
                bits = float(workers * per_worker * parameters)
                total += bits
                loss = 2.3 * math.exp(-step / 40) * math.exp(random.normal(0, 0.15)) + 0.05 + 0.03 * k
                sent = {"bits": bits, "bits_float32": float(workers * 32 * parameters)}
                sent["relative_variance"] = 0.0 if run == "none" else 0.3 * k * math.exp(random.normal(0, 0.1))
                spent = {"seconds": 0.01, "codec_seconds": 0.002}
                log.write("step", run=run, seed=seed, step=step, loss=loss, lr=0.1, **sent, **spent)
                if step % 20 == 19:
                    accuracy = 0.975 - 0.01 * k - 0.8 * math.exp(-step / 25)
                    log.write("eval", run=run, seed=seed, step=step, loss=1 - accuracy, accuracy=accuracy)
            if end:
                ends = {"loss": 0.1, "accuracy": 0.97, "bits": total, "ratio": 32 / per_worker, "seconds": 1.0}
                log.write("end", run=run, seed=seed, steps=steps, **ends)
    log.close()
    return path


def _with_memory():
    for step, draw, ratio in itertools.product(range(5), range(2), (0.01, 0.1)):
        about = {"codec": f"ef:topk:ratio={ratio}", "params": json.dumps({"ratio": ratio}), "bits": None}
        yield row("w", step, "ef:topk", draw=draw, squared_error=0.5, bits_total=40 * ratio) | about


#: Rows that every form and every figure must survive.
ODD_SWEEPS = {
    "no rows": list,
    "nothing but NaN": lambda: [row("w", s, squared_error=None) for s in (0, 1)],
    "one tensor is NaN": lambda: [
        r | ({"squared_error": None} if r["tensor"] == "fc1.weight" else {}) for r in rows_of(bits=[2, 3])
    ],
    "one configuration": lambda: rows_of(methods=("terngrad",), layers=("w",), steps=(7,)),
    "bursts": lambda: rows_of(steps=(0, 1, 2, 3, 4, 5000), bits=[2, 3], layers=("w",)),
    "expectations alone": lambda: rows_of(draws=0),
    "draws alone": lambda: [r for r in rows_of() if r["draw"] >= 0],
    "no error at all": lambda: [row("w", s, method="none", squared_error=0.0, bits_total=32.0) for s in range(20)],
    "no bits": lambda: [row(squared_error=1.0)],
    "gradients of zero": lambda: [row("w", s, squared_error=0.0) | {"energy": 0.0} for s in (0, 1)],
    "codecs with memory alone": _with_memory,
    "fitted codecs": fitted_rows,
    "whole model alone": lambda: [row("*", s, squared_error=0.5, bits_total=2.0) for s in range(15)],
    "one tensor has holes": lambda: [r for r in rows_of() if r["tensor"] != "fc1.bias" or r["step"] > 20],
    "200 layers": lambda: rows_of(layers=[f"layer{k}" for k in range(200)], steps=(0,), bits=[3], draws=0),
}


def contrast(one, other):
    """The ratio of WCAG 2.2, from 1 to 21, of two colours such as ``#0072b2``."""

    def luminance(colour):
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
