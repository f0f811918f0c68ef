import json
import math

import numpy as np
import pytest
from helpers_report import result_of, row

from gtrace.errors import UsageError
from gtrace.report.analysis.equal_bits import bd_rate, envelope
from gtrace.report.analysis.sweep import analyze
from gtrace.report.sections.sweep_words import sweep_verdict

STEPS = tuple(range(0, 400, 10))


LAYERS = (("a", 1000, 4.0), ("b", 3000, 1.0))


def swept(factors, layers=LAYERS, steps=STEPS, noise=0.05, shared=1.0, seed=0, bits=(2, 3, 4)):
    """Rows of methods of variance ``factor(layer, step)`` times 4^-bits; ``shared`` noise moves all of them alike."""
    random = np.random.default_rng(seed)
    for step in steps:
        for layer, n, energy in layers:
            common = math.exp(random.normal(0, shared))
            for method, factor in factors.items():
                own = factor(layer, step) * math.exp(random.normal(0, noise))
                for b in bits:
                    error = energy * common * own * 4.0**-b
                    yield row(layer, step, method, b, n=n, energy=energy, squared_error=error, bits_total=float(b))


def constant(value):
    return lambda layer, step: value


def test_paired_differences_do_not_see_what_moves_all_methods_alike():
    analysis = analyze(result_of(swept({"qsgd": constant(1.0), "nuqsgd": constant(1.1)})))
    (compared,) = [c for c in analysis.comparisons if c.bits == 3]
    _, low, high = compared.by_elements.exp()
    assert (compared.first, compared.second) == ("qsgd", "nuqsgd")
    assert low < 1 / 1.1 < high
    assert high - low < 0.06
    assert compared.differs
    assert compared.better > 0.9
    # Unpaired, the noise of the steps would hide it: each method alone is known to a factor of 1.5 or so.
    _, alone_low, alone_high = analysis.configurations[0].in_steps.exp()
    assert alone_high / alone_low > 1.3
    assert "beyond the noise" not in " ".join(sweep_verdict(analysis))


def test_equal_methods_are_level():
    analysis = analyze(result_of(swept({"qsgd": constant(1.0), "nuqsgd": constant(1.001)}, noise=0.2)))
    assert not any(c.differs for c in analysis.comparisons)
    sentences = sweep_verdict(analysis)
    assert "are too close to call: the differences are within the noise of 40 steps" in " ".join(sentences)


def test_few_steps_describe_and_prove_nothing():
    analysis = analyze(result_of(swept({"qsgd": constant(1.0), "nuqsgd": constant(2.0)}, steps=STEPS[:4])))
    assert all(not c.by_elements.known and math.isnan(c.p_holm) for c in analysis.comparisons)
    assert "but 4 steps are too few for a confidence interval" in sweep_verdict(analysis)[1]


def test_the_correction_counts_every_comparison():
    factors = {"qsgd": constant(1.0), "nuqsgd": constant(1.02), "alq": constant(1.03)}
    analysis = analyze(result_of(swept(factors, noise=0.1, bits=(1, 2, 3, 4))))
    raw = [c.by_elements.p for c in analysis.comparisons]
    assert len(raw) == 8
    assert min(c.p_holm for c in analysis.comparisons) == pytest.approx(min(1, min(raw) * len(raw)))


