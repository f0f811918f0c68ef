import math

import numpy as np
import pytest
from helpers_report import result_of, row

from gtrace.report.analysis.families import bd_rate, envelope
from gtrace.report.analysis.sweep import analyze
from gtrace.report.sections.sweep import sweep_verdict

STEPS = tuple(range(0, 400, 10))
LAYERS = (("a", 1000, 4.0), ("b", 3000, 1.0))


def rows_of(factors, layers, steps, noise, shared, bits):
    random = np.random.default_rng(0)
    for step in steps:
        for layer, n, energy in layers:
            common = math.exp(random.normal(0, shared))
            for method, factor in factors.items():
                own = factor(layer, step) if callable(factor) else factor
                own *= math.exp(random.normal(0, noise))
                for b in bits:
                    error = energy * common * own * 4.0**-b
                    yield row(layer, step, method, b, n=n, energy=energy, squared_error=error, bits_total=float(b))


def swept(layers=LAYERS, steps=STEPS, noise=0.05, shared=1.0, bits=(2, 3, 4), **factors):
    """Methods of variance factor (a number, or of layer and step) times 4^-bits; ``shared`` noise moves all alike."""
    return analyze(result_of(rows_of(factors, layers, steps, noise, shared, bits)))


def at_three_bits(analysis):
    (compared,) = [c for c in analysis.comparisons if c.bits == 3]
    return compared


def said(analysis):
    return " ".join(sweep_verdict(analysis))


def test_paired_differences_do_not_see_what_moves_all_methods_alike():
    analysis = swept(qsgd=1.0, nuqsgd=1.1)
    compared = at_three_bits(analysis)
    low, high = compared.by_elements.low, compared.by_elements.high
    assert (compared.first, compared.second) == ("qsgd", "nuqsgd")
    assert low < 1 / 1.1 < high < low + 0.06
    assert compared.differs
    assert compared.better > 0.9
    # Unpaired, the noise of the steps would hide it: each method alone is known to a factor of 1.5 or so.
    alone = analysis.configurations[0].in_steps
    assert alone.high / alone.low > 1.3


def test_equal_methods_are_level_and_few_steps_prove_nothing():
    level = swept(qsgd=1.0, nuqsgd=1.001, noise=0.2)
    assert not any(c.differs for c in level.comparisons)
    assert "are too close to call: the differences are within the noise of 40 steps" in said(level)
    few = swept(qsgd=1.0, nuqsgd=2.0, steps=STEPS[:4])
    assert all(not c.by_elements.known and math.isnan(c.p_holm) for c in few.comparisons)
    assert "but 4 steps are too few for a confidence interval" in sweep_verdict(few)[1]


def test_the_correction_counts_every_comparison():
    analysis = swept(qsgd=1.0, nuqsgd=1.02, alq=1.03, noise=0.1, bits=(1, 2, 3, 4))
    raw = [c.by_elements.p for c in analysis.comparisons]
    assert len(raw) == 8
    assert min(c.p_holm for c in analysis.comparisons) == pytest.approx(min(1, min(raw) * len(raw)))


def test_by_elements_and_by_layers_are_told_apart():
    # Layer a holds all the energy and prefers qsgd twofold; b, which holds none of it, nuqsgd eightfold.
    analysis = swept(
        (("a", 1000, 1.0), ("b", 1000, 1e-6)),
        noise=0.01,
        shared=0.0,
        qsgd=lambda layer, _: 1.0 if layer == "a" else 8.0,
        nuqsgd=lambda layer, _: 2.0 if layer == "a" else 1.0,
    )
    compared = at_three_bits(analysis)
    assert compared.ratio == pytest.approx(0.5, rel=0.02)
    assert compared.by_layers.estimate == pytest.approx(math.sqrt(0.5 * 8), rel=0.02)
    (choice,) = analysis.layer_choices
    assert (choice.tensor, choice.best, choice.leader, choice.sure) == ("b", "nuqsgd", "qsgd", True)
    assert choice.ratio == pytest.approx(1 / 8, rel=0.02)
    own = next(c for c in analysis.configurations if c.method == "qsgd" and c.nominal_bits == 2)
    assert own.layers_variance == pytest.approx(math.sqrt(1.0 * 8.0) / 16, rel=0.02)
    assert "b prefers nuqsgd" in said(analysis)
    place = [f.label for f in analysis.families].index("qsgd")
    assert analysis.at_layers[place, analysis.targets.index(3)] == pytest.approx(math.sqrt(8.0) / 64, rel=0.02)


