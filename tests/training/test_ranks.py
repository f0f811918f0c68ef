"""Real ranks: processes over gloo, started once for each world size, which say what went wrong."""

import gc
import weakref

import pytest
import torch
from helpers_training import reports_of_ranks

import gtrace
from gtrace.codecs.link import Message
from gtrace.errors import PayloadError, UsageError
from gtrace.training import ranks


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
        ("nonfinite", (2,)),
        ("scaled_gradients", (2,)),
        ("resume_training", (2,)),
    ],
)
def test_what_ranks_see(part, worlds, reports):
    for world in worlds:
        assert [report.get(part) for report in reports[world]] == [""] * world


def test_frames_come_back_and_damaged_ones_do_not():
    messages = [Message(b"abc", b""), None, ranks.NOT_FINITE, Message(b"x" * 300, b"levels"), Message(b"y", None)]
    packed = ranks.pack(messages)
    assert ranks.unpack(packed, 5) == messages
    for bad in (packed[:-1], packed + b"z", packed[:20], b""):
        with pytest.raises(PayloadError, match="differ"):
            ranks.unpack(bad, 5)
    parts = [b"", b"one", b"three"]
    assert ranks.split(ranks.join(parts), 3) == parts
    with pytest.raises(PayloadError, match="announce"):
        ranks.split(ranks.join(parts)[:-1], 3)
    with pytest.raises(PayloadError, match="too few"):
        ranks.split(b"ab", 3)


@pytest.mark.parametrize(
    ("codec", "options", "said"),
    [
        ("alq", {"exchange": "tree"}, "exchange: 'tree' is unknown"),
        ("alq", {"compare_every": -1}, "compare_every: -1 is below 0"),
        ("zipml:scope=model", {}, "cannot go bucket by bucket"),
        ("alq:law=truncnorm", {"levels": "common"}, "alq:.*law=truncnorm: fits to moments of every bucket"),
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