def test_by_elements_and_by_layers_are_told_apart():
    # Layer a holds all the energy and prefers qsgd twofold; b, which holds none of it, nuqsgd eightfold.
    def qsgd(layer, step):
        return 1.0 if layer == "a" else 8.0

    def nuqsgd(layer, step):
        return 2.0 if layer == "a" else 1.0

    layers = (("a", 1000, 1.0), ("b", 1000, 1e-6))
    analysis = analyze(result_of(swept({"qsgd": qsgd, "nuqsgd": nuqsgd}, layers, noise=0.01, shared=0.0)))
    compared = next(c for c in analysis.comparisons if c.bits == 3)
    assert compared.ratio == pytest.approx(0.5, rel=0.02)
    assert math.exp(compared.by_layers.estimate) == pytest.approx(math.sqrt(0.5 * 8), rel=0.02)
    (choice,) = analysis.layer_choices
    assert (choice.tensor, choice.best, choice.leader, choice.sure) == ("b", "nuqsgd", "qsgd", True)
    assert choice.ratio == pytest.approx(1 / 8, rel=0.02)
    assert analysis.layer_best == ("qsgd", "nuqsgd")
    spec = next(c for c in analysis.configurations if c.method == "qsgd" and c.nominal_bits == 2)
    assert spec.layers_variance == pytest.approx(math.sqrt(1.0 * 8.0) / 16, rel=0.02)
    assert "b prefers nuqsgd" in " ".join(sweep_verdict(analysis))
    place = [f.label for f in analysis.families].index("qsgd")
    assert analysis.at_layers[place, analysis.targets.index(3)] == pytest.approx(math.sqrt(8.0) / 64, rel=0.02)


def test_thirds_show_what_changes_over_training():
    def late(layer, step):
        return 0.5 if step >= 270 else 2.0

    analysis = analyze(result_of(swept({"qsgd": constant(1.0), "nuqsgd": late}, noise=0.01, shared=0.0)))
    assert [phase.name for phase in analysis.phases] == ["early", "middle", "late"]
    assert [phase.steps for phase in analysis.phases] == [13, 13, 14]
    compared = next(c for c in analysis.comparisons if c.bits == 3)
    ratios = compared.thirds if compared.first == "nuqsgd" else {k: 1 / v for k, v in compared.thirds.items()}
    assert ratios == pytest.approx({"early": 2.0, "middle": 2.0, "late": (2 + 13 * 0.5) / 14}, rel=0.03)
    assert "late (steps 260 to 390) nuqsgd" in " ".join(sweep_verdict(analysis))


def test_steps_count_by_the_training_that_they_stand_for():
    # Fifty consecutive steps at the start, then one in a hundred: qsgd is better early, nuqsgd after.
    def early(layer, step):
        return 0.5 if step < 50 else 2.0

    steps = (*range(50), *range(100, 2000, 100))
    analysis = analyze(result_of(swept({"qsgd": early, "nuqsgd": constant(1.0)}, steps=steps, noise=0.0, shared=0.0)))
    own = next(c for c in analysis.configurations if c.method == "qsgd" and c.nominal_bits == 2)
    other = next(c for c in analysis.configurations if c.method == "nuqsgd" and c.nominal_bits == 2)
    share = analysis.step_weights[:50].sum()
    assert share < 0.1
    assert own.relative_variance == pytest.approx((share * 0.5 + (1 - share) * 2.0) / 16)
    assert own.relative_variance > other.relative_variance


def test_named_pairs_are_compared_as_they_are():
    analysis = analyze(result_of(swept({"qsgd": constant(1.0), "nuqsgd": constant(3.0)})))
    a, b = "qsgd:bits=2,bucket_size=8192", "nuqsgd:bits=4,bucket_size=8192"
    (compared,) = analysis.compare([(a, b)])
    assert (compared.ratio, compared.p_holm) == (pytest.approx(16 / 3, rel=0.03), compared.by_elements.p)
    assert math.isnan(compared.bits)
    with pytest.raises(UsageError, match="did you mean qsgd:bits=2"):
        analysis.compare([("qsgd:bits=22,bucket_size=8192", b)])


def test_the_wasserstein_distance_never_exceeds_the_mean_error():
    rows = [
        row("a", draw=0, n=100, squared_error=1.0, mean_abs=0.2, mean_abs_error=0.1, w1_normalized=0.3),
        row("b", draw=0, n=300, squared_error=1.0, mean_abs=0.4, mean_abs_error=0.8, w1_normalized=1.5),
    ]
    (c,) = analyze(result_of(rows)).configurations
    assert c.mean_abs_error == pytest.approx((100 * 0.1 + 300 * 0.8) / (100 * 0.2 + 300 * 0.4))
    assert c.w1_normalized <= c.mean_abs_error


