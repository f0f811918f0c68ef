"""What a sweep can do with tensors of which a trace keeps sketches, or a sample, and what it says about the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.buckets import MANTISSA
from gtrace.codecs import Codec, expecting
from gtrace.errors import UsageError
from gtrace.sweep.sampled import sample_obstacle, sample_of
from gtrace.trace.sketches import sketch_name
from gtrace.types import STORED_MANTISSA, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.sketch import MomentSketch
    from gtrace.trace import TensorInfo


#: how far expectations from sketches of the usual width can be off; what the tests of them allow
_WITHIN = "by up to 0.1%, by up to 0.5% where levels of a small tensor were fitted to another step"


class Limits:
    """Sorts the codecs of a sweep into those that stored sketches and samples serve and those that they do not.

    Args:
        infos: the tensors that are swept.
        codecs: the codecs.
        draws: encodings that were asked for.
    """

    _SKETCHES, _SAMPLES = "sketches", "samples of their blocks"

    def __init__(self, infos: Sequence[TensorInfo], codecs: Sequence[Codec], draws: int) -> None:
        self._infos = infos
        self._sketched = [info for info in infos if info.sketches]
        self._samples = {info.name: sample for info in infos if (sample := sample_of(info)) is not None}
        #: Those of which there are not all values.
        self._partial = [info for info in infos if info.sketches or info.name in self._samples]
        self._draws = draws
        self._codecs = codecs
        #: what of the trace and why -> names of codecs
        self._skipped: dict[tuple[str, str], dict[str, None]] = {}
        # Every tensor's share hangs on all of them, so one that lacks the sketch keeps the codec from all.
        self._left_out = {
            str(item)
            for item in codecs
            if item.allocates and any(self._obstacle(item, info) is not None for info in self._partial)
        }

    @property
    def any_sketched(self) -> bool:
        """Whether there is a tensor without values."""
        return bool(self._sketched)

    def for_tensor(self, info: TensorInfo, codecs: Sequence[Codec]) -> list[Codec]:
        """Those that can run over one tensor: all of them where there are values."""
        kept = []
        for item in codecs:
            obstacle = self._obstacle(item, info)
            if obstacle is None and str(item) in self._left_out:
                obstacle = next(filter(None, (self._obstacle(item, other) for other in self._partial)))
            if obstacle is None:
                kept.append(item)
            else:
                self._skipped.setdefault(obstacle, {})[item.name] = None
        return kept

    def for_model(self, codecs: Sequence[Codec]) -> list[Codec]:
        """Those that can run over the whole model's gradient, which is then the sum of the tensors' sketches."""
        kept = []
        for item in codecs:
            obstacle = next(filter(None, (self._obstacle(item, info) for info in self._partial)), None)
            why = self._model_obstacle(item) if obstacle is None and self._sketched else None
            obstacle = obstacle if why is None else (self._SKETCHES, why)
            if obstacle is None:
                kept.append(item)
            else:
                self._skipped.setdefault(obstacle, {})[item.name] = None
        return kept

    def lines(self) -> list[str]:
        """One line for each reason for which something is missing, and one on how exact sketches are."""
        coarse = min((info.mantissa for info in self._sketched), default=MANTISSA)
        if coarse >= MANTISSA or not any(expecting(item) for item in self._codecs):
            return self._missing()
        how = _WITHIN if coarse >= STORED_MANTISSA else "by more than 0.1%"
        kept = f"{len(self._sketched)} of {len(self._infos)} tensors are kept as sketches of {coarse} mantissa bits"
        return [f"{kept}: expected errors differ from the values' {how}", *self._missing()]

    def _missing(self) -> list[str]:
        counts = {self._SKETCHES: len(self._sketched), self._SAMPLES: len(self._samples)}
        what = {kept: f"{count} of {len(self._infos)} tensors are kept as {kept}" for kept, count in counts.items()}
        lines = []
        if self._sketched and self._draws and any(expecting(item) for item in self._codecs):
            needs = "no rows of draws, which need values (capture without --sketch), only expectations"
            lines.append(f"{what[self._SKETCHES]}: {needs}")
        for (kept, why), names in self._skipped.items():
            lines.append(f"{what[kept]}: without {', '.join(names)}: {why}")
        return lines

    def check(self) -> None:
        """Raise where nothing at all is left.

        Raises:
            UsageError: no codec can run over any of the tensors.
        """
        if not self._partial:
            return
        tensors = [item for item in self._codecs if item.needs is None or item.needs.scope == "tensor"]
        models = [item for item in self._codecs if item not in tensors]
        if not self.for_model(models) and not any(self.for_tensor(info, tensors) for info in self._infos):
            raise UsageError(f"sweep: nothing is left to do; {'; '.join(self._missing()[-2:])}")

    def _obstacle(self, item: Codec, info: TensorInfo) -> tuple[str, str] | None:
        """Why a codec cannot be judged from what is kept of a tensor, and what that is."""
        sample = self._samples.get(info.name)
        if sample is not None:
            why = sample_obstacle(item, sample)
            return None if why is None else (self._SAMPLES, why)
        why = self._sketch_obstacle(item, info) if info.sketches else None
        return None if why is None else (self._SKETCHES, why)

    def _sketch_obstacle(self, item: Codec, info: TensorInfo) -> str | None:
        """Why a codec cannot be judged from a tensor's sketches."""
        if item.needs is None or not expecting(item) or type(item).view is not Codec.view:
            return "no closed form, they need values: capture without --sketch"
        spec = item.needs._replace(scope="tensor")
        if spec in info.sketches:
            return None
        if spec.bucket_moments:
            return "moments of every bucket are not stored, they need values: capture without --sketch"
        if spec != SummarySpec(spec.norm, spec.bucket_size):
            return "sketches of clipped values or exact tails are not stored: capture without --sketch"
        name = sketch_name(spec)
        return f"they need the sketch {name}, which is not stored: capture with --sketch {name}"

    def _model_obstacle(self, item: Codec) -> str | None:
        """Why the sum of the tensors' sketches is not the sketch of the whole model."""
        assert item.needs is not None
        if any(info.merged > 1 for info in self._sketched):
            return "steps are merged in some tensors and not in others, so there is no whole model: see --tensors"
        if item.needs.norm == "none":
            return None
        bucket = item.needs.bucket_size
        # A bucket that runs from one tensor into the next is in no tensor's sketch.
        if bucket is None or any(info.size % bucket or info.kind == "neural" for info in self._infos[:-1]):
            return "buckets of the whole model run from tensor to tensor, they need values: capture without --sketch"
        return None


def total(sketches: Sequence[MomentSketch]) -> MomentSketch:
    """The sum of at least one."""
    whole = sketches[0]
    for sketch in sketches[1:]:
        whole = whole + sketch
    return whole
