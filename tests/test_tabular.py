"""Traces, sweeps, plans and verdicts as data frames and as HTML in a notebook."""

import dataclasses
import html
import re
import sys
import types

import numpy as np
import pytest

import gtrace
from gtrace.errors import UsageError
from gtrace.planning import Plan
from gtrace.planning.plan import ExchangeRate, PlanTotals, TensorPlan
from gtrace.trace import Trace

NAME = '<img src=x onerror="1">\x1b[31m'


def trace():
    rng = np.random.default_rng(0)
    tensors = {NAME: 300, **{f"layer{k}": 20 for k in range(9)}}
    arrays = {name: {step: rng.standard_normal(n).astype(np.float32) for step in (0, 5)} for name, n in tensors.items()}
    arrays["layer0"][5][3] = np.nan
    return Trace.from_arrays(arrays, scalars={0: {"loss": 2.0, "lr": 0.1}, 5: {"loss": 1.0}})


@pytest.fixture(scope="module")
def values():
    swept = gtrace.sweep(trace(), "qsgdinf", bits=(3, 4))
    rows = (TensorPlan(NAME, "qsgdinf:bits=3", 300, 2.5, 0.03), TensorPlan("b", "none", 20, 32.0, 0.0))
    totals, exchange = PlanTotals(320, 4.3, 7.4, 0.03, 0.02, 0.01, optimal=False), ExchangeRate(None, None, 0.0)
    return {
        "trace": trace(),
        "sweep": swept,
        "plan": Plan("mine", "error", "--max-bits 5", "none", totals, None, exchange, None, (), (), rows),
        "verdict": dataclasses.replace(gtrace.report.answer(swept), costs=NAME, prediction={"horizon": 9.0}),
    }


#: value -> rows, and some numbers of the frame as (column, row, number)
FRAMES = {
    "trace": (20, [("step", 1, 5), ("loss", 0, 2.0), ("elements", 0, 300), ("nonfinite", 3, 1)]),
    "sweep": (20 * 2 * 2, [("bits", 0, 3), ("step", 0, 0)]),
    "plan": (2, [("bits", 0, 2.5), ("elements", 1, 20)]),
    "verdict": (1, [("horizon", 0, 9.0)]),
}


@pytest.mark.framework_case("pandas: data frames", packages=("pandas",))
@pytest.mark.parametrize("name", FRAMES)
def test_a_data_frame_of_either_library(values, name, monkeypatch):
    rows, numbers = FRAMES[name]
    value, columns = values[name], values[name].frame_columns()
    assert {len(column) for column in columns.values()} == {rows}
    pandas = pytest.importorskip("pandas")
    found = value.to_dataframe()
    assert isinstance(found, pandas.DataFrame)
    assert list(found) == list(columns)
    assert [found[column].iloc[row] for column, row, _ in numbers] == [number for *_, number in numbers]
    # Python objects would stay objects in polars, which comes first once it was imported.
    monkeypatch.setitem(sys.modules, "polars", types.SimpleNamespace(DataFrame=lambda columns: columns))
    monkeypatch.delitem(sys.modules, "pandas")
    made = value.to_dataframe()
    assert not [name for name, column in made.items() if str(getattr(column, "dtype", "")) == "object"]
    for missing in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match="needs pandas or polars"):
        value.to_dataframe()


@pytest.mark.framework_case("polars: data frames through Arrow", packages=("polars", "pyarrow"))
def test_polars_itself(values):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    for value in values.values():
        found = polars.DataFrame(value)
        assert polars.Object not in found.dtypes
        assert list(found.columns) == list(value.frame_columns())


@pytest.mark.parametrize("name", FRAMES)
def test_an_arrow_stream(values, name, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    rows, numbers = FRAMES[name]
    found = pyarrow.RecordBatchReader.from_stream(values[name]).read_all()
    assert found.num_rows == rows
    assert [found[column][row].as_py() for column, row, _ in numbers] == [number for *_, number in numbers]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"gradtrace\[parquet\]"):
        values[name].__arrow_c_stream__()


START = {"sweep": "gtrace report: sweep", "trace": "(in memory):", "verdict": "Recommendation", "plan": "Plan mine"}


@pytest.mark.parametrize(("name", "start"), START.items())
def test_a_notebook_shows_the_answer_first_and_nothing_acts(values, name, start):
    shown = values[name]._repr_html_()
    body = shown.partition("</style>")[2]
    assert not [word for word in ("<img", "\x1b", "http", "<script") if word in shown]
    assert body.count("<tr>") <= 4 + 1 + 8 + 8
    if name != "sweep":
        assert html.escape(NAME.replace("\x1b", "\\x1b"), quote=False).replace('"', "&#34;") in body
    assert " ".join(re.sub(r"<[^>]+>", " ", body).split()).startswith(start)
    if name == "trace":
        # It names its troubles and what it leaves out.
        assert "broken</th><td>NaN or infinity in the gradients of 1 of 10 tensors" in body
        assert body.count('scope="row"') == 8
        assert "2 more tensors, " in body
