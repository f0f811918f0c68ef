import numpy as np
import pytest
from helpers_laws import LAYERS, STEPS, gradient, memory_trace, write_laws

from gtrace.fitting.magnitudes import LAWS, fit_magnitudes
from gtrace.report import load_report, to_json, to_markdown
from gtrace.report.analysis.traces import law_sections, mean_over_layers
from gtrace.report.sections.traces import law_section, law_table
from gtrace.trace import Trace


@pytest.fixture(scope="module")
def section():
    (found,) = law_sections(memory_trace())
    return found


def texts(table):
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def test_a_section_per_kind_with_the_same_numbers_in_every_form(tmp_path):
    report = load_report([write_laws(tmp_path / "t.zarr", kinds=("weight", "neural"), steps=(0,))])
    text, found = to_markdown(report), to_json(report)["traces"][0]["laws"]
    for kind, laws, own in zip(("weight", "neural"), report.traces[0].laws, found, strict=True):
        assert laws.kind == kind
        assert f"## Which law do the {kind} gradients follow?" in text
        assert own["mean_ks"]["lognormal"] == laws.verdict.distances["lognormal"]
    assert "**The lognormal law fits best on average" in text


def test_the_law_table(section):
    cells = texts(law_table(section))
    assert list(cells) == [*LAYERS, "mean"]
    for name in LAYERS:
        fits = [fit_magnitudes(gradient(name, step)) for step in STEPS]
        for place, law in enumerate(LAWS):
            assert float(cells[name][3 + place]) == pytest.approx(np.mean([fit.ks[law] for fit in fits]), abs=6e-4)


def test_means_over_layers_leave_the_small_ones_out_and_the_verdict_says_how_they_change(section):
    steps, means = mean_over_layers(section)
    assert steps.tolist() == list(STEPS)
    fits = [fit_magnitudes(gradient(name, 10)) for name in ("wide", "narrow", "early")]
    assert means[1, LAWS.index("normal")] == pytest.approx(np.mean([fit.ks["normal"] for fit in fits]))
    place = LAWS.index("lognormal"), LAWS.index("normal")
    first, last = means[0, place], means[-1, place]
    said = f"From step 0 to 20: lognormal {first[0]:.3f} to {last[0]:.3f}, normal {first[1]:.3f} to {last[1]:.3f}."
    assert said in section.sentences


@pytest.mark.parametrize("values", [np.zeros(300), np.ones(300), np.array([1.0]), np.array([np.nan, 1.0, 2.0])])
def test_what_has_no_law_makes_no_figure_that_fails(values):
    (section,) = law_sections(Trace.from_arrays({"w": values}))
    assert section.sentences
    assert all(table.rows for table in law_section(section).tables)
    assert all(plate.draw().axes for plate in law_section(section).figures)
