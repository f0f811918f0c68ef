"""Run by test_ranks.py: trainings through codecs among 2, 3 and 4 ranks, which assert what they see."""

from __future__ import annotations

import contextlib
import copy
import datetime
import hashlib
import io
import json
import math
import pickle
import sys
import traceback
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
import torch
import torch._dynamo  # which DistributedDataParallel imports; forked ranks share it
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gtrace
from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import LinkOptions
from gtrace.schedule import RefitSchedule
from gtrace.training import device
from gtrace.training.ranks import Piece, RankCodecs, SimulatedRank, lockstep
from gtrace.training.ways import averaging, way

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 4
OPTIONS = LinkOptions(RefitSchedule.parse("once"), 5)
MIXED = "prune:sparsity=0.8,allocation=heterogeneous"
WAYS = ("allgather", "two-shot", "ring", "hierarchical:2", "hierarchical:4", "shared-scale")
SPECS = {
    2: ("alq:bits=3", "mcgq", "ef:topk:ratio=0.05", MIXED),
    3: ("alq:bits=3", "ef21:momentum=0.5:topk:ratio=0.05", "powersgd", "momentum:beta=0.5:powersgd:rank=1"),
    4: ("qsgdinf:bits=3,bucket_size=64", "ef21:intn", "ef:thc:block=64"),
}


