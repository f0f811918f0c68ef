"""Local and averaged gradients of two processes, against what each process computes by itself."""

import contextlib
import gc
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers_capture import Captured, run_gtrace
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gtrace
from gtrace.trace import open_trace
from gtrace.trace.choose import agreement
from gtrace.trace.facts import StepTimes

STEPS = 3


class Model(nn.Module):
    def __init__(self, extra=True):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)
        if extra:
            self.extra = nn.Linear(8, 2)

    def forward(self, x, extra=False):
        hidden = torch.relu(self.body(x))
        return self.extra(hidden) + self.head(hidden) if extra else self.head(hidden)


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 4, generator=generator) for _ in range(2 * STEPS)]


def trained(hook=None, state=None, **options):
    """Of its layers ``extra`` is frozen."""
    model = Model()
    model.extra.requires_grad_(False)
    wrapped = DistributedDataParallel(model, **options)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    return wrapped


def loose(**options):
    return DistributedDataParallel(Model(), find_unused_parameters=True, **options)


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def flat(**options):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(Model(extra=False), device_id=torch.device("cpu"), **options)


def redundant(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)


def half_precision(_state, bucket):
    """A communication hook of the user's, which does not even average what was sent."""
    sent = bucket.buffer().to(torch.bfloat16).div_(2)
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: done.value()[0].float())


def average(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


def clip(parameters):
    nn.utils.clip_grad_norm_(parameters, 1e-3)


def nothing(_parameters):
    pass


def train(
    rank,
    make,
    optimize=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    extra=lambda *_: False,
    to_none=True,
    parts=1,
    sync=True,
    then=nothing,
    scaled=False,
    times=1,
):
    """``then`` is called with the parameters after the backward passes of the ``parts`` of a batch."""
    model = make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, data = optimize(parameters), batches(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    for step in [*range(STEPS)] * times:
        optimizer.zero_grad(set_to_none=to_none)
        for part in range(parts):
            with contextlib.nullcontext() if sync or part == parts - 1 else model.no_sync():
                loss = model(data[parts * step + part], *([True] if extra(rank, step) else [])).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
        then(parameters)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def slowed(rank, make):
    """Trains with collectives that take 10 ms longer; returns their seconds in and outside of backward passes."""
    from torch.distributed.fsdp import _flat_param
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    seconds, seen, backward = [], [], False
    names = [name for name in vars(dist) if name.startswith(("all_gather", "reduce_scatter", "all_reduce"))]

    def slow(original):
        def collective(*args, **kwargs):
            started = time.perf_counter()
            time.sleep(0.01)
            original(*args, **kwargs)
            seconds[-1][backward] += time.perf_counter() - started

        return collective

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, slow(getattr(dist, name)))
        for x in 2 * batches(rank):
            seconds.append([0.0, 0.0])
            optimizer.zero_grad()
            loss = model(x).square().mean()
            backward = True
            loss.backward()
            backward = False
            seen.append([module.dist is dist for module in (_flat_param, _fsdp_collectives)])
            optimizer.step()
    dist.all_reduce(torch.ones(1))  # the program's own
    return seconds, seen


def part(function, make, **options):
    return lambda rank: function(rank, make, **options)


def powersgd():
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.1)
    return trained(powerSGD_hook.powerSGD_hook, state)


def frozen_shards():
    model = Model()
    model.extra.requires_grad_(False)
    return sharded(model)


def shards():
    return sharded(Model(extra=False))


ddp = part(train, trained)
CHANGES = {"kind": "weight,update,outer,momentum", "every": STEPS}
#: name -> a program, and how it is captured
RUNS = {
    "ddp": (ddp, {}),
    "reduced": (ddp, {"reduced": True}),
    "shared": (ddp, CHANGES),
    # Only rank 0 uses the layer ``extra``, and only at step 1.
    "unused": (part(train, loose, extra=lambda rank, step: rank == 0 and step == 1), {}),
    "views": (part(train, lambda: loose(gradient_as_bucket_view=True), to_none=False), {}),
    "static": (part(train, lambda: trained(static_graph=True, gradient_as_bucket_view=True)), {}),
    "zero_redundancy": (part(train, trained, optimize=redundant), {}),
    "scaled": (part(train, loose, scaled=True), {}),
    "accumulated": (part(train, loose, parts=2, sync=False, then=clip), {}),
    "accumulated_with_sync": (part(train, loose, parts=2, then=clip), {}),
    "by_hand": (part(train, lambda: Model(extra=False), then=average), {}),
    # Each process goes its own way, as between the outer steps of DiLoCo.
    "apart": (part(train, lambda: Model(extra=False)), CHANGES),
    "own_hook": (part(train, lambda: trained(half_precision)), {}),
    "powersgd": (part(train, powersgd), {}),
    "sharded": (part(train, frozen_shards), CHANGES),
    "sharded_adam": (part(train, shards, optimize=torch.optim.Adam), CHANGES),
    "flat": (part(train, flat), {}),
    "flat_original": (part(train, lambda: flat(use_orig_params=True)), {}),
    "timed": (part(train, trained, times=2), {}),
    "slow_shards": (part(slowed, shards), {}),
    "slow_flat": (part(slowed, flat), {}),
}


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    said = []
    for name, (program, options) in RUNS.items():
        with Captured(folder / f"{name}.zarr", run="test", **options) as run:
            found = program(rank)
        (folder / f"{name}{rank}.json").write_text(json.dumps(found))
        said += run.said
    (folder / f"said{rank}.json").write_text(json.dumps(said))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """All programs in one launch of two processes: it is the launch that takes time."""
    folder = tmp_path_factory.mktemp("distributed")
    done = run_gtrace(folder, cwd=Path(__file__).parent, module=Path(__file__).stem)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads((folder / f"said{rank}.json").read_text()) for rank in (0, 1)] == [[], []]
    return lambda name: open_trace(folder / f"{name}.zarr")


