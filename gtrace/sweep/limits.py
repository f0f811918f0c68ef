"""What a sweep can do with a tensor that is too large, or that the trace stores as sketches or a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.buckets import MANTISSA
from gtrace.codecs import Codec, expecting
from gtrace.errors import UsageError
from gtrace.trace.rows import BlockSample
from gtrace.trace.sketches import sketch_name
from gtrace.types import STORED_MANTISSA, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.sweep.jobs import Job
    from gtrace.trace import TensorInfo


def sample_obstacle(item: Codec, sample: BlockSample) -> str | None:
    """Why a codec cannot be judged from a sample of blocks, None if it can."""
    more = "capture without --max-elements"
    needs = item.needs
    if item.stateful:
        return f"their memory of the whole tensor is not stored: {more}"
    if needs is None or not expecting(item) or type(item).view is not Codec.view or item.allocates:
        return f"they need the whole tensor at once (thresholds, ranges, signs): {more}"
    if needs.scope == "model":
        return f"buckets of the whole model run from tensor to tensor: {more}"
    if needs.norm == "none":
        block = item.parameters.get("block") or 1
        if item.whole_tensor:
            return f"their scale or threshold depends on the whole tensor: {more}"
        return f"blocks of {block} do not fit into those of {sample.block}: {more}" if sample.block % block else None
    if needs.bucket_size is None:
        return f"their norm is that of the whole tensor: {more}, or give a bucket size that divides {sample.block}"
    if sample.block % needs.bucket_size:
        return f"buckets of {needs.bucket_size} do not fit into blocks of {sample.block}: give one that divides it"
    return None


def sketch_obstacle(item: Codec, info: TensorInfo) -> str | None:
    """Why a codec cannot be judged from a tensor's sketches."""
    if item.needs is None or not expecting(item) or type(item).view is not Codec.view:
        return "they have no closed form and need values: capture without --sketch"
    spec = item.needs._replace(scope="tensor")
    if spec in info.sketches:
        return None
    if spec.bucket_moments:
        return "they need values (moments of each bucket are not stored): capture without --sketch"
    if spec != SummarySpec(spec.norm, spec.bucket_size):
        return "sketches of clipped values or exact tails are not stored: capture without --sketch"
    name = sketch_name(spec)
    return f"they need the sketch {name}, which is not stored: capture with --sketch {name}"


#: default number of elements in a chunk
CHUNK = 1 << 24
#: A tensor of more chunks than this is never held whole.
MOST_CHUNKS = 4
#: the largest chunk: random numbers of a tensor that is encoded at once repeat after 2^32 values, those of parts do not
MOST = (1 << 32) // MOST_CHUNKS


def spec_in_chunks(spec: SummarySpec, chunk: int) -> bool:
    """Whether a tensor's sketch is a sum over its chunks, given its norm if it is one bucket and where it is cut."""
    return not spec.bucket_moments and chunk % (spec.bucket_size or 1) == 0


def _fit_obstacle(item: Codec, chunk: int) -> str | None:
    """Why a codec cannot be fitted to, or judged from, the sum of the chunks' sketches."""
    needs = item.needs
    if needs is None or spec_in_chunks(needs, chunk):
        return None
    if needs.bucket_moments:
        return "is fitted to moments of each bucket"
    return f"has buckets of {needs.bucket_size}, which do not divide the chunk"


def draw_obstacle(item: Codec, chunk: int) -> str | None:
    """Why a codec cannot encode a tensor chunk by chunk with the same result as whole; None if it can."""
    obstacle = _fit_obstacle(item, chunk)
    if obstacle is not None:
        return obstacle
    if item.part_multiple is None:
        return "needs all values at once"
    return f"has blocks of {item.part_multiple}, which do not divide the chunk" if chunk % item.part_multiple else None


#: how far expectations from sketches of the default width can be off; the tests allow as much
_WITHIN = "by up to 0.1%, by up to 0.5% where levels of a small tensor were fitted to another step"
_SKETCHES, _SAMPLES = "sketches", "samples of their blocks"


