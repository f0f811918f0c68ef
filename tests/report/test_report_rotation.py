"""Rotate or not: the best codec with and without a rotation on each tensor, measured or by closed form."""

import json

import pytest
from helpers_report import result_of, row

from gtrace.codecs import codec, expected_on_any
from gtrace.report.analysis.sweep import analyze
from gtrace.report.inputs import make_report
from gtrace.report.sections import sections
from gtrace.report.sections.checks import rotation_rows, rotation_sentences, rotation_table

SIZE = 1 << 20
#: tensor -> error at 2.5, 3 and 3.5 bits without a rotation; eden loses 3.2% at 3 bits whatever the tensor
PLAIN = {"flat": (0.2, 0.1, 0.05), "peaked": (0.02, 0.01, 0.005), "even": (0.066, 0.0326, 0.0165)}
BITS = (2.5, 3.0, 3.5)


def swept(errors, bias=0.0):
    """A sweep of methods (name -> tensor -> errors at three numbers of bits)."""

    def one(tensor, step, method, b, bits, error):
        about = {"codec": f"{method}:bits={b}", "method": method, "params": json.dumps({"bits": b}), "n": SIZE}
        about |= {"squared_error": error, "relative_bias": bias if method == "biased" else 0.0, "bits_shared": 0.0}
        return row(tensor, step, **about, bits_huffman=bits, bits_payload=bits, bits_total=bits)

    return result_of(
        one(tensor, step, method, b, bits, error)
        for method, tensors in errors.items()
        for tensor, three in tensors.items()
        for step in range(4)
        for b, bits, error in zip((3, 4, 5), BITS, three, strict=True)
    )


def test_the_closed_form_stands_for_what_was_not_swept():
    found = analyze(swept({"qsgdinf": PLAIN}), targets=[3.0]).rotation
    assert (found.bits, found.measured) == (3.0, False)
    assert {one.tensor: one.verdict for one in found.layers} == {"flat": "rotate", "peaked": "leave", "even": "same"}
    near = [expected_on_any(codec("eden", bits=bits), SIZE) for bits in (3, 3.5)]
    assert all(near[1].squared_error < one.rotated_error < near[0].squared_error for one in found.known)
    first, second, last = rotation_sentences(found)
    assert "1 of 3 tensors, with 33% of the gradient's energy: at 3 bits" in first
    assert "flat (3.2% with eden, 10% with qsgdinf)" in first
    assert "instead of 4.8%" in second
    assert "closed form" in last
    table = rotation_table(found, {"flat", "even"})
    assert [line[-1].text for line in table.rows] == ["same", "rotate"]


def test_what_was_swept_comes_before_the_closed_form_and_bias_takes_no_part():
    half = {tensor: tuple(error / 2 for error in three) for tensor, three in PLAIN.items()}
    free = dict.fromkeys(PLAIN, (1e-6,) * 3)
    analysis = analyze(swept({"qsgdinf": PLAIN, "rotate:qsgdinf": half, "biased": free}, 1e-3), targets=[3.0])
    found = analysis.rotation
    assert found.measured
    assert [(one.plain, one.rotated) for one in found.known] == [("qsgdinf", "rotate:qsgdinf")] * 3
    assert [one.ratio for one in found.known] == pytest.approx([0.5] * 3)
    assert "on 3 of 3 tensors" in rotation_sentences(found)[0]
    assert "loses 2.0 times less there" in rotation_sentences(found)[0]
    assert [row["verdict"] for row in rotation_rows(found)] == ["rotate"] * 3


def test_no_tensor_gains():
    found = analyze(swept({"qsgdinf": {"peaked": PLAIN["peaked"]}}), targets=[3.0]).rotation
    assert rotation_sentences(found)[0] == "Rotation pays on none of 1 tensor at 3 bits: leave it out."
    assert analyze(result_of([])).rotation is None


def test_papers_find_the_error_under_their_name():
    result = swept({"qsgdinf": PLAIN})
    assert result["vnmse"] is result["relative_variance"]
    (section,) = sections(make_report([result]))
    numbers = section.numbers()
    assert [one["vnmse"] for one in numbers.rows["configurations"]] == pytest.approx(
        [one["relative_variance"] for one in numbers.json["sweeps"]["configurations"]]
    )
    assert "vNMSE" in [column.heading for block in section.blocks for column in getattr(block, "columns", ())]