def curve(bits, variance):
    return envelope(list(bits), list(variance))


def test_bd_rate_of_a_curve_that_takes_a_fifth_less_is_a_fifth_less():
    bits = np.array([1.0, 2.0, 3.5, 5.0])
    variance = np.array([1.0, 0.3, 0.05, 0.004])
    change, low, high, ends, why = bd_rate(curve(0.8 * bits, variance), curve(bits, variance))
    assert change == pytest.approx(-0.2)
    assert (low, high) == pytest.approx((0.004, 1.0))
    assert ends == pytest.approx((1.0, 5.0))
    assert why == ""


def test_bd_rate_integrates_over_the_common_range():
    # Power laws: log bits = -slope log variance + c, which a piecewise cubic follows exactly.
    errors = np.geomspace(1, 1e-3, 7)
    others = np.geomspace(0.1, 1e-5, 7)
    change, low, high, _, _ = bd_rate(curve(3 * others**-0.3, others), curve(2 * errors**-0.2, errors))
    assert (low, high) == pytest.approx((1e-3, 0.1))
    mean_log = (math.log(1e-3) + math.log(0.1)) / 2
    assert change == pytest.approx(math.exp(math.log(1.5) - 0.1 * mean_log) - 1, rel=1e-6)


@pytest.mark.parametrize(
    ("test", "why"),
    [
        (curve([1, 2, 3], [1e-4, 1e-5, 1e-6]), "no error that both reach"),
        (curve([1, 2], [1, 0.1]), "fewer than 3"),
        (curve([], []), "fewer than 3"),
    ],
)
def test_no_bd_rate_without_a_common_range(test, why):
    change, *_, found = bd_rate(test, curve([1, 2, 3], [1, 0.1, 0.01]))
    assert math.isnan(change)
    assert why in found


def test_what_costs_more_for_the_same_error_is_no_point_of_a_curve():
    kept = np.exp(curve([1, 2, 3, 3.5, 4, math.nan, 5], [1, 0.5, 0.6, 0.49999, 0.1, 0.05, 0.0]))
    assert kept[:, 0].tolist() == pytest.approx([1, 2, 4])


def test_bd_rates_are_against_qsgdinf():
    factors = {"qsgdinf": constant(1.0), "qsgd": constant(4.0)}
    analysis = analyze(result_of(swept(factors, bits=(1, 2, 3, 4, 5), noise=0.0, shared=0.0)))
    (rate,) = analysis.bd_rates
    assert (rate.family, rate.reference) == ("qsgd", "qsgdinf")
    # qsgd needs one bit more everywhere: the mean of log((b + 1) / b) over 1 to 4 bits of the reference.
    assert rate.change == pytest.approx(
        math.exp((5 * math.log(5) - 2 * math.log(2) - 4 * math.log(4)) / 3) - 1, rel=0.02
    )
    assert analyze(result_of(swept({"qsgd": constant(1.0)}))).bd_rates == ()


def test_the_whole_model_has_no_layers():
    spec = {"codec": "qsgd:bits=2,scope=model", "params": json.dumps({"bits": 2, "scope": "model"})}
    rows = [row("*", step, energy=5.0, squared_error=0.5, bits_total=2.0, **spec) for step in STEPS]
    rows += list(swept({"qsgd": constant(1.0)}, shared=0.0))
    analysis = analyze(result_of(rows))
    whole = next(c for c in analysis.configurations if c.spec == spec["codec"])
    assert math.isnan(whole.layers_variance)
    assert whole.in_steps.exp()[0] == pytest.approx(0.1)