class Limits:
    """Sorts the codecs of a sweep by what stored sketches, samples and chunks of values can show.

    Args:
        infos: the swept tensors.
        codecs: the codecs.
        draws: number of encodings wanted.
        chunk: elements of a chunk.
    """

    def __init__(self, infos: Sequence[TensorInfo], codecs: Sequence[Codec], draws: int, chunk: int) -> None:
        self._infos, self._codecs, self._draws, self._chunk = infos, codecs, draws, chunk
        self._sketched = [info for info in infos if info.sketches]
        self._samples = {info.name: sample for info in infos if (sample := BlockSample.read(info.sample)) is not None}
        #: tensors without all of their values
        self._partial = [info for info in infos if info.sketches or info.name in self._samples]
        #: (what is stored, why) -> names of codecs
        self._skipped: dict[tuple[str, str], dict[str, None]] = {}
        #: the same for tensors that are too large
        self._large: dict[tuple[str, str], dict[str, None]] = {}
        self._tensors: dict[str, None] = {}

    def keep(self, codecs: Sequence[Codec], info: TensorInfo | None) -> list[Codec]:
        """The codecs that can run over a tensor; for None, over the whole model, which is the sum of the tensors."""
        kept = []
        for item in codecs:
            # Each tensor's share depends on all tensors: if one lacks the sketch, the codec cannot run on any.
            others = self._partial if info is None or item.allocates else []
            found = (self._obstacle(item, one) for one in (*([] if info is None else [info]), *others))
            why = next(filter(None, found), None)
            if why is None and info is None and self._sketched:
                model = self._model_obstacle(item)
                why = None if model is None else (_SKETCHES, model)
            if why is None:
                kept.append(item)
            else:
                self._skipped.setdefault(why, {})[item.name] = None
        return kept

    def split(self, job: Job, codecs: Sequence[Codec]) -> list[tuple[bool, int, list[Codec]]]:
        """Codecs with whether they read the tensor in chunks, and their number of draws."""
        if job.sketched or job.sample is not None or job.size <= self._chunk:
            return [(False, 0 if job.sketched else self._draws, list(codecs))]
        whole: list[Codec] = []
        parts: list[Codec] = []
        expected: list[Codec] = []
        for item in codecs:
            unfit = _fit_obstacle(item, self._chunk)
            # Whether its expectations can be computed from the sum of the chunks' sketches.
            summed = expecting(item) and type(item).view is Codec.view and unfit is None
            why = draw_obstacle(item, self._chunk) if self._draws else unfit
            if self._draws and why is None:
                parts.append(item)
            elif not self._draws and summed:
                expected.append(item)
            elif job.size <= MOST_CHUNKS * self._chunk:
                # Without draws and expectations a codec has nothing to do.
                whole.append(item)
            else:
                if summed:
                    expected.append(item)
                if self._draws or expecting(item):
                    what = "no rows of draws of" if summed else "without"
                    self._large.setdefault((what, why or ""), {})[item.name] = None
                    self._tensors[job.tensor] = None
        return [(False, self._draws, whole), (True, self._draws, parts), (True, 0, expected)]

    def lines(self) -> list[str]:
        """One line for each reason why something is missing, and one on how exact sketches are."""
        return [*self._exactness(), *self._missing(), *self._too_large()]

    def _exactness(self) -> list[str]:
        coarse = min((info.mantissa for info in self._sketched), default=MANTISSA)
        if coarse >= MANTISSA or not any(expecting(item) for item in self._codecs):
            return []
        how = _WITHIN if coarse >= STORED_MANTISSA else "by more than 0.1%"
        kept = f"{len(self._sketched)} of {len(self._infos)} tensors are kept as sketches of {coarse} mantissa bits"
        return [f"{kept}: expected errors differ from the values' {how}"]

    def _missing(self) -> list[str]:
        counts = {_SKETCHES: len(self._sketched), _SAMPLES: len(self._samples)}
        what = {kept: f"{count} of {len(self._infos)} tensors are kept as {kept}" for kept, count in counts.items()}
        lines = []
        if self._sketched and self._draws and any(expecting(item) for item in self._codecs):
            needs = "no rows of draws, which need values (capture without --sketch), only expectations"
            lines.append(f"{what[_SKETCHES]}: {needs}")
        return lines + [
            f"{what[kept]}: without {', '.join(names)}: {why}" for (kept, why), names in self._skipped.items()
        ]

    def _too_large(self) -> list[str]:
        names = list(self._tensors)
        where = f"{len(names)} tensors ({', '.join(names[:3])}{', ...' * (len(names) > 3)}) have"
        if len(names) == 1:
            where = f"{names[0]} has"
        beyond = f"{where} more than {MOST_CHUNKS} chunks of {self._chunk} values"
        return [
            f"{beyond}: {what} {', '.join(codecs)}, which {why}: raise --chunk if there is memory for it"
            for (what, why), codecs in self._large.items()
        ]

    def check(self) -> None:
        """Raise if nothing at all is left.

        Raises:
            UsageError: no codec can run over any of the tensors.
        """
        if not self._partial:
            return
        tensors = [item for item in self._codecs if item.needs is None or item.needs.scope == "tensor"]
        models = [item for item in self._codecs if item not in tensors]
        if not self.keep(models, None) and not any(self.keep(tensors, info) for info in self._infos):
            raise UsageError(f"sweep: nothing is left to do; {'; '.join(self._missing()[-2:])}")

    def _obstacle(self, item: Codec, info: TensorInfo) -> tuple[str, str] | None:
        """Why a codec cannot be judged from what is stored of a tensor, and what is stored."""
        sample = self._samples.get(info.name)
        if sample is not None:
            why = sample_obstacle(item, sample)
            return None if why is None else (_SAMPLES, why)
        why = sketch_obstacle(item, info) if info.sketches else None
        return None if why is None else (_SKETCHES, why)

    def _model_obstacle(self, item: Codec) -> str | None:
        """Why the sum of the tensors' sketches is not a sketch of the whole model."""
        assert item.needs is not None
        if any(info.merged > 1 for info in self._sketched):
            return "steps are merged in some tensors and not in others, so there is no whole model: see --tensors"
        if item.needs.norm == "none":
            return None
        bucket = item.needs.bucket_size
        # A bucket that runs from one tensor into the next is in no tensor's sketch.
        if bucket is None or any(info.size % bucket or info.kind == "neural" for info in self._infos[:-1]):
            return "buckets of the whole model run from tensor to tensor and need values: capture without --sketch"
        return None
