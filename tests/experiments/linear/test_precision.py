import pytest

from gtrace.codecs import codec, split_specs
from gtrace.errors import UsageError
from gtrace_experiments.linear import FULL, TASKS, Precision, Prox
from gtrace_experiments.linear.precision import precisions


@pytest.mark.parametrize(
    "spec",
    [
        "none",
        "naive:bits=5",
        "double:bits=3,levels=optimal",
        "full:bits=4,quantize=model",
        "symmetrized:bits=6,quantize=samples+model+gradients",
        "double:bits=4,chebyshev=15,radius=24,gap=0.5",
        "naive:bits=8,refetch=jl,failure=0.00123456789,rows=128",
        "mcgq:amount=0.1",
        "double:bits=5,quantize=samples+model,codec=ef:topk:ratio=0.1",
    ],
)
def test_specs_are_read_as_they_are_written(spec):
    assert str(Precision.parse(spec)) == spec
    assert split_specs(f"qsgd:bits=3,{spec},terngrad") == ["qsgd:bits=3", spec, "terngrad"]


def test_what_a_spec_names_goes_before_what_is_usual():
    assert str(Precision.parse("naive:bits=3", bits=8, levels="optimal")) == "naive:bits=3,levels=optimal"
    assert Precision.parse("qsgd:bits=3", bits=8).codec == codec("qsgd:bits=3")
    assert Precision.parse("full", quantize=("gradients",)).draws == 0


def test_draws_and_bits():
    assert [(one.draws, one.sample_bits) for one in map(Precision.parse, ("none", "naive", "double:chebyshev=15"))] == [
        (0, 32),
        (1, 5),
        (16, 9),
    ]
    assert Precision("double", bits=4, chebyshev=15).sample_bits == 8


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("doubel:bits=3", "no precision or codec 'doubel'; did you mean double"),
        ("double:bits=1", "bits: 1 is out of range"),
        ("double:bits=x", "bits=x is not a number"),
        ("double:bit=3", "did you mean bits"),
        ("double:quantize=sample", "did you mean samples"),
        ("double:quantize=model", "sampling double does not go with model"),
        ("naive:chebyshev=3", "independent quantizations"),
        ("symmetrized:refetch=l1", "decides by one quantization"),
        ("naive:refetch=jl,failure=0.7", "must be a probability below 0.5"),
        ("double:chebyshev=99", "chebyshev: 99 is out of range"),
        ("double:chebyshev=9,radius=0.1", "leaves nothing"),
        ("double:levels=best", "levels: 'best' is unknown"),
    ],
)
def test_what_cannot_be_is_said(spec, said):
    with pytest.raises(UsageError, match=said):
        Precision.parse(spec)


def test_tasks_take_what_they_have_a_use_for():
    with pytest.raises(UsageError, match="derivative of linear is a line"):
        Precision("double", chebyshev=3).check(TASKS["linear"])
    with pytest.raises(UsageError, match="logistic has no hinge"):
        Precision("naive", refetch="l1").check(TASKS["logistic"])


def test_the_full_precision_is_always_there_and_once():
    assert precisions(["naive", "none"]) == [FULL, Precision("naive")]
    with pytest.raises(UsageError, match="'naive:bits=5' is named twice"):
        precisions(["naive", "naive:bits=5"])


def test_terms():
    assert str(Prox.parse("l1=0.25")) == "l1=0.25"
    assert Prox.parse("none") == Prox()
    for text in ("l3=1", "l1=x", "l1=-1", "ball"):
        with pytest.raises(UsageError, match="prox"):
            Prox.parse(text)