def test_thirds_show_what_changes_over_training():
    analysis = swept(noise=0.01, shared=0.0, qsgd=1.0, nuqsgd=lambda _, step: 0.5 if step >= 270 else 2.0)
    assert [(phase.name, phase.steps) for phase in analysis.phases] == [("early", 13), ("middle", 13), ("late", 14)]
    compared = at_three_bits(analysis)
    ratios = compared.thirds if compared.first == "nuqsgd" else {k: 1 / v for k, v in compared.thirds.items()}
    assert ratios == pytest.approx({"early": 2.0, "middle": 2.0, "late": (2 + 13 * 0.5) / 14}, rel=0.03)
    assert "late (steps 260 to 390) nuqsgd" in said(analysis)


def test_steps_count_by_the_training_that_they_stand_for():
    # Fifty consecutive steps at the start, then one in a hundred: qsgd is better early, nuqsgd after.
    steps = (*range(50), *range(100, 2000, 100))
    analysis = swept(steps=steps, noise=0, shared=0, qsgd=lambda _, step: 0.5 if step < 50 else 2.0, nuqsgd=1.0)
    variances = {c.method: c.relative_variance for c in analysis.configurations if c.nominal_bits == 2}
    share = analysis.single.weights[:50].sum()
    assert share < 0.1
    assert variances["nuqsgd"] < variances["qsgd"] == pytest.approx((share * 0.5 + (1 - share) * 2.0) / 16)


def test_bd_rate_of_a_curve_that_takes_a_fifth_less_is_a_fifth_less():
    bits, variance = np.array([1.0, 2.0, 3.5, 5.0]), np.array([1.0, 0.3, 0.05, 0.004])
    rate = bd_rate(envelope(0.8 * bits, variance), envelope(bits, variance))
    assert (rate.change, rate.low, rate.high, *rate.bits) == pytest.approx((-0.2, 0.004, 1.0, 1.0, 5.0))
    assert rate.why == ""
    # Over the common range. Power laws: log bits = -slope log variance + c, which a piecewise cubic follows exactly.
    errors, others = np.geomspace(1, 1e-3, 7), np.geomspace(0.1, 1e-5, 7)
    rate = bd_rate(envelope(3 * others**-0.3, others), envelope(2 * errors**-0.2, errors))
    assert (rate.low, rate.high) == pytest.approx((1e-3, 0.1))
    mean_log = (math.log(1e-3) + math.log(0.1)) / 2
    assert rate.change == pytest.approx(math.exp(math.log(1.5) - 0.1 * mean_log) - 1, rel=1e-6)
    # What costs more for the same error is no point of a curve.
    kept = np.exp(envelope([1, 2, 3, 3.5, 4, math.nan, 5], [1, 0.5, 0.6, 0.49999, 0.1, 0.05, 0.0]))
    assert kept[:, 0].tolist() == pytest.approx([1, 2, 4])

    # There is none without an error that both reach, or of fewer than three points.
    for others, errors in (([1, 2, 3], [1e-4, 1e-5, 1e-6]), ([1, 2], [1, 0.1]), ([], [])):
        assert math.isnan(bd_rate(envelope(others, errors), envelope([1, 2, 3], [1, 0.1, 0.01])).change)


def test_bd_rates_are_against_qsgdinf():
    (rate,) = swept(qsgdinf=1.0, qsgd=4.0, bits=(1, 2, 3, 4, 5), noise=0.0, shared=0.0).bd_rates
    assert (rate.family, rate.reference) == ("qsgd", "qsgdinf")
    # qsgd needs one bit more everywhere: the mean of log((b + 1) / b) over 1 to 4 bits of the reference.
    mean_log = (5 * math.log(5) - 2 * math.log(2) - 4 * math.log(4)) / 3
    assert rate.change == pytest.approx(math.exp(mean_log) - 1, rel=0.02)
    assert swept(qsgd=1.0).bd_rates == ()
