"""Real ranks: processes over gloo, started once for each world size; what they saw is judged here."""

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
    """World size -> what each rank saw."""
    return reports_of_ranks("ranks", (2, 3, 4), tmp_path_factory.mktemp("ranks"))


@pytest.mark.framework_case("DistributedDataParallel: payloads between ranks")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_exchange_the_bytes_that_they_report_and_what_simulated_ranks_do(world, reports):
    found = [report["codecs_report"] for report in reports[world]]
    assert len(found[0]) == {2: 11, 3: 8, 4: 12}[world]
    for case in found[0]:
        linear, way = "powersgd" in case, case.split()[1]
        assert (sum(each[case]["down"][0] for each in found) > 0) != (linear or way in ("allgather", "shared-scale"))
        for seen in (each[case] for each in found):
            assert seen["same"], f"{case}: ranks have different weights"
            # Sums in another order than gloo's.
            assert seen["apart"] <= (1e-5 if linear else 0), f"{case}: other averages than among simulated ranks"
            assert seen["steps"] == 4
            assert seen["counted"] == seen["wire"] > 0, case
            # State is kept by parameter, although buckets are built anew after the first step.
            assert seen["senders"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
            assert seen["elements"] == 4 * (24 * 60 + 60 + 60 * 6 + 6)
            assert not seen["last_compared"]  # steps 0 and 2 are
            assert seen["variance"] > 1e-9
            assert (seen["encoded"] > 0) == ("on_device" in case)
            if "common" in case:
                # The sketches, once; levels never travel.
                assert seen["shared"][0] > 0 == sum(seen["shared"][1:])
            if linear:
                rank = 1 if "rank=1" in case else 2
                # P and Q of both matrices, and the biases as they are.
                assert seen["payload"] == 32 * (rank * (60 + 24 + 6 + 60) + 60 + 6)
            elif way == "allgather" and "common" not in case:
                # Nothing but the reported message, to each of the others, and eight bytes per bucket for its length.
                buckets, rest = divmod(seen["wire"] - (world - 1) * seen["reported"], 8 * (world - 1))
                assert rest == 0
                assert 4 <= buckets <= 16
                assert seen["down"] == [0.0, 0.0, 0]
            elif way == "two-shot":
                error, energy, bits = seen["down"]
                # A rank may have nothing to sum up: these tensors are smaller than a bucket and have one owner each.
                assert (error > 0) == (energy > 0) == (bits > 0)
                # Shares of sparsity may leave next to nothing of a small piece, and few large values stay.
                assert error <= (8 if "allocation" in case else 1.5) * energy


@pytest.mark.parametrize("world", [2, 3])
def test_without_a_codec_ranks_average_as_torch_does(world, reports):
    for exact in (report["exact_report"] for report in reports[world]):
        # Sums in another order than gloo's, from three ranks on.
        assert max(exact["worst"]) <= (0 if world == 2 else 1e-6)
        assert exact["variance"] <= 1e-12
        assert 1e-7 < exact["bf16"] < 1e-4


def test_two_ranks_follow_rules_and_policies_and_resume_and_share_optimizers(reports):
    for report in reports[2]:
        chosen = {"0.weight": "qsgdinf:bits=2", "0.bias": "none", "2.weight": "none", "2.bias": "none"}
        assert report["rules_report"] == chosen
        for case, seen in report["nonfinite_report"].items():
            assert seen == ("nan" if case.startswith("pass") else "finite"), case
        for spec, resumed in report["resume_report"].items():
            assert resumed["state_dict"], spec
            assert resumed["pickle"], spec
            assert not resumed["forgotten"], spec
            assert "saved with codec" in resumed["refused"]
        assert report["joint_report"] == {"onebit-adam": True, "zeroone-adam": True}


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