def cases(world: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Codecs, ways and further options of a number of ranks."""
    for spec in SPECS[world]:
        for exchange in WAYS if world == 4 else WAYS[:2]:
            if not spec.startswith("ef21:" if exchange == "shared-scale" else "ef:thc"):
                yield spec, exchange, {}
    if world == 2:
        yield "alq:bits=3", "allgather", {"levels": "common"}
        yield from (("alq:bits=3", exchange, {"on_device": True}) for exchange in WAYS[:2])


class Counted:
    """What goes into the collectives for other ranks."""

    def __init__(self, *, sums: bool = False) -> None:
        self.bytes = 0
        self._original, self._all_reduce, self._sums = dist.all_to_all_single, dist.all_reduce, sums

    def __enter__(self) -> Self:
        def counted(out: torch.Tensor, given: torch.Tensor, outs: Any = None, ins: Any = None, **kwargs: Any) -> Any:
            rank, world = dist.get_rank(kwargs["group"]), dist.get_world_size(kwargs["group"])
            own = ins[rank] if ins is not None else given.numel() // world
            self.bytes += (given.numel() - own) * given.element_size()
            return self._original(out, given, outs, ins, **kwargs)

        def summed(given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes += given.numel() * given.element_size() if self._sums else 0
            return self._all_reduce(given, *args, **kwargs)

        dist.all_to_all_single, dist.all_reduce = counted, summed
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, dist.all_reduce = self._original, self._all_reduce


@contextlib.contextmanager
def on_device(wanted: bool) -> Iterator[list[Any]]:
    """Inside, gradients stay tensors if that is wanted; what was encoded as one."""
    encode, kinds, calls = device.encode, device.DEVICES, []
    device.DEVICES = frozenset({"cpu"}) if wanted else kinds
    device.encode = lambda *given: calls.append(given) or encode(*given)
    yield calls
    device.encode, device.DEVICES = encode, kinds


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 60), nn.ReLU(), nn.Linear(60, 6))


NAMES = [name for name, _ in model().named_parameters()]
ELEMENTS = 24 * 60 + 60 + 60 * 6 + 6


def from_everyone(value: Any) -> list[Any]:
    """What every rank has in the place of this value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_everywhere(value: Any) -> bool:
    return len(set(from_everyone(value))) == 1


def batch(number: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's batch of a rank, by default of this one."""
    random = torch.Generator().manual_seed(1000 * number + (dist.get_rank() if rank is None else rank))
    return torch.randn(8, 24, generator=random), torch.randint(0, 6, (8,), generator=random)


def take(training: Any, *numbers: int) -> None:
    for number in numbers:
        training.step(number)


def digest(tensors: Any) -> str:
    return hashlib.sha1(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


class Training:
    """A few steps of DDP on this rank's own batches, in buckets that are smaller than the model."""

    def __init__(self, spec: str | gtrace.training.State = "", **options: Any) -> None:
        self.model = model()
        self.wrapped = self.wrap(self.model)
        self.state = spec
        if isinstance(spec, str):
            self.state = gtrace.training.State(spec or "none", model=self.model, **options)
        if spec:
            self.wrapped.register_comm_hook(self.state, gtrace.training.ddp_comm_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._seen: list[str] = []

    def wrap(self, inner: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(inner, bucket_cap_mb=0.004)

    def step(self, number: int, poison: bool = False) -> list[torch.Tensor]:
        x, y = batch(number)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.wrapped(x), y)
        if poison and dist.get_rank() == 0:
            loss = loss * float("inf")
        loss.backward()
        gradients = [p.grad.clone() for p in self.model.parameters()]
        self.optimizer.step()
        self._seen.append(digest(self.model.parameters()))
        return gradients

    @property
    def same(self) -> bool:
        """Whether all ranks had the same weights after each step."""
        return same_everywhere("".join(self._seen))

    @property
    def senders(self) -> dict[str, Any]:
        return {name: sender for (_, name), sender in sorted(self.state._codecs._senders.items())}


def local_gradients(number: int, like: nn.Module | None = None) -> list[list[np.ndarray]]:
    """Every rank's gradients of a step, without any wrapper, of the first model or of one that is trained."""
    plain = model() if like is None else copy.deepcopy(like)
    plain.zero_grad()
    x, y = batch(number)
    nn.functional.cross_entropy(plain(x), y).backward()
    return from_everyone([p.grad.numpy() for p in plain.parameters()])


class Simulated:
    """As many ranks in one process."""

    def __init__(self, spec: str, exchange: str, ranks: int, first: int = 0, *, common: bool = False) -> None:
        self.way, rules = way(exchange), CodecTable.of(spec)
        places = [SimulatedRank(rank, ranks) for rank in range(ranks)]
        self.codecs = [RankCodecs(rules, OPTIONS, place, common=common, first=first) for place in places]

    def average(self, pieces: list[Piece], values: list[list[np.ndarray]], step: int, **how: Any) -> list[Any]:
        """The averages that each rank has."""
        paired = zip(self.codecs, values, strict=True)
        return lockstep([averaging(codecs, self.way, pieces, own, step, **how) for codecs, own in paired])[0]


def averages() -> None:
    """Averages are those of simulated ranks, and counted bytes those at the collectives."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for spec, exchange, options in cases(world):
        what, codec = f"{spec} {exchange} {options}", gtrace.codec(spec)
        given = {"seed": 5, "refit": "once", "compare_every": 0 if codec.linear else 2, **options}
        tensors = given.pop("on_device", False)
        training = Training(spec, exchange=exchange, **given)
        simulated = Simulated(spec, exchange, world, common="levels" in options)
        state, sent, shared = training.state, 0, []
        for number in range(STEPS):
            everyone = local_gradients(number, training.model)
            shapes = [gradient.shape for gradient in everyone[0]]
            pieces = [
                Piece(name, codec, math.prod(shape), shape=shape) for name, shape in zip(NAMES, shapes, strict=True)
            ]
            wanted = simulated.average(pieces, [[g.reshape(-1) for g in own] for own in everyone], number)[rank]
            with Counted(sums=codec.linear) as counted, on_device(tensors) as calls:
                found = training.step(number)
            assert bool(calls) == tensors, what
            sent += counted.bytes
            shared.append(state.last.shared_bits)
            for a, b in zip(found, wanted, strict=True):
                # Sums in another order than gloo's.
                allowed = 1e-5 * np.abs(b).max() if codec.linear else 0
                assert np.abs(a.numpy().reshape(-1) - b).max() <= allowed, f"{what}: other averages than simulated"
        tally = state.tally
        assert training.same, f"{what}: ranks have different weights"
        assert (state.steps, tally.float32_bits) == (STEPS, 32 * STEPS * ELEMENTS), what
        assert sent == tally.wire_bytes > 0, what
        # State is kept by parameter, although buckets are built anew after the first step.
        assert {name.partition("[")[0].partition("+")[0] for name in training.senders} == set(NAMES), what
        assert state.comparison is None, what  # steps 0 and 2 are compared
        assert tally.worker_variance > 1e-9, what
        again = sum(from_everyone(tally.down_squared_error)) > 0
        assert again != (codec.linear or exchange in ("allgather", "shared-scale")), what
        if "levels" in options:
            # The sketches, once; levels never travel.
            assert shared[0] > 0 == sum(shared[1:])
        elif codec.linear:
            factors = 1 if "rank=1" in spec else 2
            # P and Q of both matrices, and the biases as they are.
            assert state.last.payload_bits == 32 * (factors * (60 + 24 + 6 + 60) + 60 + 6), what
        elif exchange == "allgather":
            # Nothing but the reported message, to each of the others, and eight bytes per bucket for its length.
            reported = (tally.payload_bits + tally.shared_bits + tally.envelope_bits + tally.frame_bits) // 8
            buckets, rest = divmod(sent - (world - 1) * reported, 8 * (world - 1))
            assert rest == 0, what
            assert 4 <= buckets <= 16, what
        elif exchange == "two-shot":
            error, energy = tally.down_squared_error, tally.down_energy
            # A rank may have nothing to sum up: these tensors are smaller than a bucket and have one owner each.
            assert (error > 0) == (energy > 0), what
            assert same_everywhere(tally.down_bits), what
            assert tally.down_bits == sum(one.tally.down_bits for one in simulated.codecs) / world > 0, what
            # Shares of sparsity may leave next to nothing of a small piece, and few large values stay.
            assert error <= (8 if "allocation" in spec else 1.5) * energy, what


def exact_averages() -> None:
    """Without a codec ranks average as torch does."""
    plain, none, two = Training(), Training("none", compare_every=1), Training("none", exchange="two-shot")
    # Sums in another order than gloo's, from three ranks on.
    allowed = 0 if dist.get_world_size() == 2 else 1e-6
    for number in range(STEPS):
        exact, *others = plain.step(number), none.step(number), two.step(number)
        scale = max(float(x.abs().max()) for x in exact)
        for other in others:
            assert all(float((x - y).abs().max()) <= allowed * scale for x, y in zip(exact, other, strict=True))
    assert none.state.comparison.relative_variance <= 1e-12
    assert 1e-7 < none.state.comparison.bf16_variance < 1e-4


def nonfinite() -> None:
    """What one rank's infinities make of all averages."""
    for policy in ("pass", "skip", "zero"):
        each = (("qsgdinf:bits=4", "allgather"), ("qsgdinf:bits=4", "two-shot"), ("powersgd", "allgather"))
        for spec, exchange in each if policy == "pass" else each[:1]:
            training = Training(spec, nonfinite=policy, exchange=exchange)
            averages = torch.cat([gradient.reshape(-1) for gradient in training.step(0, poison=True)])
            assert averages.isnan().all() if policy == "pass" else torch.isfinite(averages).all(), (policy, spec)
            assert averages.any()
            # A gradient that is left out costs nothing, and is not compared with its float32 values.
            left_out = policy != "zero" and dist.get_rank() == 0
            assert training.state.tally.float32_bits == (0 if left_out else 32 * ELEMENTS), (policy, spec)


def scaled_gradients() -> None:
    """The factor of a gradient scaler, which doubles at each step, is in no memory."""
    for exchange in WAYS[:2]:
        ends = []
        for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)):
            training = Training("ef:topk:ratio=0.05", exchange=exchange)
            if scaler is not None:
                training.state.loss_scale = scaler.get_scale
            for number in range(STEPS):
                x, y = batch(number)
                training.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(training.wrapped(x), y)
                if scaler is None:
                    loss.backward()
                    training.optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(training.optimizer)
                    scaler.update()
            ends.append((digest(training.model.parameters()), training.state.tally.worker_energy))
        assert ends[0] == ends[1], exchange


def resume_training() -> None:
    """Two steps, a checkpoint, two more; against four at a stretch."""
    for spec, options in (
        ("ef21:topk:ratio=0.05", {}),
        ("ef:qsgdinf:bits=2", {"exchange": "two-shot"}),
        ("alq:bits=3", {"refit": "0,1"}),
        ("powersgd", {}),
    ):
        whole, first = Training(spec, **options), Training(spec, **options)
        take(whole, 0, 1, 2, 3)
        take(first, 0, 1)
        file = io.BytesIO()
        torch.save([first.model.state_dict(), first.optimizer.state_dict(), first.state.state_dict()], file)
        file.seek(0)
        weights, moments, codec_state = torch.load(file, weights_only=True)
        for how in ("state_dict", "pickle", "forgotten"):
            # Without the model, names are found among all live modules.
            second = Training(pickle.loads(pickle.dumps(first.state)) if how == "pickle" else spec, **options)
            if how == "state_dict":
                second.state.load_state_dict(codec_state)
            second.state.steps = 2
            second.model.load_state_dict(weights)
            second.optimizer.load_state_dict(copy.deepcopy(moments))
            take(second, 2, 3)
            same = digest(second.model.parameters()) == digest(whole.model.parameters())
            assert same == (how != "forgotten"), (spec, how)
        with pytest.raises(gtrace.errors.UsageError, match="saved with codec"):
            gtrace.training.State("ef:topk:ratio=0.5", **options).load_state_dict(codec_state)


def play(parts: Any, name: str, rank: int, world: int, folder: str) -> None:
    """Run the parts on this rank, and write what went wrong in each; after a failure the others wait in vain."""
    meet, patience = f"file://{folder}/meet-{name}-{world}", datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=patience)
    report = {}
    for part in parts:
        what = getattr(part, "func", part).__name__
        report[what] = ""
        try:
            part()
        except Exception:  # noqa: BLE001 - whatever it is, the test shows it
            report[what] = traceback.format_exc()
            break
    with open(f"{folder}/{name}-{world}-{rank}.json", "w") as file:
        json.dump(report, file)
    if not any(report.values()):
        dist.barrier()
        dist.destroy_process_group()


def start(main: Any, specs: tuple[str, ...], worlds: tuple[int, ...]) -> None:
    """Ranks of every world size; forked, they share what is imported and compiled here."""
    torch.set_num_threads(1)
    for spec in specs:
        gtrace.training.Exchange(spec).step(0, [{"w": np.linspace(-1, 1, 64, dtype=np.float32)}])
    for world in worlds:
        torch.multiprocessing.start_processes(main, (world, sys.argv[1]), world, start_method="fork")


PARTS = {
    2: [averages, exact_averages, nonfinite, scaled_gradients, resume_training],
    3: [averages, exact_averages],
    4: [averages],
}


def main(rank: int, world: int, folder: str) -> None:
    play(PARTS[world], "ranks", rank, world, folder)


if __name__ == "__main__":
    start(main, (*SPECS[2], "powersgd", "qsgdinf:bits=2"), (*SPECS,))
