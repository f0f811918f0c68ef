import pytest
from helpers_report import result_of, row, rows_of

from gtrace.report.analysis import analyze
from gtrace.report.ranking import decisive_target
from gtrace.report.verdict import off_target, sweep_verdict


def curve(method, points):
    """A method with the points (measured bits, relative variance)."""
    return [
        row(method=method, bits=b, squared_error=variance, bits_total=bits)
        for b, (bits, variance) in enumerate(points, 2)
    ]


def test_the_least_error_at_the_bits_most_methods_reach():
    rows = (
        curve("qsgd", [(1, 4.0), (3, 1.0)])
        + curve("nuqsgd", [(1, 16.0), (3, 4.0)])
        + curve("alq", [(1.5, 1), (2.5, 1)])
    )
    analysis = analyze(result_of(rows))
    assert analysis.targets[decisive_target(analysis)] == 2
    assert sweep_verdict(analysis) == [
        "At 2 measured bits: alq 1.00, qsgd 2.00, nuqsgd 8.00 relative variance.",
        (
            "alq adds 0.50 times the error of qsgd in the average step, less in 100% of training; "
            "no interval (1 step, fewer than 12)."
        ),
        "qsgd leads at 1 and 3 bits.",
    ]


def test_of_equally_covered_bits_three_are_asked_about():
    rows = curve("qsgd", [(0.5, 4.0), (5, 1.0)]) + curve("nuqsgd", [(0.5, 8.0), (5, 4.0)])
    sentences = sweep_verdict(analyze(result_of(rows)))
    assert sentences[0].startswith("At 3 measured bits: qsgd")
    assert sentences[2:] == ["qsgd leads at 1, 2 and 4 bits as well."]


def test_methods_within_two_percent_are_level():
    rows = curve("qsgd", [(1, 1.0), (3, 1.0)]) + curve("nuqsgd", [(1, 1.015), (3, 1.015)])
    sentences = sweep_verdict(analyze(result_of(rows)))
    assert sentences[0].endswith(": qsgd 1.00, nuqsgd 1.01 relative variance.")
    assert sentences[1] == "qsgd and nuqsgd are level: their relative variances are nearly the same."


def test_one_method_is_compared_with_nothing():
    assert sweep_verdict(analyze(result_of(curve("qsgd", [(1, 4.0), (3, 1.0)])))) == [
        "At 3 measured bits: qsgd 1.00 relative variance; no other method has data there."
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "the sweep has no rows"),
        ([row(squared_error=None)], "no row holds an error"),
        ([row(method="terngrad", squared_error=2.0, bits_total=0.6)], "around 1, 2, 3 and 4 measured bits"),
        ([row(squared_error=2.0)], "around 1, 2, 3 and 4 measured bits"),
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


def test_methods_that_are_level_lead_together():
    rows = curve("qsgd", [(1, 4.0), (2, 1.0), (4, 0.2)]) + curve("alq", [(1, 8.0), (2, 1.01), (4, 0.1)])
    rows += curve("amq", [(1.5, 9.0), (2.5, 9.0)])
    assert sweep_verdict(analyze(result_of(rows)))[3:] == [
        "qsgd leads at 1 bit as well.",
        "alq leads at 3 and 4 bits as well.",
    ]
