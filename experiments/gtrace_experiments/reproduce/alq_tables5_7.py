"""Adaptive levels, Tables 5 to 7: what quantizing a gradient and fitting its levels costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

import gtrace
from gtrace.coding import ENVELOPE_BYTES
from gtrace.types import Key
from gtrace_experiments.reproduce._alq import GRID_NOTE, LAW_NOTE, METHODS, PAPER, paper_law, record, spec
from gtrace_experiments.reproduce._training import small_task
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUCKETS = (64, 256, 1024, 8192, 16384)
BITS = (2, 3, 4, 5, 6, 7, 8)
FITTED = ("ALQ", "ALQ-N")
#: level updates in how many steps, with the paper's schedule: 100, 2,000, then every 10,000
UPDATES, STEPS = 10, 80_000
#: published ratio of a ResNet-18 step to float32, bits by bucket size
RESNET18 = {
    2: (0.23, 0.21, 0.19, 0.19, 0.19),
    3: (0.23, 0.21, 0.21, 0.21, 0.21),
    4: (0.23, 0.23, 0.21, 0.21, 0.21),
    5: (0.23, 0.23, 0.23, 0.23, 0.23),
    6: (0.25, 0.23, 0.23, 0.23, 0.23),
    7: (0.25, 0.23, 0.25, 0.23, 0.23),
    8: (0.26, 0.25, 0.25, 0.25, 0.25),
}
#: published cost of three updates over 60 epochs, percent of float32 training, 3 bits by bucket size
UPDATE_PERCENT = {"ALQ-N": (0.89, 0.55, 0.47, 0.49, 0.52), "ALQ": (0.91, 0.51, 0.39, 0.42, 0.42)}
#: "the same cost": encoding and decoding may take so many times as long as with uniform levels
SAME = 1.5


def seconds_of(values: NDArray[np.float32], text: str, repeats: int) -> tuple[float, float, float]:
    """CPU seconds of fitting, the least of encoding and decoding, and payload bits per value without the envelope."""
    codec = gtrace.codec(text)
    needs = codec.needs
    assert needs is not None
    start = time.process_time()
    state = codec.fit(codec.init(values.size), gtrace.MomentSketch.from_spec(values, needs), 0)
    fitting = time.process_time() - start
    shared, taken, size = codec.shared(state), [], 0
    for repeat in range(repeats):
        key = Key.derive(repeat, tensor="model", step=0)
        start = time.process_time()
        payload = codec.encode(state, values, key)
        codec.decode(shared, payload, values.size)
        taken.append(time.process_time() - start)
        size = len(payload)
    return fitting, min(taken), 8 * (size - ENVELOPE_BYTES) / values.size


def run(context: Context) -> Outcome:
    """One gradient of a short training; every setting on it."""
    task, data = small_task(context, "ResNet-18 and ResNet-50 on ImageNet")
    steps = 3 if context.quick else 40
    context.say("training")
    record(task, context.seed, 1, [0], [], batch_size=32, batches=1)
    start = time.process_time()
    (trace,) = record(task, context.seed, steps, [steps - 1], [], batch_size=32, batches=1)
    step_seconds = (time.process_time() - start) / steps
    gradient = np.concatenate([trace.read(info.name, steps - 1) for info in trace.tensors])
    repeats = 2 if context.quick else 15
    more = "scope=model,coder=fixed"
    kernels: dict[tuple[int, int], tuple[float, float, float]] = {}
    for bits in (2, 3) if context.quick else BITS:
        context.say(f"{bits} bits")
        for size in BUCKETS:
            seconds_of(gradient, spec("QSGDinf", bits, size, more), 1)
            kernels[bits, size] = seconds_of(gradient, spec("QSGDinf", bits, size, more), repeats)
    methods = {}
    for name in METHODS:
        seconds_of(gradient, spec(name, 3, 8192, more), 1)
        methods[name] = seconds_of(gradient, spec(name, 3, 8192, more), repeats)
    updates = {}
    for name in FITTED:
        for bits in (3,) if context.quick else (3, 4, 6, 8):
            context.say(f"fitting {name}, {bits} bits")
            texts = {"gradients": spec(name, bits, 8192, more)}
            if bits == 3:
                texts["truncated normals"] = spec(name, bits, 8192, more, paper_law(name))
            for law, text in texts.items():
                updates[name, bits, law] = min(seconds_of(gradient, text, 1)[0] for _ in range(2))
    shares = {key: 100 * value * UPDATES / (STEPS * step_seconds) for key, value in updates.items()}
    adaptive = max(methods[name][1] for name in ("ALQ", "ALQ-N", "AMQ", "AMQ-N"))
    uniform = methods["QSGDinf"][1]
    three = kernels[3, 8192]
    slowest, fastest = (pick(found[1] for found in kernels.values()) for pick in (max, min))
    own = max(share for (_, bits, law), share in shares.items() if bits == 3 and law == "gradients")
    return Outcome(
        checks=(
            Check(
                "3 bits make a step take a fifth of the time (ResNet-18, 1 Gbit/s)",
                "a payload of 3 bits in buckets of 8192 is at most 0.21 of float32's bytes, so that the network "
                "allows it",
                f"{three[2] / 32:.3f}",
                three[2] / 32 <= 0.21,
            ),
            Check(
                "adaptive levels cost as much per step as fixed ones",
                f"encoding and decoding take at most {SAME} times as long as with QSGDinf, 3 bits, buckets of 8192",
                f"{adaptive / uniform:.2f} times",
                adaptive <= SAME * uniform,
            ),
            Check(
                "buckets and bits hardly matter",
                "the slowest of all settings of QSGDinf takes at most 1.5 times as long as the fastest, training step "
                "included (published: 1.37)",
                f"{(step_seconds + slowest) / (step_seconds + fastest):.2f} times; without the training step "
                f"{slowest / fastest:.2f}",
                step_seconds + slowest <= 1.5 * (step_seconds + fastest),
            ),
            Check(
                "updates of levels are negligible",
                f"{UPDATES} of them take at most 0.5 % of the CPU time of {STEPS} steps at 3 bits",
                f"{own:.3f} %",
                own <= 0.5,
            ),
        ),
        tables=(
            Table(
                f"QSGDinf on a gradient of {gradient.size} values: CPU time of encoding and decoding, % of a step",
                ("bits", *(f"bucket {size}" for size in BUCKETS)),
                tuple(
                    (bits, *(100 * kernels[bits, size][1] / step_seconds for size in BUCKETS))
                    for bits in dict.fromkeys(bits for bits, _ in kernels)
                ),
                f"A step of one worker with 32 images takes {1e3 * step_seconds:.1f} ms of CPU time.",
            ),
            Table(
                "Bits per value in the payload, without further coding",
                ("bits", *(f"bucket {size}" for size in BUCKETS)),
                tuple(
                    (bits, *(kernels[bits, size][2] for size in BUCKETS))
                    for bits in dict.fromkeys(bits for bits, _ in kernels)
                ),
                "Norms included.",
            ),
            Table(
                "3 bits, buckets of 8192: CPU time of encoding and decoding",
                ("method", "ms", "% of a step"),
                tuple((name, 1e3 * found[1], 100 * found[1] / step_seconds) for name, found in methods.items()),
            ),
            Table(
                "One update of the levels, buckets of 8192",
                ("method", "bits", "fitted to", "ms", f"% of a training with {UPDATES} in {STEPS} steps"),
                tuple((*key, 1e3 * value, shares[key]) for key, value in updates.items()),
                "The sketch of the gradient is included.",
            ),
        ),
        charts=(
            Chart(
                (
                    Panel(
                        tuple(
                            Curve(
                                f"bucket {size}",
                                tuple(dict.fromkeys(bits for bits, _ in kernels)),
                                tuple(
                                    100 * found[1] / step_seconds
                                    for (_, bucket), found in kernels.items()
                                    if bucket == size
                                ),
                            )
                            for size in BUCKETS
                        ),
                        "Encoding and decoding with QSGDinf",
                        "bits",
                        "% of a step's CPU time",
                    ),
                    Panel(
                        tuple(
                            Curve(name, (name,), (100 * found[1] / step_seconds,), method=METHODS[name])
                            for name, found in methods.items()
                        ),
                        "All methods, 3 bits, buckets of 8192",
                        "",
                        "% of a step's CPU time",
                        bars=True,
                    ),
                ),
                "CPU time of encoding and decoding one worker's gradient, over that of its training step.",
            ),
        ),
        data=data,
        notes=(
            "The paper's times are of four V100s on 1 Gbit/s. Nothing here measures a GPU or a network: CPU time of "
            "the codecs beside that of a training step, and bytes, are what can be measured.",
            GRID_NOTE,
            LAW_NOTE,
        ),
    )


EXPERIMENT = Experiment(
    name="alq-tables5-7",
    title="what quantizing and fitting cost",
    paper=PAPER,
    where="Tables 5 to 7",
    claim=(
        "On 1 Gbit/s a quantized step takes 0.19 to 0.26 of a float32 step (ResNet-18), whatever the bits and bucket "
        "size; adaptive methods cost as much as fixed ones, and updates of levels 0.4 to 0.5 % of training at 3 bits."
    ),
    recipe=(
        "One gradient of ResNet-8 after 40 steps, CPU times of each codec on it, least of 15, beside the CPU time of a "
        "step on 32 images. GPU and network times of the paper are not repeated."
    ),
    published=(
        Table(
            "step of ResNet-18 over that with float32",
            ("bits", *(f"bucket {size}" for size in BUCKETS)),
            tuple((bits, *ratios) for bits, ratios in RESNET18.items()),
        ),
        Table(
            "three updates of 3-bit levels over 60 epochs of float32 training, %",
            ("method", *(f"bucket {size}" for size in BUCKETS)),
            tuple((name, *percents) for name, percents in UPDATE_PERCENT.items()),
        ),
    ),
    run=run,
)
