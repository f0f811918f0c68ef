"""What a sweep can do with weights of which a trace keeps a sample of blocks, and what it makes of the sample.

Aligned blocks are drawn without replacement, each as likely as any other, so a sum over the whole is estimated by
the ratio to the energy, which is known exactly: ||Q(g) - g||^2 by (sample's error / sample's energy) ||g||^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.codecs import Codec, expecting
from gtrace.coding import ENVELOPE_BYTES
from gtrace.metrics import ratio
from gtrace.sketch import MomentSketch
from gtrace.sweep.replay import Replay
from gtrace.trace.blocks import BlockSample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gtrace.metrics import Reference
    from gtrace.sweep.replay import Totals
    from gtrace.sweep.rows import Row
    from gtrace.trace import TensorInfo

#: Parts of a sample whose scatter tells the error of an estimate.
_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Whole:
    """What is known exactly of a gradient of which a sample is stored.

    Attributes:
        size: number of its values.
        energy: ||g||^2 over the finite ones.
        mean_abs: mean |g|, non-finite ones taken as zero.
    """

    size: int
    energy: float
    mean_abs: float


def sample_of(info: TensorInfo) -> BlockSample | None:
    """The blocks that are stored of a tensor, None where all of it is."""
    return BlockSample.read(None if info.sample is None else dict(info.sample))


def sample_obstacle(item: Codec, sample: BlockSample) -> str | None:
    """Why a codec cannot be judged from a sample of blocks, None where it can."""
    more = "capture without --max-elements"
    needs = item.needs
    if item.stateful:
        return f"what they remember of the whole tensor is not there: {more}"
    if needs is None or not expecting(item) or type(item).view is not Codec.view or item.allocates:
        return f"they look at the whole tensor at once (thresholds, ranges, signs): {more}"
    if needs.scope == "model":
        return f"buckets of the whole model run from tensor to tensor: {more}"
    if needs.norm == "none":
        if "sparsity" in item.parameters:
            return f"their threshold hangs on the whole tensor: {more}"
        return None
    if needs.bucket_size is None:
        return f"their norm is that of the whole tensor: {more}, or give a bucket size that divides {sample.block}"
    if sample.block % needs.bucket_size:
        return f"buckets of {needs.bucket_size} do not fit into blocks of {sample.block}: give one that divides it"
    return None


class SampledReplay(Replay):
    """The rows of a sample, made to stand for the whole tensor, each with its sampling error."""

    def _codec_rows(
        self, codec: Codec, draws: tuple[int, ...], index: int, reference: Reference | Totals, common: Row
    ) -> Iterator[tuple[Row, dict[str, float]]]:
        sample, step = self._job.sample, self._job.steps[index]
        assert sample is not None
        whole = self._source.whole(self._job.tensor, step)
        scatter = self._scatter(codec, index, sample)
        note = f"sample of {sample.kept} of {sample.blocks} blocks, {scatter}"
        for row, spent in super()._codec_rows(codec, draws, index, reference, common):
            yield _stretched(row, note, whole, reference.size, self._job.dtype_bits), spent

    def _scatter(self, codec: Codec, index: int, sample: BlockSample) -> str:
        """The standard error of the relative variance, from groups of blocks, as a part of it."""
        groups = min(_GROUPS, sample.kept)
        if groups < 2 or codec.needs is None:
            return "sampling error unknown"
        state = self._ready_state(codec, index)
        errors, energies = np.empty(groups), np.empty(groups)
        values, _ = self._read(index)
        for group in range(groups):
            part = _every(values, sample, group, groups)
            errors[group] = codec.expect(state, MomentSketch.from_spec(part, codec.needs)).squared_error
            energies[group] = float(np.square(part, dtype=np.float64).sum())
        total = float(energies.sum())
        mean = ratio(float(errors.sum()), total)
        if not mean > 0:
            return "sampling error unknown"
        # Linearized ratio of sums over groups, drawn without replacement.
        left = 1.0 - sample.kept / sample.blocks
        deviation = math.sqrt(left * groups / (groups - 1) * float(np.square(errors - mean * energies).sum())) / total
        return f"sampling error {deviation / mean:.1%}"


def _every(values: NDArray[np.float32], sample: BlockSample, first: int, stride: int) -> NDArray[np.float32]:
    """Every so many-th of the stored blocks."""
    blocks = [values[start : start + sample.block] for start in range(0, values.size, sample.block)]
    return np.concatenate(blocks[first::stride])


def _stretched(row: Row, note: str, whole: Whole, stored: int, dtype_bits: int) -> Row:
    """A row about the sample as one about the whole."""
    share = stored / max(1, whole.size)
    out = {**row, "n": whole.size, "note": "; ".join(filter(None, (row.get("note"), note)))}
    if "energy" not in row:
        return out
    # The ratio is the sample's; the energy is known.
    out["squared_error"] = ratio(row["squared_error"], row["energy"]) * whole.energy if row["squared_error"] else 0.0
    out["energy"], out["mean_abs"] = whole.energy, whole.mean_abs
    out["bits_envelope"] = 8.0 * ENVELOPE_BYTES / max(1, whole.size)
    # What is sent once serves all values.
    out["bits_shared"] = row["bits_shared"] * share
    total = row["bits_payload"] + out["bits_shared"]
    return out | {
        "bits_total": total,
        "ratio_float32": ratio(32.0, total),
        "ratio_dtype": ratio(float(dtype_bits), total),
    }
