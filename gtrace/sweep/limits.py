"""What a sweep can do with a tensor that is too large, or of which a trace keeps sketches or a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gtrace.buckets import MANTISSA
from gtrace.codecs import Codec, expecting
from gtrace.errors import UsageError
from gtrace.trace.rows import BlockSample
from gtrace.trace.sketches import sketch_name
from gtrace.types import STORED_MANTISSA, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.trace import TensorInfo


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
        block = item.parameters.get("block") or 1
        if item.whole_tensor:
            return f"their scale or threshold hangs on the whole tensor: {more}"
        return f"blocks of {block} do not fit into those of {sample.block}: {more}" if sample.block % block else None
    if needs.bucket_size is None:
        return f"their norm is that of the whole tensor: {more}, or give a bucket size that divides {sample.block}"
    if sample.block % needs.bucket_size:
        return f"buckets of {needs.bucket_size} do not fit into blocks of {sample.block}: give one that divides it"
    return None


#: elements of a chunk unless told otherwise
CHUNK = 1 << 24
#: A tensor of more chunks than this is never in memory as a whole.
MOST_CHUNKS = 4


def spec_in_chunks(spec: SummarySpec, chunk: int) -> bool:
    """Whether a tensor's sketch is a sum over its chunks, given the norm of the whole where it is one bucket."""
    return spec.clip is None and not spec.bucket_moments and chunk % (spec.bucket_size or 1) == 0


def in_chunks(item: Codec, chunk: int) -> bool:
    """Whether a codec has expectations, and from the sum of the chunks' sketches."""
    return expecting(item) and _obstacle(item, chunk) is None


def drawn_in_chunks(item: Codec, chunk: int) -> bool:
    """Whether a codec encodes a tensor chunk by chunk as it does the whole."""
    return _draw_obstacle(item, chunk) is None


def _obstacle(item: Codec, chunk: int) -> str | None:
    """Why a codec cannot be fitted to, or judged from, the sum of the chunks' sketches."""
    needs = item.needs
    if type(item).view is not Codec.view:
        return "is fitted to values that are known as a whole"
    if needs is None or spec_in_chunks(needs, chunk):
        return None
    if needs.clip is not None:
        return "clips by the deviation of all values"
    if needs.bucket_moments:
        return "is fitted to moments of every bucket"
    return f"has buckets of {needs.bucket_size}, which do not divide the chunk"


def _draw_obstacle(item: Codec, chunk: int) -> str | None:
    """Why a codec cannot encode a tensor chunk by chunk."""
    if item.stateful:
        return "remembers every value"
    obstacle = _obstacle(item, chunk)
    if obstacle is not None:
        return obstacle
    if item.part_multiple is None:
        return "looks at all values at once"
    return f"has blocks of {item.part_multiple}, which do not divide the chunk" if chunk % item.part_multiple else None


class Split(NamedTuple):
    """Codecs of one tensor.

    Attributes:
        whole: those that get all values at once.
        parts: those that get a chunk at a time, and have all their rows.
        expected: those of which a chunk at a time gives expectations alone.
    """

    whole: list[Codec]
    parts: list[Codec]
    expected: list[Codec]


class Large:
    """Sorts codecs for tensors beyond a chunk, and keeps account of what is skipped.

    Args:
        chunk: elements of a chunk.
        draws: encodings that were asked for.
    """

    def __init__(self, chunk: int, draws: int) -> None:
        self._chunk = chunk
        self._draws = draws
        #: what is missing and why -> names of codecs
        self._skipped: dict[tuple[str, str], dict[str, None]] = {}
        self._tensors: dict[str, dict[str, None]] = {}

    def split(self, tensor: str, size: int, codecs: Sequence[Codec]) -> Split:
        """How each of the codecs goes over a tensor of this size."""
        if size <= self._chunk:
            return Split(list(codecs), [], [])
        found = Split([], [], [])
        for item in codecs:
            if self._draws and drawn_in_chunks(item, self._chunk):
                found.parts.append(item)
            elif not self._draws and in_chunks(item, self._chunk):
                found.expected.append(item)
            elif size <= MOST_CHUNKS * self._chunk:
                # Without draws there is nothing to do for a codec that expects nothing.
                found.whole.append(item)
            else:
                if in_chunks(item, self._chunk):
                    found.expected.append(item)
                self._skip(tensor, item)
        return found

    def _skip(self, tensor: str, item: Codec) -> None:
        expected = in_chunks(item, self._chunk)
        if not (self._draws or expecting(item)):
            return
        why = _draw_obstacle(item, self._chunk) if self._draws else _obstacle(item, self._chunk)
        what = "no rows of draws of" if expected else "without"
        self._skipped.setdefault((what, why or ""), {})[item.name] = None
        self._tensors.setdefault(tensor, {})

    def lines(self) -> list[str]:
        """One line for each thing that is skipped."""
        names = list(self._tensors)
        where = (
            names[0]
            if len(names) == 1
            else f"{len(names)} tensors ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        )
        verb = "has" if len(names) == 1 else "have"
        beyond = f"{where} {verb} more than {MOST_CHUNKS} chunks of {self._chunk} values"
        return [
            f"{beyond}: {what} {', '.join(codecs)}, which {why}: raise --chunk where there is memory for it"
            for (what, why), codecs in self._skipped.items()
        ]


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
