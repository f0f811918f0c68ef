"""The laws that every codec obeys; run them on your own codec: ``gtrace.testing.check_codec(MyCodec)``.

A codec's claims (expected error, bits, unbiasedness) are compared with encode and decode.
All randomness is keyed, so a check gives the same result every time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import struct
import traceback
import tracemalloc
import warnings
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gtrace.buckets import bucket_scales
from gtrace.codecs import Codec, codec, expecting, level_grid
from gtrace.codecs.base import Averaged, advance
from gtrace.codecs.link import LinkOptions, Sender, changed, refitted
from gtrace.codecs.plugins import names_a_codec
from gtrace.coding.envelope import ENVELOPE_BYTES, MOST_PER_BYTE, open_envelope, seal
from gtrace.errors import GtraceError, PayloadError, UsageError
from gtrace.schedule import RefitSchedule
from gtrace.sketch import MomentSketch
from gtrace.types import Key, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gtrace.codecs.parts import Values

#: limit on a sampled mean's error in standard errors; about one correct check in 30,000 exceeds it
LIMIT = 4.2
#: true shapes of parameters: a scalar, a vector, matrices, a convolution's kernel
SHAPES = ((), (7,), (0, 5), (1, 64), (24, 30), (16, 8, 3, 3))


def tensors(seed: int = 0) -> Iterator[tuple[str, Values]]:
    """Named float32 tensors that break codecs: empty, degenerate, extreme, odd-sized, heavy-tailed."""
    rng = np.random.default_rng(seed)
    tiny = np.finfo(np.float32).smallest_subnormal
    huge = np.finfo(np.float32).max
    yield "empty", np.empty(0, np.float32)
    yield "one element", np.array([-0.3], np.float32)
    yield "one zero", np.zeros(1, np.float32)
    yield "zeros", np.zeros(1000, np.float32)
    yield "constant", np.full(777, 0.25, np.float32)
    yield "negative constant", np.full(65, -3.0, np.float32)
    yield "denormal", (tiny * rng.integers(-5, 6, 300)).astype(np.float32)
    yield "huge", (huge * rng.uniform(-1, 1, 300)).astype(np.float32)
    yield "largest", np.array([huge, -huge, huge, 0.0], np.float32)
    yield "wide", (rng.choice([-1, 1], 500) * 2.0 ** rng.uniform(-120, 120, 500)).astype(np.float32)
    yield "one outlier", np.concatenate([rng.normal(0, 1e-6, 999), [1e3]]).astype(np.float32)
    yield "alternating", np.where(np.arange(2049) % 2 == 0, 1.0, -1.0).astype(np.float32)
    yield "zero bucket", np.concatenate([np.zeros(8192), rng.normal(size=100)]).astype(np.float32)
    yield "normal", rng.normal(0, 0.01, 8193).astype(np.float32)
    yield "heavy", rng.standard_t(3, 20_011).astype(np.float32)


def fitted(
    c: Codec, values: Values, step: int = 0, shape: tuple[int, ...] | None = None
) -> tuple[State, MomentSketch | None]:
    """The codec's state fitted on the tensor itself, and the sketch it was fitted to."""
    state = c.init(values.size, shape)
    if c.needs is None:
        return state, None
    sketch = MomentSketch.from_spec(c.view(state, values), c.needs)
    return refitted(c, state, sketch, step), sketch


def check_codec(c: Codec | type[Codec], *, seed: int = 0, draws: int = 24, spike: bool = True) -> None:
    """Run every law on a codec.

    Args:
        c: the codec, or its class, which is then checked with its defaults.
        seed: seed of tensors and keys.
        draws: encodings behind each sampled mean.
        spike: run the law on a million values of probability 1e-6, which takes a second.

    Raises:
        AssertionError: a law is broken; the message says which one and on which tensor. An error of the codec itself
            becomes one too, with the line that raised it.
    """
    c = _made(c)
    for what, law in _laws(c, seed, draws):
        if law.func is check_spike and not spike:
            continue
        try:
            with warnings.catch_warnings():
                # numpy's warning of lost numbers is a law that is broken, too.
                warnings.simplefilter("error", RuntimeWarning)
                law()
        except AssertionError:
            raise
        except Exception as error:  # whatever somebody's codec raises
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}, line {frame.lineno}"
            raise AssertionError(f"{c}{what}: {type(error).__name__}: {error} ({where})") from error


