"""Triton's kernels compile for GPUs, without one here, to float32 operations that are rounded as IEEE requires.

Their results are tested in test_device.py: on a GPU, or in Triton's interpreter, which takes more than its compiler.
"""

import importlib
import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

kernels = importlib.import_module("gtrace.training.triton_kernels")
FLOATS = ("factor", "half", "first")
POINTERS = {"x": "*fp32", "scales": "*fp32", "levels": "*fp32", "values": "*fp32", "coded": "*u8", "largest": "*i32"}
ROUNDED = {"ONE": True, "RANDOM_SIGN": False, "STEPS": 0, "COUNTED": False, "BLOCK": 1024}
#: kernel, type of its output, and what is compiled in
VARIANTS = {
    "largest": ("_norms", "*i32", {"NORM": 0, "ROWS": 2, "COLUMNS": 2048}),
    "l1": ("_norms", "*fp64", {"NORM": 1, "ROWS": 64, "COLUMNS": 64}),
    "l2": ("_norms", "*fp64", {"NORM": 2, "ROWS": 2, "COLUMNS": 2048}),
    "uniform": ("_quantize", "*u8", {**ROUNDED, "KIND": 0, "WIDTH": 3, "BYTES": 4}),
    "mirrored": ("_quantize", "*u8", {**ROUNDED, "KIND": 0, "RANDOM_SIGN": True, "ONE": False, "WIDTH": 8, "BYTES": 8}),
    "counted": ("_quantize", "*u8", {**ROUNDED, "KIND": 1, "COUNTED": True, "WIDTH": 3, "BYTES": 4}),
    "few": ("_quantize", "*u8", {**ROUNDED, "KIND": 1, "STEPS": 4, "COUNTED": True, "WIDTH": 5, "BYTES": 8}),
    "many": ("_quantize", "*i16", {**ROUNDED, "KIND": 1, "STEPS": 7, "WIDTH": 0, "BYTES": 1}),
    "powers": ("_quantize", "*u8", {**ROUNDED, "KIND": 2, "WIDTH": 9, "BYTES": 16}),
    "unpacked": ("_restore", "*fp32", {"WIDTH": 3, "CHECKED": True, "ONE": True, "BLOCK": 1024}),
    "looked up": ("_restore", "*fp32", {"WIDTH": 0, "CHECKED": False, "ONE": False, "BLOCK": 1024}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_no_operation_is_fused_flushed_or_approximate(name):
    function, out, fixed = VARIANTS[name]
    kernel = getattr(kernels, function)
    types = {**dict.fromkeys(kernel.arg_names, "i32"), **dict.fromkeys(FLOATS, "fp32"), **POINTERS, "out": out}
    types = {one: "constexpr" if one in fixed else types[one] for one in kernel.arg_names}
    source = ASTSource(
        kernel, types, constexprs={(kernel.arg_names.index(one),): value for one, value in fixed.items()}
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kernels.IEEE).asm["ptx"]
    for inexact in ("fma.rn.f32", "mad.f32", ".ftz", ".approx", "div.full"):
        assert inexact not in code
    assert ("div.rn.f32" in code) == (function == "_quantize" and fixed["KIND"] != 2)
