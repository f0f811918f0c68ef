"""Which steps and which tensors are recorded, from the words of the options."""

import itertools

import pytest

from gtrace.capture.options import (
    HORIZON,
    AutomaticSteps,
    EveryStep,
    TensorSelection,
    _bursts,
    parse_size,
    parse_steps,
    step_policy,
)
from gtrace.errors import UsageError


def chosen(policy, end, capacity=10**18):
    return [step for step in range(end) if policy.wants(step, capacity)]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("0", [0]),
        ("0,10,12", [0, 10, 12]),
        ("3-6", [3, 4, 5, 6]),
        ("3-9:3", [3, 6, 9]),
        ("3-8:3", [3, 6]),
        ("10+3", [10, 11, 12]),
        ("10+1", [10]),
        (" 1 , 4-5 , 18+2 ", [1, 4, 5, 18, 19]),
        ("4-6,5-7", [4, 5, 6, 7]),
    ],
)
def test_lists_of_steps(text, steps):
    assert chosen(parse_steps(text), 20) == steps
    assert str(parse_steps(text)) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "a", "1,", "5-3", "-3", "3-", "1+0", "1+", "2-8:0", "1.5", "1 2", "auto,3", "2-4+3"]
)
def test_what_is_no_list_of_steps(text):
    with pytest.raises(UsageError, match="--steps"):
        parse_steps(text)


def test_policies_of_the_two_options():
    assert isinstance(step_policy(None, None), AutomaticSteps)
    assert isinstance(step_policy("auto", None), AutomaticSteps)
    assert chosen(step_policy(None, 4), 10) == [0, 4, 8]
    assert step_policy(None, 1) == EveryStep(1)
    with pytest.raises(UsageError, match="--every: 0"):
        step_policy(None, 0)


def bursts_of(steps):
    """Lengths of the stretches of consecutive steps."""
    starts = [k for k, step in enumerate(steps) if k == 0 or step != steps[k - 1] + 1]
    return [end - start for start, end in itertools.pairwise([*starts, len(steps)])]


@pytest.mark.parametrize("capacity", [*range(70), 160, 1000, 20_000])
def test_automatic_steps_are_bursts_that_fit_the_budget(capacity):
    policy = AutomaticSteps()
    # Where bursts begin is where they may meet: beyond the dense start a sample of steps is enough.
    _, length, starts = _bursts(capacity)
    near = {step for start in starts for step in range(start - 2, start + length + 2)}
    steps = [step for step in sorted({*range(capacity + 2), *near}) if policy.wants(step, capacity)]
    assert len(steps) == policy.most(capacity) == max(1, capacity)
    assert steps[: (capacity + 1) // 2] == list(range((capacity + 1) // 2))
    assert min(bursts_of(steps)) >= min(capacity, 3 if capacity < 8 else 4) or capacity == 0
    assert steps[-1] < HORIZON


def test_automatic_steps_are_at_growing_distances():
    steps = chosen(AutomaticSteps(), HORIZON, 160)
    assert bursts_of(steps) == [80] + [10] * 8
    ratios = [b / a for a, b in itertools.pairwise([80] + [steps[k] for k in range(80, 160, 10)])]
    assert max(ratios) / min(ratios) < 1.05
    assert chosen(AutomaticSteps(), 5000) == list(range(5000)), "without a limit"


SIZES = {"0": 0, "1000": 1000, "4GB": 4 * 10**9, "4 gb": 4 * 10**9, "500M": 5 * 10**8, "2KiB": 2048, "7B": 7}


@pytest.mark.parametrize("text", [*SIZES, "1.5GiB", "", "GB", "-1", "4XB", "1e9", "4 G B"])
def test_sizes(text):
    expected = {**SIZES, "1.5GiB": 3 * 2**29}.get(text)
    if expected is None:
        with pytest.raises(UsageError, match="is not a valid size"):
            parse_size(text)
    else:
        assert parse_size(text) == expected


def test_selection_by_patterns():
    selection = TensorSelection(("conv*", "head.weight"), ("*.bias",))
    names = ["conv1.weight", "conv1.bias", "fc.weight", "head.weight"]
    assert [name for name in names if selection.keeps(name)] == ["conv1.weight", "head.weight"]
    assert selection.complaints() == []
    assert TensorSelection(("head.*",)).keeps("embedding.weight", ("head.weight",)), "an alias"
    assert not TensorSelection((), ("head.*",)).keeps("embedding.weight", ("head.weight",))
    assert not TensorSelection(("Conv*",)).keeps("conv1.weight")
    assert TensorSelection().keeps("anything")


def test_patterns_that_match_nothing_are_named_with_the_nearest_names():
    selection = TensorSelection(("conv9.wieght*", "fc.*"), ("norm*",))
    assert selection.complaints() == [], "nothing was seen yet"
    for name in ("conv1.weight", "conv2.weight", "fc.bias"):
        selection.keeps(name)
    first, second = selection.complaints()
    assert first == "--tensors 'conv9.wieght*' matched no tensor; did you mean conv2.weight or conv1.weight?"
    assert second.startswith("--exclude 'norm*' matched no tensor; ")
