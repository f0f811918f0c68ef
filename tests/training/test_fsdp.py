"""fully_shard through codecs: processes over gloo, started once for each world size, which say what went wrong."""

import sys

import pytest
import torch
from helpers_training import reports_of_ranks

import gtrace
from gtrace.errors import UsageError
from gtrace.training.ddp import ShardedGradient


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """World size -> what went wrong on each rank in each part."""
    return reports_of_ranks("fsdp", (2, 4), tmp_path_factory.mktemp("fsdp"))


def passed(part, reports, *worlds):
    for world in worlds:
        assert [report.get(part) for report in reports[world]] == [""] * world


@pytest.mark.framework_case("fully_shard (FSDP2), with replicas, too (HSDP): payloads between ranks")
@pytest.mark.parametrize("world", [2, 4])
def test_chunks_are_averaged_as_among_simulated_ranks(world, reports):
    passed("averages", reports, world)


@pytest.mark.framework_case("fully_shard: mixed precision, chunks of columns, frozen parameters, own divisors")
@pytest.mark.parametrize("world", [2, 4])
def test_a_codec_without_loss_gives_what_torch_gives_whatever_the_program_sets(world, reports):
    passed("settings", reports, world)


def test_what_cannot_be_done_is_said_in_one_line(reports):
    passed("refused", reports, 4)


@pytest.mark.framework_case("DistributedDataParallel and fully_shard: torch.distributed.checkpoint")
def test_checkpoints_of_torch_distributed_continue_with_as_many_ranks_and_are_refused_with_others(reports):
    passed("checkpoints", reports, 2, 4)


@pytest.mark.framework_case("DistributedDataParallel and fully_shard: torch.compile (aot_eager)")
def test_compiled_models_train_as_others(reports):
    passed("compiled", reports, 2)


def test_a_state_is_refused_among_other_ranks_and_may_be_loaded_before_its_model_is_registered(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own in the place
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        state = gtrace.training.State("ef:topk")
        state.load_state_dict(state.state_dict())
        with pytest.raises(UsageError, match=r"^state: saved by rank 0 of 2 .*, and this is rank 0 of 1 "):
            state.load_state_dict({"rank 0 of 2 (resume with as many ranks)": ()})
        state.average(["0.weight"], [torch.arange(6.0).numpy()])
        state.end_step()
        saved, late = state.state_dict(), gtrace.training.State("ef:topk")
        late.load_state_dict(saved)
        late.register(torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 2))))
        (((ours,),), ((theirs,),)) = saved.values(), late.state_dict().values()
        assert str(ours["codecs"]) == str(theirs["codecs"])
        assert late.steps == len(ours["codecs"][0]["senders"]) == 1
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "dim", "ranks", "sizes"),
    [
        ((5, 3), 0, 4, [6, 6, 3, 0]),
        ((2,), 0, 4, [1, 1, 0, 0]),
        ((1, 7), 0, 2, [7, 0]),
        ((3, 8), 1, 4, [6, 6, 6, 6]),
    ],
)
def test_chunks_of_a_buffer_are_the_rows_that_torch_gives_each_rank(shape, dim, ranks, sizes):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    each = [ShardedGradient("w", gtrace.codec("none"), shape, dim, ranks, rank) for rank in range(ranks)]
    wanted = [part.reshape(-1) for part in whole.chunk(ranks, dim)]
    wanted += [torch.zeros(0)] * (ranks - len(wanted))
    blocks = torch.stack([torch.nn.functional.pad(part, (0, each[0].padded - len(part))) for part in wanted])
    assert torch.equal(each[0].joined(blocks), whole)
    assert all(torch.equal(one.cut(whole), part) for one, part in zip(each, wanted, strict=True))
    assert [one.size(rank) for rank, one in enumerate(each)] == sizes
    pieces = each[0].pieces()
    assert [(piece.owner, piece.size) for piece in pieces] == [(k, size) for k, size in enumerate(sizes) if size]
    assert len({piece.name for piece in pieces}) == len(pieces)
