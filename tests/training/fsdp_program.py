"""Run by test_fsdp.py: fully_shard through codecs among 2 and 4 ranks, checkpoints, compiled models."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks_program import (
    ELEMENTS,
    NAMES,
    Counted,
    Simulated,
    Training,
    batch,
    digest,
    local_gradients,
    model,
    play,
    same_everywhere,
    start,
    take,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import gtrace
from gtrace.errors import UsageError
from gtrace.training.ddp import ShardedGradient
from gtrace.training.ranks import Piece

STEPS = 3
SPECS = ("none", "qsgdinf:bits=3,bucket_size=64", "alq:bits=3", "ef:topk:ratio=0.05", "powersgd")
OTHER_WAYS = ("ring", "hierarchical:2", "shared-scale")


class Sharded:
    """A few steps of fully_shard on this rank's own batches; one layer is a group of its own."""

    def __init__(self, spec: str = "", mesh: DeviceMesh | None = None, *, made: Any = None, **options: Any) -> None:
        self.model = model()
        compiled = options.pop("compiled", None)
        if compiled is not None:
            self.model[0] = torch.compile(self.model[0], backend=compiled)
        kept = made or {}
        fully_shard(self.model[0], mesh=mesh, **kept)
        fully_shard(self.model, mesh=mesh, **kept)
        self.called = self.model if compiled is None else torch.compile(self.model, backend=compiled)
        self.state = gtrace.training.State(spec, **options).register(self.model) if spec else None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, number: int) -> torch.Tensor:
        x, y = batch(number)
        return nn.functional.cross_entropy(self.called(x), y)

    def step(self, number: int) -> list[np.ndarray]:
        """This rank's chunk of every gradient."""
        self.optimizer.zero_grad()
        self.loss(number).backward()
        found = [p.grad.to_local().float().numpy().copy() for p in self.model.parameters()]
        self.optimizer.step()
        return found

    def weights(self) -> list[torch.Tensor]:
        return [p.full_tensor().detach() for p in self.model.parameters()]


def everyones(number: int, weights: list[torch.Tensor]) -> list[list[np.ndarray]]:
    """Every rank's own gradients of a step with these weights, without any wrapper."""
    plain = model()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), weights, strict=True):
            parameter.copy_(value)
    return local_gradients(number, plain)


