"""Charts of experiments: bars and points by category, marks, ticks."""

from __future__ import annotations

import pytest

from gtrace.report.figures.charts import draw_chart
from gtrace.report.section import Chart, Curve, Panel


def axes_of(panel):
    return draw_chart(Chart((panel,), "")).axes[0]


def test_curves_that_share_no_category_stand_on_their_own_and_others_side_by_side():
    alone = axes_of(Panel((Curve("a", ("x",), (1.0,)), Curve("b", ("y",), (2.0,))), bars=True))
    assert [bar.get_x() + bar.get_width() / 2 for bar in alone.patches] == pytest.approx([0, 1])
    beside = axes_of(Panel((Curve("a", ("x", "y"), (1.0, 2.0)), Curve("b", ("y",), (2.0,))), bars=True))
    assert [bar.get_x() + bar.get_width() / 2 for bar in beside.patches] == pytest.approx([-0.2, 0.8, 1.2])


def test_points_stand_in_the_place_of_bars_with_their_interval():
    axes = axes_of(Panel((Curve("a", ("x",), (91.0,), (90.0,), (93.0,), form="points"),), bars=True))
    assert not axes.patches
    assert axes.lines[0].get_linestyle() == "None"
    assert axes.lines[0].get_xydata().tolist() == [[0.0, 91.0]]
    low, high = axes.collections[0].get_segments()[0]
    assert (low[1], high[1]) == (90.0, 93.0)
    assert axes.get_ylim()[0] > 50  # such an axis need not begin at 0


def test_variants_of_a_method_are_paler_bars():
    curves = (Curve("ALQ", ("x",), (1.0,), method="alq"), Curve("ALQ-N", ("x",), (1.0,), method="alq-n"))
    plain, variant = axes_of(Panel(curves, bars=True)).patches
    assert plain.get_facecolor()[:3] == variant.get_facecolor()[:3]
    assert (plain.get_alpha(), variant.get_alpha()) == (1.0, 0.5)


def test_a_mark_is_a_named_vertical_line():
    axes = axes_of(Panel((Curve("a", (0.0, 9.5), (1.0, 2.0)),), marks=(("drop", 4.0),)))
    assert axes.lines[-1].get_xdata() == [4.0, 4.0]
    assert [text.get_text() for text in axes.texts] == ["drop"]


@pytest.mark.parametrize(("places", "whole"), [((2, 3, 4), True), ((2.0, 3.0, 4.5), False)])
def test_whole_numbers_have_ticks_at_whole_numbers(places, whole):
    ticks = axes_of(Panel((Curve("a", places, (1.0, 2.0, 3.0)),))).get_xticks()
    assert all(float(tick).is_integer() for tick in ticks) == whole
