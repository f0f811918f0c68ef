"""Real ranks: processes over gloo, started once for each world size, which say what went wrong."""

import gc
import sys
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_training import reports_of_ranks

import gtrace
from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import Message
from gtrace.errors import PayloadError, UsageError
from gtrace.training import frames


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """World size -> what went wrong on each rank in each part."""
    return reports_of_ranks("ranks", (2, 3, 4), tmp_path_factory.mktemp("ranks"))


@pytest.mark.framework_case("DistributedDataParallel: payloads between ranks")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_exchange_the_bytes_that_they_report_and_what_simulated_ranks_do(world, reports):
    assert [report["averages"] for report in reports[world]] == [""] * world


@pytest.mark.parametrize(
    ("part", "worlds"),
    [
        ("exact_averages", (2, 3)),
        ("chosen_codecs", (2,)),
        ("nonfinite", (2,)),
        ("resume_training", (2,)),
        ("joint_optimizers", (2,)),
    ],
)
def test_what_ranks_see(part, worlds, reports):
    for world in worlds:
        assert [report.get(part) for report in reports[world]] == [""] * world


def test_frames_come_back_and_damaged_ones_do_not():
    messages = [Message(b"abc", b""), None, frames.NOT_FINITE, Message(b"x" * 300, b"levels"), Message(b"y", None)]
    packed = frames.pack(messages)
    assert frames.unpack(packed, 5) == messages
    for bad in (packed[:-1], packed + b"z", packed[:20], b""):
        with pytest.raises(PayloadError, match="differ"):
            frames.unpack(bad, 5)
    parts = [b"", b"one", b"three"]
    assert frames.split(frames.join(parts), 3) == parts
    with pytest.raises(PayloadError, match="announce"):
        frames.split(frames.join(parts)[:-1], 3)
    with pytest.raises(PayloadError, match="too few"):
        frames.split(b"ab", 3)


def test_rules_choose_by_the_whole_name_and_by_its_last_part():
    rules = CodecTable.of("alq:bits=3", {"bias": "none", "head.*": "qsgdinf:bits=4"}, 100)
    assert str(rules.choose("fc.bias", 10**6)) == "none"
    assert str(rules.choose("head.bias", 10)) == "none"  # the first rule that fits
    assert str(rules.choose("head.weight", 10)) == "qsgdinf:bits=4"
    assert str(rules.choose("fc.weight", 99)) == "none"
    assert str(rules.choose("fc.weight", 100)) == "alq:bits=3"


@pytest.mark.parametrize(
    ("codec", "options", "said"),
    [
        ("alq", {"exchange": "tree"}, "exchange: 'tree' is unknown"),
        ("alq", {"levels": "theirs"}, "levels: 'theirs' is unknown"),
        ("alq", {"nonfinite": "maybe"}, "nonfinite: 'maybe' is unknown"),
        ("alq", {"compare_every": -1}, "compare_every: -1 is below 0"),
        ("alq", {"min_size": -1}, "min-size: -1 is below 0"),
        ("zipml:scope=model", {}, "cannot go bucket by bucket"),
        ("alq", {"rules": {"bias": "nonsense"}}, "nonsense"),
    ],
)
def test_a_state_says_what_is_wrong_with_its_arguments(codec, options, said):
    with pytest.raises(UsageError, match=said):
        gtrace.training.State(codec, **options)


def test_named_parameters_stay_alive():
    """The id of a freed parameter may go to another one, which would then be encoded under its name."""
    model = torch.nn.Linear(2, 2)
    weight = weakref.ref(model.weight)
    state = gtrace.training.State("qsgdinf:bits=3", model=model)
    del model
    gc.collect()
    assert state.steps == 0
    assert weight() is not None


def test_one_rank_alone_gets_its_own_decoded_gradient(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own in the place
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        state = gtrace.training.State("qsgdinf:bits=3", nonfinite="error")
        values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
        (average,) = state.average(["w"], [values])
        state.end_step()
        assert 0 < np.sum((average - values) ** 2) / np.sum(values**2) == pytest.approx(state.tally.worker_variance)
        assert state.comparison.relative_variance == pytest.approx(state.tally.worker_variance)
        values[3] = np.inf
        with pytest.raises(gtrace.training.NonfiniteGradientError, match="rank 0, w: 1 of 1000"):
            state.average(["w"], [values])
    finally:
        dist.destroy_process_group()
