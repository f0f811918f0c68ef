import pytest
from helpers_laws import write_laws
from helpers_report import fit_details, fitted_rows, result_of, rows_of, write_runs, write_sweep
from matplotlib.figure import Figure

from gtrace.errors import UsageError
from gtrace.report import draw, figure_names, load_report, make_report
from gtrace.report.figures import FIGURES


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gallery")
    trace = write_laws(folder / "t.zarr", kinds=("weight",), steps=(0,))
    sweep = result_of(fitted_rows(), details=fit_details())
    return make_report([sweep], [write_runs(folder / "a.jsonl", steps=20)], [trace])


def test_every_figure_of_a_report_is_in_the_register(report):
    own = {name.removeprefix("weight-") if name != "weight-gradients" else name for name in figure_names(report)}
    assert own < set(figure_names())
    assert set(figure_names()) == set(FIGURES)
    # What this report lacks; other tests draw those.
    assert set(FIGURES) - own == {
        "equivalent-batch",
        "neural-gradients",
        "weight-gradients",
        "training-over-time",
        "wasserstein",
        "savings",
        "plan-frontier",
        "plan-bits",
        "plan-budgets",
    }


def test_a_figure_is_drawn_by_its_name(report):
    figure = draw(report, "rate-distortion")
    assert isinstance(figure, Figure)
    assert figure.axes[0].get_xlabel() == "measured bits per coordinate"
    # The kind of gradient may be left out where there is one.
    assert draw(report, "mu-and-sigma").axes[0].get_title() == draw(report, "weight-mu-and-sigma").axes[0].get_title()


def test_names_that_say_nothing_are_refused(report):
    with pytest.raises(UsageError, match="'rate-distorsion': no such figure; did you mean rate-distortion"):
        draw(report, "rate-distorsion")
    with pytest.raises(UsageError, match="'neural-gradients': these results have nothing for it; they have rate-"):
        draw(report, "neural-gradients")
    with pytest.raises(UsageError, match="these results have nothing to draw"):
        draw(make_report([result_of([])]), "layers")


def test_of_several_inputs_the_name_says_which(tmp_path):
    rows = list(rows_of(bits=[3], layers=("w",), steps=(0,), methods=("qsgd",)))
    report = load_report([write_sweep(tmp_path / f"{name}.sweep.db", rows) for name in ("a b", "c")])
    assert {"a_b-layers", "c-layers"} <= set(figure_names(report))
    assert isinstance(draw(report, "c-layers"), Figure)
    with pytest.raises(UsageError, match="choose a_b-layers, c-layers"):
        draw(report, "layers")