def alone(micro_batches=1):
    """step -> rank -> name -> gradient, from one process that computes both ranks' and averages them."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [batches(rank) for rank in (0, 1)]
    out = []
    for step in range(STEPS):
        local = []
        for rank in (0, 1):
            optimizer.zero_grad()
            for number in range(micro_batches):
                model(data[rank][micro_batches * step + number]).square().mean().backward()
            local.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        for name, parameter in model.named_parameters():
            if name in local[0]:
                parameter.grad = (local[0][name] + local[1][name]) / 2
        if micro_batches == 2:
            clip(model.parameters())
        optimizer.step()
        out.append([{name: gradient.numpy() for name, gradient in one.items()} for one in local])
    return out


def mean(step, name):
    return (step[0][name] + step[1][name]) / 2


def check(trace, expected, stage="local"):
    assert [key.rank for key in trace.streams] == [0, 1]
    for rank in (0, 1):
        for name in expected[0][rank]:
            assert trace.steps(name, rank=rank).tolist() == list(range(STEPS))
            for step, row in enumerate(expected):
                wanted = row[rank][name] if stage == "local" else mean(row, name)
                found = trace.read(name, step, rank=rank)
                assert np.allclose(found, wanted.ravel(), rtol=1e-5, atol=1e-8), (name, step, rank)
    assert {info.stage for info in trace.tensors} == {stage}


@pytest.mark.capture_case("DDP, local gradients")
@pytest.mark.parametrize("program", ["ddp", "views", "by_hand", "scaled", "static", "zero_redundancy"])
def test_local_gradients(run, program):
    trace = run(program)
    check(trace, alone())
    assert trace.attrs["model"] == "Model"
    assert agreement(trace, "local") == (12, 0, 0, "body.weight")


@pytest.mark.capture_case("DDP, the user's own communication hooks")
@pytest.mark.parametrize("program", ["own_hook", "powersgd"])
def test_what_a_hook_sends_is_not_what_is_recorded(run, program):
    """The weights follow what was sent, so from the second step on the gradients differ a little from those without."""
    trace, expected = run(program), alone()
    for rank in (0, 1):
        for name, gradient in expected[0][rank].items():
            assert np.array_equal(trace.read(name, 0, rank=rank), gradient.ravel())
            assert np.allclose(trace.read(name, 2, rank=rank), expected[2][rank][name].ravel(), rtol=0.1, atol=0.01)
    assert {info.stage for info in trace.tensors} == {"local"}


@pytest.mark.capture_case("DDP, accumulation with and without no_sync")
@pytest.mark.parametrize("program", ["accumulated", "accumulated_with_sync"])
def test_local_gradients_of_micro_batches(run, program):
    trace, expected = run(program), alone(micro_batches=2)
    check(trace, expected)
    if program == "accumulated":
        for rank in (0, 1):
            for name, gradient in expected[0][rank].items():
                assert np.array_equal(trace.read(name, 0, rank=rank), gradient.ravel()), "exactly, without an average"


@pytest.mark.capture_case("DDP, find_unused_parameters")
def test_a_parameter_that_this_process_did_not_use_is_absent(run):
    trace = run("unused")
    ranks = [info.rank for info in trace.tensors if info.name == "extra.bias"]
    assert [(rank, trace.steps("extra.bias", rank=rank).tolist()) for rank in ranks] == [(0, [1])]
    assert trace.read("body.bias", 0, rank=1).any()


@pytest.mark.capture_case("DDP, averaged gradients")
def test_reduced_gradients(run):
    trace = run("reduced")
    check(trace, alone(), "reduced")
    for info in trace.tensors:
        assert trace.read(info.name, 2, rank=0).tobytes() == trace.read(info.name, 2, rank=1).tobytes()


@pytest.mark.capture_case("FSDP2 (fully_shard)")
@pytest.mark.capture_case("FSDP2 (fully_shard): --kind update, outer, momentum")
def test_each_process_records_its_shard_and_what_an_optimizer_does_to_it(run):
    trace, expected = run("sharded"), alone()
    assert {info.name for info in trace.tensors} == {"body.weight", "body.bias", "head.weight", "head.bias"}
    for info in trace.tensors:
        assert (info.stage, info.attrs["placements"], info.attrs["place"]) == ("reduced", ["Shard(dim=0)"], [info.rank])
        whole = np.stack([mean(step, info.name) for step in expected])
        assert list(whole.shape[1:]) == info.attrs["whole_shape"]
        # SGD with a rate of 0.1.
        wanted = {"weight": whole, "update": 0.1 * whole, "outer": 0.1 * whole.sum(axis=0)[None]}[info.kind]
        for step, row in enumerate(wanted):
            found = trace.read(info.name, step, rank=info.rank, kind=info.kind)
            loose = 1 if info.kind == "weight" else 10
            own = np.split(row, 2)[info.rank].ravel()
            assert np.allclose(found, own, rtol=loose * 1e-5, atol=loose * 1e-8), info
    assert {info.kind for info in trace.tensors} == {"weight", "update", "outer"}
    assert {info.module_type for info in trace.tensors} == {"Linear"}
    assert trace.attrs["model"] == "Model"
    assert agreement(trace, "reduced") == (0, 0, None, None)
    trace = run("sharded_adam")
    for info in trace.tensors:
        if info.kind == "momentum":
            gradients = [trace.read(info.name, step, kind="weight", rank=info.rank) for step in range(2)]
            found = trace.read(info.name, 1, kind="momentum", rank=info.rank)
            assert np.allclose(found, 0.1 * gradients[1] + 0.09 * gradients[0], rtol=1e-5, atol=1e-9)
    result = gtrace.run_sweep(trace, ["qsgd:bits=3"], draws=0, kind="update")
    assert result["n"].max() == 16, "of 32, on each of two ranks"
    assert any("1 of 2 parts" in text for text in result.warnings)


@pytest.mark.capture_case("DDP: time of the exchange, from its own clock")
def test_time_of_the_exchange(run):
    times = StepTimes.of(run("timed").attrs)
    assert times.ranks == 2
    assert 0 < times.exposed <= times.communication < 60
    assert times.computing == pytest.approx(max(0.0, times.step - times.exposed)) or times.step <= times.exposed


@pytest.mark.capture_case("FSDP2 and FSDP: time of their collectives")
@pytest.mark.parametrize("program", ["slow_shards", "slow_flat"])
def test_time_of_collectives(run, program):
    trace = run(program)
    times = StepTimes.of(trace.attrs)
    seconds, seen = json.loads(Path(trace.path).with_name(f"{program}0.json").read_text())
    # From the second step on; the last interval ends in the last step.
    outside, inside = np.transpose(seconds[2:])
    assert min(*outside, *inside) > 0.01
    # What is measured around them takes a little longer than they do.
    assert 0 < times.communication - np.median(outside + inside) < 0.005
    assert 0 < times.outside_backward - np.median(outside) < 0.005
    assert times.exposed == times.communication < times.step
    assert "for which training waits" in str(times)
    assert seen == 2 * [[True, True]] + (len(seen) - 2) * [[False, False]]


@pytest.mark.parametrize(("program", "stage"), [("shared", "reduced"), ("apart", "local")])
def test_whether_processes_share_what_an_optimizer_does(run, program, stage):
    trace = run(program)
    assert {info.stage for info in trace.tensors if info.kind != "weight"} == {stage}
    updates = [trace.read("body.weight", 0, kind="outer", rank=rank).tobytes() for rank in (0, 1)]
    assert (updates[0] == updates[1]) == (stage == "reduced")


@pytest.mark.capture_case("FSDP (FullyShardedDataParallel)")
@pytest.mark.parametrize("program", ["flat", "flat_original"])
def test_each_process_records_its_stretch_of_what_is_laid_flat(run, program):
    trace = run(program)
    steps = alone()
    whole = {name: np.stack([mean(step, name).ravel() for step in steps]) for name in steps[0][0]}
    if program == "flat":
        whole = {"_flat_param": np.concatenate(list(whole.values()), axis=1)}
    covered = dict.fromkeys(whole, 0)
    for info in trace.tensors:
        assert (info.stage, info.attrs["placements"], info.attrs["place"]) == ("reduced", ["FlatShard"], [info.rank])
        assert np.prod(info.attrs["whole_shape"]) == whole[info.name].shape[1]
        first, last = info.attrs["elements"]
        covered[info.name] += last - first
        for step in range(STEPS):
            found = trace.read(info.name, step, rank=info.rank)
            assert np.allclose(found, whole[info.name][step, first:last], rtol=1e-5, atol=1e-8)
    assert covered == {name: values.shape[1] for name, values in whole.items()}
    assert agreement(trace, "reduced") == (0, 0, None, None)
    assert trace.attrs["model"] == "Model"


if __name__ == "__main__":
    import torch.distributed.fsdp  # which the ranks share

    mp.start_processes(work, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