def rows(size: int, ranks: int, rank: int) -> slice:
    each = -(-size // ranks)
    return slice(min(size, rank * each), min(size, (rank + 1) * each))


class SimulatedChunks:
    """The same exchanges among simulated ranks: of chunks among a group, then of averages among replicas."""

    def __init__(self, spec: str, exchange: str, ranks: int, replicas: int) -> None:
        self.codec, self.ranks = gtrace.codec(spec), ranks
        self.among = [Simulated(spec, exchange, ranks, ranks * one) for one in range(replicas)]
        self.between = [Simulated(spec, exchange, replicas) for _ in range(ranks)]

    def step(self, number: int, gradients: list[list[np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """By rank, the averages of its chunks that are not empty."""
        cut = [
            (k, piece)
            for k, (name, gradient) in enumerate(zip(NAMES, gradients[0], strict=True))
            for piece in ShardedGradient(name, self.codec, gradient.shape, 0, self.ranks, 0).pieces()
        ]
        pieces, averages = [piece for _, piece in cut], []
        for one, among in enumerate(self.among):
            group = gradients[one * self.ranks : (one + 1) * self.ranks]
            values = [[local[k].reshape(-1)[piece.start :][: piece.size] for k, piece in cut] for local in group]
            averages.append(among.average(pieces, values, number, scattered=True))
        found: list[dict[str, np.ndarray]] = [{} for _ in gradients]
        for rank, between in enumerate(self.between):
            own = [piece for piece in pieces if piece.owner == rank]
            means = [each[rank] for each in averages]
            if len(self.among) > 1:
                named = [Piece(f"{piece.name}+replicas", self.codec, piece.size) for piece in own]
                means = between.average(named, means, number)
            for one, parts in enumerate(means):
                named_parts = zip(own, parts, strict=True)
                found[one * self.ranks + rank] = {p.name.partition("[")[0]: part for p, part in named_parts}
        return found


def meshes() -> dict[str, DeviceMesh]:
    world = dist.get_world_size()
    found = {"fsdp": init_device_mesh("cpu", (world,))}
    if world == 4:
        found["hsdp"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return found


def averages() -> None:
    """Averages are those of simulated ranks, and counted bytes those at the collectives."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for kind, mesh in meshes().items():
        plain = Sharded("", mesh)
        exact = [plain.step(number) for number in range(STEPS)][-1]
        # Two ranks try every codec, four every way: with two a ring or a node shows nothing of its own.
        many = kind == "fsdp" and world > 2
        cases = [(spec, "allgather") for spec in (SPECS[:1] if many else SPECS)]
        if many:
            cases += [(SPECS[1], one) for one in OTHER_WAYS] + [("ef:intn", "ring")]
        for spec, exchange in cases:
            what = f"{kind} {spec} {exchange}"
            training = Sharded(spec, mesh, exchange=exchange, seed=5, refit="once", compare_every=0)
            replicas = 2 if kind == "hsdp" else 1
            simulated, whole = SimulatedChunks(spec, exchange, world // replicas, replicas), Training(spec, seed=5)
            sent = 0
            for number in range(STEPS):
                gradients = everyones(number, training.weights())
                with Counted(sums=spec == "powersgd") as counted:
                    found = training.step(number)
                sent += counted.bytes
                expected = {name: np.zeros(0) for name in NAMES}
                if spec != "powersgd":
                    expected |= simulated.step(number, gradients)[rank]
                elif kind == "fsdp":
                    # Factors of whole matrices: the chunks are those of the average that DistributedDataParallel has.
                    each = zip(NAMES, whole.step(number), strict=True)
                    expected = {name: one.numpy()[rows(len(one), world, rank)].reshape(-1) for name, one in each}
                if spec != "powersgd" or kind == "fsdp":
                    for name, chunk in zip(NAMES, found, strict=True):
                        assert np.array_equal(chunk.reshape(-1), expected[name]), f"{what}: other averages"
            tally = training.state.tally
            assert same_everywhere(digest(training.weights())), f"{what}: ranks have different weights"
            assert (training.state.steps, tally.float32_bits) == (STEPS, 32 * STEPS * ELEMENTS), what
            assert sent == tally.wire_bytes, what
            assert (tally.down_bits > 0) == (kind == "hsdp"), what
            if spec == "none":
                # Sums in another order than gloo's, from three ranks on.
                allowed = 0 if world == 2 else 1e-7
                assert all(np.abs(a - b).max(initial=0) <= allowed for a, b in zip(exact, found, strict=True)), what
                assert (tally.worker_variance, tally.bits) == (0, tally.float32_bits), what
            else:
                assert tally.worker_variance > 0.01, what
                assert tally.bits < tally.float32_bits / 4, what


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def freeze(training: Sharded) -> None:
    training.model[0].bias.requires_grad_(False)


def divide(training: Sharded) -> None:
    for module in (training.model[0], training.model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(3.0)


#: what programs ask of torch -> (arguments of fully_shard, what is called before the steps, largest difference)
SETTINGS: dict[str, tuple[dict[str, Any], Any, float]] = {
    "rows": ({}, id, 1e-6),
    "columns": ({"shard_placement_fn": by_columns}, id, 1e-6),
    "bf16": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, id, 1e-2),
    "fp16": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, id, 2e-3),
    "frozen": ({}, freeze, 1e-6),
    "divided": ({}, divide, 1e-6),
}


def settings() -> None:
    """A codec without loss gives what torch gives, whatever the program sets."""
    for kind, mesh in meshes().items():
        for name, (made, change, allowed) in SETTINGS.items():
            found = []
            for spec in ("", "none"):
                training = Sharded(spec, mesh, made=made)
                change(training)
                # Two passes before the averages of the second one, the first of them within the shards alone.
                training.model.set_requires_all_reduce(False)
                training.loss(0).backward()
                training.model.set_requires_all_reduce(True)
                training.loss(1).backward()
                found.append([p.grad.full_tensor() for p in training.model.parameters() if p.requires_grad])
            for a, b in zip(*found, strict=True):
                assert float((a - b).abs().max() / a.abs().max()) <= allowed, f"{kind} {name}"


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(24, 6), nn.Linear(24, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def refused() -> None:
    """What cannot be done is said in one line."""
    half = Half()
    fully_shard(half)
    gtrace.training.State("none").register(half)
    with pytest.raises(UsageError, match=r"unused\.bias has no gradient in this step; call set_reduce_scatter_unused"):
        half(batch(0)[0]).sum().backward()
    with pytest.raises(UsageError, match="a Sequential is neither a DistributedDataParallel nor sharded"):
        gtrace.training.State("none").register(model())


class Replicated(Training):
    """The same steps with DistributedDataParallel."""

    def __init__(self, spec: str, **options: Any) -> None:
        self.compiled = options.pop("compiled", None)
        super().__init__("")
        self.state = gtrace.training.State(spec, **options).register(self.wrapped)

    def wrap(self, inner: nn.Module) -> DistributedDataParallel:
        if self.compiled is not None:
            inner = torch.compile(inner, backend=self.compiled)
        return DistributedDataParallel(inner)

    def weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]


KINDS = {"ddp": Replicated, "fsdp": Sharded}


def content(training: Any) -> dict[str, Any]:
    """What a program saves."""
    weights, moments = get_state_dict(training.model, training.optimizer)
    return {"model": weights, "optimizer": moments, "codec": training.state}


def resume(folder: str, training: Any, *, codec: bool = True) -> None:
    saved = content(training)
    if not codec:
        del saved["codec"]
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(
        training.model, training.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )


def check_resumed(make: Any, place: str) -> None:
    """Two steps, a checkpoint, two more end like four at a stretch, but only with the codec's state."""
    whole, first = make(), make()
    take(whole, 0, 1, 2, 3)
    take(first, 0, 1)
    dcp.save(content(first), checkpoint_id=place)
    for with_codec in (True, False):
        second = make()
        resume(place, second, codec=with_codec)
        take(second, 2, 3)
        assert (digest(second.weights()) == digest(whole.weights())) == with_codec, place


def checkpoints(folder: str) -> None:
    """Of as many ranks they are continued, also where some have the same chunks; of another number refused."""
    world = dist.get_world_size()
    for kind, kept in KINDS.items():
        for spec, options in (("ef:topk:ratio=0.05", {}), ("alq:bits=3", {"refit": "0,1"})):
            place, make = f"{folder}/{kind}-{spec.partition(':')[0]}", functools.partial(kept, spec, **options)
            if world == 2:
                check_resumed(make, place)
                continue
            with pytest.raises(dcp.api.CheckpointException) as error:
                resume(place, make())
            said = str(error.value).strip().splitlines()[-1]
            assert "Missing key in checkpoint state_dict: codec.rank" in said
            assert said.endswith("of 4 (resume with as many ranks).")
    if world == 4:
        make = functools.partial(Sharded, "ef:topk:ratio=0.05", meshes()["hsdp"])
        check_resumed(make, f"{folder}/hsdp")


def compiled() -> None:
    """Compiled models against the same that are not."""
    for kind, make in KINDS.items():
        ends = []
        for backend in (None, CompileCounterWithBackend("aot_eager")):
            training = make("ef:topk:ratio=0.3", seed=5, compiled=backend)
            take(training, *range(STEPS))
            ends.append(training.weights())
        assert backend.frame_count > 0, kind
        assert training.state.steps == STEPS, kind
        assert training.state.tally.bits_per_element < 20, kind
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)), kind
        assert {name.partition("[")[0] for _, name in training.state._codecs._senders} == set(NAMES), kind


def main(rank: int, world: int, folder: str) -> None:
    resumed = functools.partial(checkpoints, folder)
    parts = [averages, settings, resumed, compiled if world == 2 else refused]
    play(parts, "fsdp", rank, world, folder)


if __name__ == "__main__":
    start(main, (*SPECS, "ef:intn"), (2, 4))
