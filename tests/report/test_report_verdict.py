import pytest
from helpers_report import result_of, row, rows_of

from gtrace.report.analysis.sweep import analyze
from gtrace.report.sections.sweep_words import off_target, sweep_verdict


def curve(method, points):
    """A method with the points (measured bits, relative variance)."""
    return [
        row(method=method, bits=b, squared_error=variance, bits_total=bits)
        for b, (bits, variance) in enumerate(points, 2)
    ]


def test_the_least_error_at_the_bits_most_methods_reach():
    rows = (
        curve("qsgd", [(1, 0.4), (2, 0.2), (3, 0.1)])
        + curve("nuqsgd", [(1, 1.6), (2, 0.8), (3, 0.4)])
        + curve("alq", [(1.5, 0.1), (2.5, 0.1)])
    )
    analysis = analyze(result_of(rows), targets=[1, 2, 3])
    assert analysis.targets[analysis.decisive] == 2
    assert sweep_verdict(analysis) == [
        "At 2 bits per value, alq loses least (10% of gradient energy), then qsgd (20%) and nuqsgd (80%).",
        (
            "alq has 0.50 times the error of qsgd and less in 100% of training, but 1 step is too few for a "
            "confidence interval, which needs 12."
        ),
        "qsgd leads at 1 and 3 bits.",
    ]


def test_of_equally_covered_bits_three_are_asked_about():
    points = [(0.5 + k, 0.5**k) for k in range(5)]
    rows = curve("qsgd", points) + curve("nuqsgd", [(bits, 0.9 * error) for bits, error in points])
    sentences = sweep_verdict(analyze(result_of(rows)))
    assert sentences[0].startswith("At 3 bits per value, nuqsgd loses least")
    assert sentences[2:] == ["nuqsgd leads at 1, 2 and 4 bits as well."]


def test_methods_within_two_percent_are_too_close_to_call():
    rows = curve("qsgd", [(2, 0.1), (3, 0.1)]) + curve("nuqsgd", [(2, 0.1015), (3, 0.1015)])
    sentences = sweep_verdict(analyze(result_of(rows)))
    assert sentences[0].endswith("qsgd loses least (10% of gradient energy), then nuqsgd (10%).")
    assert sentences[1] == "qsgd and nuqsgd are too close to call: their errors are nearly the same."


def test_one_method_is_compared_with_nothing():
    assert sweep_verdict(analyze(result_of(curve("qsgd", [(2, 0.4), (3, 0.1)])))) == [
        "At 3 bits per value, qsgd loses 10% of gradient energy; no other method was measured there."
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "the sweep has no rows"),
        ([row(squared_error=None)], "no row holds an error"),
        (
            [row(method="terngrad", squared_error=2.0, bits_total=0.6)],
            "terngrad loses 200% of gradient energy; no other",
        ),
        ([row(squared_error=2.0)], "no method has both an error and a known number of bits"),
    ],
)
def test_nothing_to_compare_is_said(rows, words):
    (sentence,) = sweep_verdict(analyze(result_of(rows)))
    assert words in sentence


def test_methods_that_no_column_reaches_are_named_with_their_own_bits():
    rows = [row(method="none", squared_error=0.0, bits_total=32.0), *rows_of()]
    found = off_target(analyze(result_of(rows)))
    assert [line.split()[0] for line in found] == ["terngrad", "natural"]
    assert all(" at " in line and line.endswith(" bits") for line in found)


def test_methods_that_are_too_close_to_call_lead_together():
    rows = curve("qsgd", [(1, 0.4), (2, 0.1), (3, 0.045), (4, 0.02)])
    rows += curve("alq", [(1, 0.8), (2, 0.101), (3, 0.03), (4, 0.01)])
    rows += curve("amq", [(1.5, 0.9), (2.5, 0.9)])
    assert sweep_verdict(analyze(result_of(rows), targets=[1, 2, 3, 4]))[3:] == [
        "qsgd leads at 1 bit as well.",
        "alq leads at 3 and 4 bits as well.",
    ]