def _laws(c: Codec, seed: int, draws: int) -> Iterator[tuple[str, partial[None]]]:
    """What is checked, and the check of it, in their order."""
    found = dict(tensors(seed))
    heavy, normal = found["heavy"], found["normal"]
    yield ": its spec", partial(check_spec, c)
    for name, values in found.items():
        yield f" on {name}", partial(check_round_trip, c, name, values, seed)
    for shape in SHAPES:
        values = np.random.default_rng(seed).standard_t(4, math.prod(shape)).astype(np.float32)
        yield f" on shape {shape}", partial(check_round_trip, c, f"shape {shape}", values, seed, shape)
        if c.linear:
            yield f" on shape {shape}", partial(check_rounds, c, values, seed, shape)
    yield ": a payload that is wrong", partial(check_refusals, c, heavy, seed)
    yield ": a payload that is wrong", partial(check_forged, c, seed)
    yield ": two keys", partial(check_deterministic, c, heavy)
    for name in ("heavy", "normal", "one outlier", "zero bucket", "constant"):
        yield f": closed forms on {name}", partial(check_expectation, c, name, found[name], seed, draws)
    yield ": several steps", partial(check_steps, c, normal, seed)
    yield ": a tensor in pieces", partial(check_pieces, c, normal, seed)
    yield ": mean of several workers", partial(check_mean, c, "heavy", heavy, seed, draws)
    yield ": mean of several workers", partial(check_workers, c, heavy, seed, draws)
    if c.unbiased:
        yield ": a spike among a million values", partial(check_spike, c, seed)


def _made(c: Codec | type[Codec]) -> Codec:
    """A codec of what was given to :func:`check_codec`, a class among others."""
    if isinstance(c, Codec):
        return c
    given = getattr(c, "__name__", str(c))
    kind: object = c
    if not isinstance(kind, type) or not issubclass(kind, Codec):
        raise AssertionError(f"{given}: give a class that extends gtrace.codecs.Codec")  # noqa: TRY004 - a law
    missing = ", ".join(sorted(c.__abstractmethods__))
    assert not missing, f"{given}: it must define {missing}"
    known = {item.name for item in dataclasses.fields(c)}
    own = [name for name, kind in vars(c).get("__annotations__", {}).items() if "ClassVar" not in str(kind)]
    lost = sorted(set(own) - known)
    assert not lost, f"{given}: {lost[0]} is not a parameter yet; put @dataclass(frozen=True) before the class"
    bare = [item.name for item in dataclasses.fields(c) if "help" not in item.metadata]
    assert not bare, f"{given}: write {bare[0]} as gtrace.codecs.parameter(default, help)"
    try:
        return c()
    except TypeError as error:
        raise AssertionError(f"{given}: it cannot be made without arguments: {error}") from error


def check_deterministic(c: Codec, values: Values) -> None:
    """A codec that calls itself deterministic sends the same for every key."""
    state, _ = fitted(c, values)
    payloads = {c.encode(state, values, Key.derive(0, tensor="t", draw=draw)) for draw in range(2)}
    assert len(payloads) == 1 or not c.deterministic, f"{c}: deterministic, but its payload depends on the key"


