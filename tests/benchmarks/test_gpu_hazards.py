"""Faults are seen in the code of kernels."""

import pytest

from benchmarks.gpu_hazards import approximate, unordered

# Four warps side by side in columns, so that each of them holds what there is one of a row; and below each other.
WIDE = "<{sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [1, 4], order = [1, 0]}>"
TALL = "<{sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [4, 1], order = [1, 0]}>"
KERNEL = """
#blocked = #ttg.blocked{layout}
  tt.func public @kernel(%state: !tt.ptr<f32> {{tt.divisibility = 16 : i32}}, %rows: !tt.ptr<f32>) attributes {{}} {{
    %1 = tt.splat %state : !tt.ptr<f32> -> tensor<{rows}x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>>
    %2 = tt.load %1, %mask : tensor<{rows}x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>> loc(#loc1)
    {between}
    tt.store %1, %3, %mask : tensor<{rows}x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>> loc(#loc2)
"""


@pytest.mark.parametrize(
    ("layout", "rows", "between", "found"),
    [
        (WIDE, 4, "", ["state"]),
        (WIDE, 4, "gpu.barrier loc(#loc3)", []),
        (TALL, 4, "", []),
        (TALL, 2, "", ["state"]),  # fewer rows than warps
    ],
)
def test_what_warps_share_is_changed_behind_a_barrier(layout, rows, between, found):
    assert unordered(KERNEL.format(layout=layout, rows=rows, between=between)) == found


def test_numbers_are_read_by_all_warps():
    code = "tt.func public @kernel(%a: !tt.ptr<i32>) attributes {\n%1 = tt.load %a : !tt.ptr<i32> loc(#loc1)\n"
    assert not unordered(code)
    assert unordered(code + "tt.store %a, %1 : !tt.ptr<i32> loc(#loc2)") == ["a"]


def test_divisions_and_roots_that_are_not_rounded_correctly():
    assert approximate("div.full.f32 %f1, %f2, %f3;\nsqrt.approx.ftz.f32 %f1, %f2;\ndiv.rn.f32 %f1, %f2, %f3;") == [
        "div.full.f32", "sqrt.approx.ftz.f32",
    ]  # fmt: skip
