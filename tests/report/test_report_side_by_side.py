import math

import numpy as np
import pytest
from helpers_report import result_of, row, rows_of

from gtrace.report import to_html
from gtrace.report.analysis.sweep import compare_sweeps
from gtrace.report.inputs import make_report
from gtrace.report.text import to_markdown

STEPS = tuple(range(0, 300, 10))


def swept(factor, layers=("a", "b"), steps=STEPS, methods=("qsgd", "nuqsgd"), seed=0, trace=None):
    """A sweep whose errors are ``factor`` times those of any other with the same seed, up to 1% of noise."""
    shared, own = np.random.default_rng(0), np.random.default_rng([seed, 1])
    rows = []
    for step in STEPS:
        for layer in ("a", "b", "c"):
            error = math.exp(shared.normal(0, 1.0))
            if step in steps and layer in layers:
                for method in methods:
                    value = factor * error * math.exp(own.normal(0, 0.01))
                    rows.append(row(layer, step, method, 2, squared_error=value, energy=2.0, bits_total=2.0))
    return result_of(rows, provenance={"trace_fingerprint": trace} if trace else None)


def test_the_same_codecs_are_paired_on_what_both_have():
    report = make_report([swept(1.0, seed=1), swept(1.3, seed=2, layers=("b", "c"), steps=STEPS[5:])])
    (pair,) = report.side_by_side
    assert (pair.tensors, pair.steps, pair.same_trace, any(found.cells for found in pair.shared)) == (1, 25, None, True)
    assert [c.spec.split(":")[0] for c in pair.shared] == ["qsgd", "nuqsgd"]
    for found in pair.shared:
        assert (found.cells, found.ratio) == (25, pytest.approx(1.3, rel=0.02))
        paired = found.by_elements
        assert 1.27 < paired.low < paired.estimate < paired.high < 1.33
        assert found.differs
    (pair,) = make_report([swept(1.0), swept(1.0)]).side_by_side
    assert [c.ratio for c in pair.shared] == pytest.approx([1.0, 1.0])
    assert not any(c.differs for c in pair.shared)


def test_what_is_in_one_sweep_alone_and_nothing_in_common_is_said():
    report = make_report([swept(1.0, methods=("qsgd", "alq")), swept(1.0, methods=("qsgd", "zipml"))])
    assert "Only in sweep 1: alq:bits=2" in to_markdown(report)
    report = make_report([swept(1.0, layers=("a",), trace="x"), swept(2.0, layers=("c",), trace="y")])
    (pair,) = report.side_by_side
    assert (pair.tensors, pair.same_trace, any(found.cells for found in pair.shared)) == (0, False, False)
    assert all(not c.by_elements.known and math.isfinite(c.ratio) for c in pair.shared)
    assert "No tensor at any step is in both" in to_markdown(report)


@pytest.mark.parametrize("about", ["x", {"capture": "x"}, {"capture": {"stage": "x", "steps_seen": "x"}}])
def test_a_page_of_results_whose_trace_says_something_else_is_made(about):
    report = make_report([result_of(rows_of(bits=[2]), provenance={"trace_attrs": about})])
    assert "configurations measured" in to_html(report)


@pytest.mark.parametrize(("stage", "ranks"), [("reduced", 4), ("local", 1)])
def test_whose_gradients_they_are_is_said_wherever_a_ratio_is(stage, ranks):
    about = {"trace_attrs": {"world_size": 4, "capture": {"stage": stage}}}
    report = make_report([result_of(rows_of(), provenance=about)])
    text, whose = to_markdown(report), ("of one worker's gradient", "of the average of 4 ranks' gradients")
    assert ("Measured on averages over 4 ranks" in text) == (ranks == 4)
    assert [text.count(words) for words in whose] == ([0, 2] if ranks == 4 else [2, 0])
    plain = make_report([result_of(rows_of(bits=[2]))]).sweeps[0]
    pair = compare_sweeps(plain, report.sweeps[0])
    assert pair.whose == "one worker's gradient" if ranks == 1 else f"{whose[1][3:]} over one worker's gradient"