def check_spec(c: Codec) -> None:
    """Codec -> spec string -> codec is the identity, and the value cannot be changed."""
    assert c.name, "a codec needs a name: name: ClassVar[str] = ..."
    assert names_a_codec(type(c).name), f"a codec's name has letters, digits, '_', '-' and '.', not {type(c).name!r}"
    try:
        again = codec(str(c))
    except GtraceError as error:
        # A codec under test need not be registered; one that is must come back.
        assert "no codec" in str(error), f"{c}: its own spec is refused: {error}"
        return
    assert type(again) is type(c), f"{c}: another codec has this name, {type(again).__module__}.{type(again).__name__}"
    assert again == c, f"{c}: its spec makes another codec, {again}"
    assert str(again) == str(c), f"{c}: its spec is not canonical, {again}"
    assert hash(again) == hash(c), f"{c}: equal codecs must have the same hash"


def check_round_trip(c: Codec, name: str, values: Values, seed: int = 0, shape: tuple[int, ...] | None = None) -> None:
    """Size kept, finite, decoded from bytes alone, deterministic for a key, state survives as plain arrays."""
    where = f"{c} on {name}"
    state, _ = fitted(c, values, shape=shape)
    assert state.shape == shape, f"{where}: init or fit lost the shape; return State(size, arrays, shape)"
    key = Key.derive(seed, tensor=name)
    before = values.copy()
    payload = c.encode(state, values, key)
    assert np.array_equal(values, before), f"{where}: encode changed its input"
    assert payload == c.encode(state, values, key), f"{where}: the same key gave other bytes"
    shared = c.shared(state)
    decoded = c.decode(shared, payload, values.size)
    assert decoded.dtype == np.float32, f"{where}: decoded {decoded.dtype}, not float32"
    assert decoded.shape == (values.size,), f"{where}: decoded shape {decoded.shape}"
    assert np.isfinite(decoded).all(), f"{where}: decoded values are not finite"
    simulated = c.simulate(state, values, key)
    assert np.array_equal(simulated.values, decoded), f"{where}: simulate made other values than decode"
    assert simulated.payload_bytes == len(payload), f"{where}: simulate says another length than the payload has"
    again = State.from_arrays(state.to_arrays())
    assert again.shape == shape, f"{where}: the shape did not survive to_arrays"
    assert c.encode(again, values, key) == payload, f"{where}: the state did not survive to_arrays"
    assert c.shared(again) == shared, f"{where}: shared bytes changed with to_arrays"
    if not values.any():
        assert not decoded.any(), f"{where}: zeros came back as something else"
    following = c.update(state, values, decoded)
    assert following.size == state.size, f"{where}: update changed the size"
    assert following.shape == shape, f"{where}: update lost the shape; use state.with_arrays"


def check_steps(c: Codec, values: Values, seed: int = 0, steps: int = 4) -> None:
    """What a receiver ends with at every step is what ``simulate`` says; both sides survive as plain arrays.

    Nothing that a codec is given is changed in place.
    """
    random = np.random.default_rng(seed)
    state, held = c.init(values.size), State(values.size)
    for step in range(steps):
        gradient = values + np.float32(0.1) * random.permutation(values)
        for given in (gradient, *state.arrays.values(), *held.arrays.values()):
            given.setflags(write=False)
        if c.needs is not None:
            state = refitted(c, state, MomentSketch.from_spec(c.view(state, gradient), c.needs), step)
        key = Key.derive(seed, tensor="steps", step=step)
        simulated = c.simulate(state, gradient, key)
        payload = c.encode(state, gradient, key)
        received, held = c.receive(held, c.shared(state), payload)
        assert np.array_equal(simulated.values, received), f"{c}: at step {step} simulate and a receiver differ"
        following = c.update(state, gradient, received)
        assert c.stateful or not changed(state.arrays, following.arrays), f"{c}: its state changes, so it is stateful"
        together = c.aggregate([received] * 3)
        assert np.allclose(together, received, rtol=1e-6, atol=0), f"{c}: aggregate changes what all workers sent"
        state = State.from_arrays(following.to_arrays())
        held = State.from_arrays(held.to_arrays())
        assert held.size == values.size, f"{c}: a receiver's memory changed its size"


