"""What codecs around a codec share: one state that holds the inner one, a spec with a prefix, inherited facts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.codecs.base import Codec, checked_values
from gtrace.types import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.base import Rounds, Simulated
    from gtrace.sketch import MomentSketch
    from gtrace.types import SummarySpec

#: what the names of the inner codec's arrays begin with in the wrapper's state
INNER = "inner."
FLOAT32_MAX = np.finfo(np.float32).max


@dataclass(frozen=True)
class Wrapper(Codec):
    """A codec around a codec, another wrapper among them.

    The first field is the inner codec; a wrapper's own parameters follow it. ``name``, ``unbiased``, ``stateful``,
    ``deterministic``, ``linear`` and ``declared`` are facts of the instance, because they depend on what is inside.
    """

    inner: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        # Facts live on the class for every other codec; a frozen instance shadows them once, here.
        object.__setattr__(self, "name", f"{type(self).name}:{self.inner.name}")
        object.__setattr__(self, "unbiased", type(self).unbiased and self.inner.unbiased)
        object.__setattr__(self, "stateful", type(self).stateful or self.inner.stateful)
        object.__setattr__(self, "deterministic", self.inner.deterministic)
        object.__setattr__(self, "linear", self.inner.linear)
        object.__setattr__(self, "declared", self.inner.declared)

    def __str__(self) -> str:
        """The prefix, its parameters where they differ from the defaults, and the spec inside."""
        return f"{super().__str__()}:{self.inner}"

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the codec inside, and the wrapper's own as ``prefix.parameter``."""
        own = {f"{type(self).name}.{key}": value for key, value in super().parameters.items()}
        return {**self.inner.parameters, **own}

    @property
    def wire_name(self) -> str:
        """That of the codec inside, whose payloads travel as they are."""
        return self.inner.wire_name

    @property
    def needs(self) -> SummarySpec | None:
        """What the codec inside needs, of :meth:`view`."""
        return self.inner.needs

    @property
    def fits_itself(self) -> bool:
        """As the codec inside."""
        return self.inner.fits_itself

    @property
    def allocates(self) -> bool:
        """As the codec inside."""
        return self.inner.allocates

    def allocate(self, sketches: Sequence[MomentSketch]) -> Sequence[float]:
        """As the codec inside, by the gradients themselves: memories of other tensors are not known."""
        return self.inner.allocate(sketches)

    def with_target(self, state: State, share: float) -> State:
        """The share goes to the codec inside."""
        return self.with_inner(state, self.inner.with_target(self.inner_state(state), share))

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """The inner codec's state under the prefix ``inner.``."""
        return self.with_inner(State(int(size), {}, shape), self.inner.init(size, shape))

    def given(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        """What the codec inside encodes, float32[n]: the values themselves unless a wrapper changes them."""
        return checked_values(state, values)

    def remembered(self, given: NDArray[np.float32], decoded: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """The wrapper's own arrays in the state of the next step, after ``given`` arrived as ``decoded``."""
        del given, decoded
        return {}

    def view(self, state: State, values: ArrayLike) -> ArrayLike:
        """What the codec inside will look at."""
        return self.inner.view(self.inner_state(state), self.given(state, values))

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The inner payload of :meth:`given`."""
        return self.inner.encode(self.inner_state(state), self.given(state, values), key)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As the codec inside does it, of :meth:`given`."""
        return self.inner.simulate(self.inner_state(state), self.given(state, values), key)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """The codec inside and the wrapper take note."""
        given = self.given(state, values)
        state = self.with_inner(state, self.inner.update(self.inner_state(state), given, decoded))
        return state.with_arrays(**self.remembered(given, decoded))

    def rounds(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Rounds:
        """Those of the codec inside, of :meth:`given`."""
        given = self.given(state, values)
        ended = yield from self.inner.rounds(self.inner_state(state), given, key)
        state = self.with_inner(state, ended.state).with_arrays(**self.remembered(given, ended.decoded))
        return ended._replace(state=state)

    def at_bits(self, bits: int) -> Codec:
        """The codec inside with other bits."""
        return dataclasses.replace(self, inner=self.inner.at_bits(bits))

    def renewed(self, state: State) -> State:
        """Its own memory, and what the codec inside keeps."""
        return self.with_inner(state, self.inner.renewed(self.inner_state(state)))

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        """Fit the codec inside."""
        return self.with_inner(state, self.inner.fit(self.inner_state(state), summary, step))

    def shared(self, state: State) -> bytes:
        """What the codec inside shares."""
        return self.inner.shared(self.inner_state(state))

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """A receiver needs the codec inside and nothing of the memory."""
        return self.inner.decode(shared, payload, size)

    def aggregate(self, decoded: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """As the codec inside does it."""
        return self.inner.aggregate(decoded)

    @staticmethod
    def inner_state(state: State) -> State:
        """The inner codec's part of a state."""
        cut = len(INNER)
        arrays = {name[cut:]: array for name, array in state.arrays.items() if name.startswith(INNER)}
        return State(state.size, arrays, state.shape)

    @staticmethod
    def with_inner(state: State, inner: State) -> State:
        """A state with the inner codec's part replaced."""
        own = {name: array for name, array in state.arrays.items() if not name.startswith(INNER)}
        held = {INNER + name: array for name, array in inner.arrays.items()}
        return State(state.size, {**own, **held}, state.shape)


def saturating(x: ArrayLike, y: ArrayLike, scale_x: float = 1.0, scale_y: float = 1.0) -> NDArray[np.float32]:
    """scale_x x + scale_y y in float32, float32[n]; what would overflow stays at the largest finite number."""
    a, b = np.asarray(x, np.float32), np.asarray(y, np.float32)
    with np.errstate(over="ignore"):
        out: NDArray[np.float32] = (a if scale_x == 1.0 else a * np.float32(scale_x)) + (
            b if scale_y == 1.0 else b * np.float32(scale_y)
        )
    return np.clip(out, -FLOAT32_MAX, FLOAT32_MAX, out=out)
