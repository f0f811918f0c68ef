"""The codec table: names before patterns before the default, and rows under the table's name."""

import pytest

import gtrace
from gtrace.codecs import codec
from gtrace.codecs.assignment import CodecTable, coding_of
from gtrace.errors import UsageError

TABLE = CodecTable(
    codec("qsgdinf:bits=3"),
    (("*.bias", codec("none")), ("fc*", codec("alq:bits=2"))),
    tensors={"fc2.weight": codec("ef:topk:ratio=0.1"), "conv.bias": codec("nuqsgd:bits=4")},
    name="mine",
)


def test_names_come_before_patterns_and_these_before_the_default():
    found = [str(TABLE.choose(name, 100)) for name in ("fc2.weight", "conv.bias", "fc1.bias", "fc1.weight", "x")]
    assert found == ["ef:topk:ratio=0.1", "nuqsgd:bits=4", "none", "alq:bits=2", "qsgdinf:bits=3"]
    small = CodecTable.of("qsgdinf:bits=3", {"b": "alq:bits=2"}, 50)
    assert [str(small.choose(*one)) for one in (("a", 49), ("b", 2))] == ["none", "alq:bits=2"]


def test_plain_values_make_the_same_table():
    again = CodecTable.from_plain(TABLE.describe())
    assert (again, again.digest) == (TABLE, TABLE.digest)
    other = CodecTable(TABLE.codec, TABLE.rules, tensors={"fc2.weight": codec("none")}, name="mine")
    assert other.digest != TABLE.digest
    assert str(TABLE) == "plan:mine"


def test_a_table_is_taken_as_it_is_and_has_no_further_rules():
    assert CodecTable.of(TABLE) is TABLE
    assert coding_of(TABLE) is TABLE
    with pytest.raises(UsageError, match="names the codec of every tensor"):
        CodecTable.of(TABLE, {"bias": "none"})
    # What a model lacks is said.
    assert TABLE.unmatched(["fc2.weight", "conv.bias", "fc1.weight", "fc1.bias"]) == []
    assert "1 of its 2 tensors are not in this model, conv.bias among them" in TABLE.unmatched(["fc2.weight"])[-1]
    typo = CodecTable.of("qsgdinf", {"wieght": "none", "bias": "none", "*.bias": "none"})
    assert typo.unmatched(["weight", "fc.bias"]) == ["rule wieght=none: fits no tensor; did you mean weight?"]


def test_a_table_assigns_the_codecs_themselves():
    assigned = TABLE.assign({"fc2.weight": 100, "fc1.bias": 3, "x": 7})
    assert assigned == {"fc2.weight": TABLE.tensors["fc2.weight"], "fc1.bias": codec("none"), "x": TABLE.codec}
    whole = CodecTable.of("fp:bits=8,scope=model")
    assert whole.assign({"a": 1, "b": 2}) == {"*": codec("fp:bits=8,scope=model")}


def test_a_sweep_keeps_plans_of_one_name_apart(tmp_path):
    trace = gtrace.Trace.from_arrays({"a": [1.0, -2.0, 0.5], "b": [0.25, 3.0]})
    mine, other = (CodecTable(codec("none"), tensors={"a": codec(f"qsgdinf:bits={bits}")}, name="p") for bits in (3, 4))
    out = tmp_path / "s.sweep.db"
    assert set(gtrace.run_sweep(trace, [mine, "qsgdinf:bits=3"], output=out)["method"]) == {"plan", "qsgdinf"}
    with pytest.raises(gtrace.errors.OutputExistsError, match="rows of another plan:p"):
        gtrace.run_sweep(trace, [other], output=out)