def check_pieces(c: Codec, values: Values, seed: int = 0, shape: tuple[int, ...] | None = None, steps: int = 4) -> None:
    """A tensor in pieces, if the codec takes those, is sent like the whole: the same values and bits, step by step."""
    multiple = c.part_multiple or values.size
    length = multiple * max(1, values.size // 7 // multiple)
    options = LinkOptions(RefitSchedule((0,)))
    whole, pieces = (Sender(c, values.size, options, tensor="pieces", shape=shape) for _ in range(2))
    for step in range(steps if length < values.size else 0):
        gradient = np.random.default_rng((seed, step)).permutation(values)
        if step == steps - 1:
            # Many are equal.
            gradient = np.round(gradient, 2)
        cut = [gradient[start : start + length] for start in range(0, gradient.size, length)]
        if c.needs is not None and c.fits and step % 2 == 0:
            starts = range(0, gradient.size, length)
            seen = [c.view(state, part, at) for at, (state, part) in zip(starts, pieces.pieces(cut), strict=True)]
            together = np.concatenate(seen)
            assert np.array_equal(together, c.view(whole.state, gradient)), f"{c}: pieces are not viewed as the whole"
            summary, share = MomentSketch.from_spec(together, c.needs), 0.5 if c.allocates else None
            for sender in (whole, pieces):
                sender.state = refitted(c, sender.state, summary, step, share)
        key = Key.derive(seed, tensor="pieces", step=step)
        wanted = c.simulate(whole.state, gradient, key)
        parts = [one.part for one in pieces.send_pieces(partial(iter, cut), key)]
        decoded = np.concatenate([part.values for part in parts])
        assert np.array_equal(decoded, wanted.values), (
            f"{c}: at step {step} pieces decode to other values than the whole"
        )
        body, coded = c.measured(reduce(operator.add, parts), values.size)
        assert body + ENVELOPE_BYTES == wanted.payload_bytes, f"{c}: pieces have another length than the whole"
        assert np.allclose(coded, wanted.coded or coded, rtol=1e-12), f"{c}: pieces have other bits than the whole"
        whole.settle(gradient, wanted.values)


def check_rounds(
    c: Codec, values: Values, seed: int = 0, shape: tuple[int, ...] | None = None, workers: int = 3
) -> None:
    """A linear codec's rounds: alone as encode and decode; together the same for all, and the mean of their parts."""
    key = Key.derive(seed, tensor="rounds")
    state, _ = fitted(c, values, shape=shape)
    alone, sent = in_rounds(c, [state], [values], key)
    payload = c.encode(state, values, key)
    scale = 1e-5 * float(np.abs(values).max(initial=0.0))
    decoded = c.decode(c.shared(state), payload, values.size)
    assert np.allclose(alone[0].decoded, decoded, rtol=0, atol=scale), f"{c}: rounds of one worker differ from decode"
    assert len(payload) - ENVELOPE_BYTES >= sent, f"{c}: the payload is shorter than what one worker sends in rounds"
    random = np.random.default_rng(seed)
    others = [random.permutation(values) for _ in range(workers)]
    ended, _ = in_rounds(c, [state] * workers, others, key)
    first = ended[0].decoded
    assert all(np.array_equal(one.decoded, first) for one in ended), f"{c}: workers decoded different gradients"
    mean = np.mean([one.own for one in ended], axis=0, dtype=np.float64)
    assert np.allclose(first, mean, rtol=0, atol=scale), f"{c}: what is decoded is not the mean of the workers' parts"
    assert all(one.state.shape == shape for one in ended), f"{c}: rounds lost the shape"


def in_rounds(c: Codec, states: list[State], tensors: list[Values], key: Key) -> tuple[list[Averaged], int]:
    """How the rounds of some workers end, and how many bytes the first of them sent."""
    runs = [c.rounds(state, values, key) for state, values in zip(states, tensors, strict=True)]
    found, sent = [advance(run) for run in runs], 0
    while messages := [one for one in found if not isinstance(one, Averaged)]:
        assert len(messages) == len(runs), f"{c}: workers have different numbers of rounds"
        assert all(message.dtype == np.float32 for message in messages), f"{c}: a round yielded other than float32"
        sent += messages[0].nbytes
        mean = np.asarray(np.mean(messages, axis=0, dtype=np.float64), np.float32)
        found = [advance(run, mean) for run in runs]
    return [one for one in found if isinstance(one, Averaged)], sent


def check_refusals(c: Codec, values: Values, seed: int = 0) -> None:
    """Foreign, truncated, oversized and damaged payloads raise PayloadError."""
    state, _ = fitted(c, values)
    shared = c.shared(state)
    payload = c.encode(state, values, Key.derive(seed, tensor="refusals"))
    rng = np.random.default_rng(seed)
    flipped = bytearray(payload)
    flipped[len(payload) // 2] ^= 16
    bad = {
        "empty": (shared, b"", values.size),
        "foreign": (shared, rng.bytes(len(payload)), values.size),
        "envelope alone": (shared, payload[:ENVELOPE_BYTES], values.size),
        "truncated": (shared, payload[:-1], values.size),
        "cut in the envelope": (shared, payload[: ENVELOPE_BYTES - 3], values.size),
        "oversized": (shared, payload + b"\0", values.size),
        "bit flipped": (shared, bytes(flipped), values.size),
        "another size": (shared, payload, values.size + 1),
        "a size that no memory holds": (shared, payload, 2**40),
        "other shared bytes": (shared + b"\1\2\3\4", payload, values.size),
    }
    for wrong in (np.where(np.arange(values.size) == 7, np.float32(np.nan), values), values[1:]):
        try:
            c.encode(state, wrong, Key.derive(seed, tensor="refusals"))
        except UsageError:
            continue
        raise AssertionError(f"{c}: encoded too few values, or NaN; gtrace.codecs.base.checked_values refuses them")
    for what, sent in bad.items():
        assert _taken(c, *sent) is None, f"{c}: a payload that is wrong ({what}) was decoded"


#: bytes that are not a number of a gradient: NaN, infinity, the largest float32
_FORGED = np.array([np.nan, np.inf, np.finfo(np.float32).max], "<f4")
#: elements that a short body may claim: more than it could hold, and more than its length rules out
_CLAIMED = (2**31, 2**24)


def check_forged(c: Codec, seed: int = 0, size: int = 50) -> None:
    """Bodies that no encoder made, with a right checksum, are refused before memory is taken, or decode to numbers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size).astype(np.float32)
    state, _ = fitted(c, values)
    shared = c.shared(state)
    body, flags = open_envelope(
        c.encode(state, values, Key.derive(seed, tensor="forged")), codec=c.wire_name, size=size, shared=shared
    )
    for place, number in itertools.product(range(0, min(len(body), 64), 2), _FORGED):
        other = bytes(body[:place]) + number.tobytes() + bytes(body[place + 4 :])
        decoded = _taken(c, shared, seal(other, codec=c.wire_name, size=size, shared=shared, flags=flags), size)
        assert decoded is None or np.isfinite(decoded).all(), f"{c}: {number} at byte {place} of a body was decoded"
    for claimed, other in itertools.product(_CLAIMED, (b"", bytes(body), bytes(64), b"\xff" * 64, rng.bytes(64))):
        forged = bytearray(seal(other, codec=c.wire_name, size=size, shared=shared, flags=flags))
        struct.pack_into("<Q", forged, 8, claimed)
        tracemalloc.start()
        decoded = _taken(c, shared, bytes(forged), claimed)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # Sparse payloads may be that short. A receiver's memory grows with the payload all the same.
        most = MOST_PER_BYTE * len(forged) * 16 if decoded is not None else claimed
        assert peak < most, f"{c}: a payload of {len(forged)} bytes that claims {claimed} elements took {peak} bytes"


def _taken(c: Codec, shared: bytes, payload: bytes, size: int) -> Values | None:
    """The decoded values, None if the payload is refused."""
    try:
        return c.decode(shared, payload, size)
    except PayloadError:
        return None


def check_expectation(c: Codec, name: str, values: Values, seed: int = 0, draws: int = 24) -> None:
    """Sampled error, payload length, sparsity and mean agree with ``expect`` within standard errors."""
    if not expecting(c):
        return
    where = f"{c} on {name}"
    state, sketch = fitted(c, values)
    assert sketch is not None, f"{where}: a codec with closed forms must say which sketch it needs"
    expected = c.expect(state, sketch)
    again = c.weighted_error(state, sketch, sketch)
    assert math.isclose(again, expected.squared_error, rel_tol=1e-9), f"{where}: weights of 1 change the expected error"
    assert not (c.unbiased and expected.bias), f"{where}: unbiased, but expects a bias"
    if c.deterministic and values.all():
        same = math.isclose(expected.bias**2, expected.squared_error, rel_tol=1e-6, abs_tol=1e-30)
        assert same, f"{where}: deterministic, so all of its error is bias"
    exact = values.astype(np.float64)
    errors, lengths, zeros, sums = np.empty((4, draws))
    signs = np.sign(exact)
    for draw in range(draws):
        # A sketch knows no signs, so bits are expected over both: every other draw encodes the mirrored tensor.
        sign = np.float32(1 - 2 * (draw % 2))
        payload, decoded = _sent(c, state, sign * values, Key.derive(seed, tensor=name, draw=draw))
        off = sign * decoded - exact
        errors[draw] = off @ off
        lengths[draw] = 8 * (len(payload) - ENVELOPE_BYTES)
        zeros[draw] = np.count_nonzero(off == -exact)
        sums[draw] = off @ signs
    spread = _error_deviation(c, state, exact)
    _close(errors, expected.squared_error, _rounding(exact) + expected.error_bound, f"{where}: squared error", spread)
    n = values.size
    _close(lengths, expected.bits_payload * n, 32.0, f"{where}: payload bits")
    # A zero that is expected less than once in all draws may well not occur in any of them.
    _close(zeros, expected.sparsity * n, 1e-6 * n + LIMIT**2 / draws, f"{where}: zeros")
    if c.unbiased:
        # One number that sees a rounding probability that is off by a few per cent.
        shrinkage = math.sqrt(expected.squared_error)
        _close(sums, 0.0, 1e-6 * float(np.abs(exact).sum()) + 1e-30, f"{where}: mean shrinkage", shrinkage)
    if expected.probabilities.size and sketch.quantized:
        whole = float(expected.probabilities.sum())
        assert abs(whole - 1) < 1e-9, f"{where}: symbol probabilities add up to {whole}"


def _rounding(exact: NDArray[np.float64]) -> float:
    """Error that float32 may add: if v / norm rounds onto a level, half a digit decides a whole cell."""
    energy = float(exact @ exact)
    return 1e-6 * energy + 2.0**-23 * float(np.abs(exact).sum()) * math.sqrt(energy) + 1e-30


def _error_deviation(c: Codec, state: State, exact: NDArray[np.float64], workers: int = 1) -> float:
    """Standard deviation of ||Q(v) - v||^2 of a level codec, with Q(v) the mean of ``workers``; 0 if it is not known.

    A value just above the last but one level rarely jumps to 1, at a price: 24 draws seldom show that, so a sampled
    deviation would be too small.
    """
    magnitudes = level_grid(c)
    if magnitudes is None or c.needs is None or c.needs.norm == "none" or c.needs.clip is not None:
        return 0.0
    levels = magnitudes.levels(state).astype(np.float64)
    grid = levels if magnitudes.zero else np.concatenate([-levels[:1], levels])
    scales = bucket_scales(exact.astype(np.float32), c.needs.norm, c.needs.bucket_size).astype(np.float64)
    scale = np.repeat(scales, c.needs.bucket_size or exact.size)[: exact.size]
    r = np.abs(exact) / np.where(scale, scale, 1.0)
    k = np.clip(np.searchsorted(grid, r, side="right") - 1, 0, grid.size - 2)
    up, down = grid[k + 1] - r, r - grid[k]
    # Second and fourth moments of one worker's rounding error, and of the mean of several.
    second = up * down
    fourth = second * (up * up - second + down * down)
    mean_fourth = (fourth + 3 * (workers - 1) * second**2) / workers**3
    return math.sqrt(float(np.sum(scale**4 * (mean_fourth - (second / workers) ** 2))))


def check_mean(c: Codec, name: str, values: Values, seed: int = 0, draws: int = 24) -> None:
    """What an unbiased codec without closed forms decodes is its input on average."""
    if expecting(c) or not c.unbiased:
        return
    state, _ = fitted(c, values)
    exact = values.astype(np.float64)
    keys = [Key.derive(seed, tensor=name, draw=draw) for draw in range(draws)]
    sums = np.array([(_sent(c, state, values, key)[1] - exact) @ np.sign(exact) for key in keys])
    _close(sums, 0.0, 1e-6 * float(np.abs(exact).sum()), f"{c} on {name}: mean shrinkage; unbiased = False says so")


def check_workers(c: Codec, values: Values, seed: int = 0, draws: int = 24) -> None:
    """Four workers with the same gradient and keys of their own have a quarter of one worker's error."""
    if not expecting(c) or not c.unbiased:
        return
    state, sketch = fitted(c, values)
    assert sketch is not None
    expected = c.expect(state, sketch)
    if expected.bias or not expected.squared_error:
        return
    exact = values.astype(np.float64)
    errors = np.empty(draws)
    for draw in range(draws):
        keys = [Key.derive(seed, tensor="workers", draw=draw, worker=worker) for worker in range(4)]
        off = c.aggregate([_sent(c, state, values, key)[1] for key in keys]) - exact
        errors[draw] = off @ off
    slack, spread = _rounding(exact) + expected.error_bound, _error_deviation(c, state, exact, workers=4)
    _close(errors, expected.squared_error / 4, slack, f"{c}: error of the mean of four workers", spread)


def check_spike(c: Codec, seed: int = 0, size: int = 1_000_000, draws: int = 12) -> None:
    """One spike and a million values a millionth of it: their mean survives, however rare their symbols are."""
    values = np.full(size, 1e-6, np.float32)
    values[size // 2] = 1.0
    state, sketch = fitted(c, values)
    means = np.empty(draws)
    for draw in range(draws):
        decoded = _sent(c, state, values, Key.derive(seed, tensor="spike", draw=draw))[1].astype(np.float64)
        means[draw] = (decoded.sum() - decoded[size // 2]) / (size - 1)
    if expecting(c) and sketch is not None:
        # An event that is rarer than the draws has no sampled deviation; the closed form knows it.
        deviation = math.sqrt(c.expect(state, sketch).squared_error) / size
    else:
        deviation = float(np.std(means, ddof=1))
    off = abs(float(means.mean()) - float(values[0]))
    slack = 1e-6 * float(values[0])
    assert off <= 3.0 * deviation / math.sqrt(draws) + slack, (
        f"{c}: a million values at probability 1e-6 have a mean of {means.mean():.4g}, "
        f"{off / max(deviation, 1e-300) * math.sqrt(draws):.3g} standard errors off"
    )


def _sent(c: Codec, state: State, values: Values, key: tuple[int, int]) -> tuple[bytes, Values]:
    """A payload, and what a receiver makes of it."""
    payload = c.encode(state, values, key)
    return payload, c.decode(c.shared(state), payload, values.size)


def _close(samples: NDArray[np.float64], expected: float, slack: float, what: str, deviation: float = 0.0) -> None:
    mean = float(samples.mean())
    error = (deviation or float(samples.std(ddof=1))) / math.sqrt(samples.size)
    off = abs(mean - expected)
    far = f"off by {off / error:.3g} standard errors" if error else "in every draw"
    assert off <= LIMIT * error + slack, f"{what}: sampled {mean:.6g}, expected {expected:.6g}, {far}"
