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
    {used}
    tt.store %1, %3, %mask : tensor<{rows}x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>> loc(#loc2)
"""
WITH_ITS_ROW = "%4 = tt.expand_dims %2 {axis = 1 : i32} : tensor<4xf32> -> tensor<4x1xf32, #blocked>"
ALONE = "%3 = arith.addf %2, %2 : tensor<4xf32, #ttg.slice<{dim = 1, parent = #blocked}>> loc(#loc3)"


@pytest.mark.parametrize(
    ("layout", "rows", "between", "used", "found"),
    [
        (WIDE, 4, "", WITH_ITS_ROW, ["state"]),
        (WIDE, 4, "gpu.barrier loc(#loc3)", WITH_ITS_ROW, []),
        (WIDE, 4, "", ALONE, []),  # the warp that stores has read before
        (WIDE, 4, "", "scf.if %2 {", ["state"]),
        (TALL, 4, "", WITH_ITS_ROW, []),
        (TALL, 2, "", WITH_ITS_ROW, ["state"]),  # fewer rows than warps
    ],
)
def test_what_warps_share_is_changed_behind_a_barrier(layout, rows, between, used, found):
    assert unordered(KERNEL.format(layout=layout, rows=rows, between=between, used=used)) == found


LOOP = f"""
#blocked = #ttg.blocked{WIDE}
  tt.func public @kernel(%state: !tt.ptr<f32>, %rows: !tt.ptr<f32>) attributes {{}} {{
    %1 = tt.splat %state : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>>
    %total:2 = scf.for %i = %c0 to %n step %c1 iter_args(%at = %1, %sum = %cst) -> (tensor<4x!tt.ptr<f32>>)  : i32 {{
      tt.store %at, %cst : tensor<4x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>> loc(#loc2)
      ttg.barrier local loc(#loc2)
      scf.for %j = %c0 to %n step %c1  : i32 {{
        %2 = tt.load %at, %mask : tensor<4x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>> loc(#loc1)
        %3 = tt.expand_dims %2 {{axis = 1 : i32}} : tensor<4xf32> -> tensor<4x1xf32, #blocked>
      }} loc(#loc3)
      END
      %next = tt.addptr %at, %c4 : tensor<4x!tt.ptr<f32>>, tensor<4xi32> loc(#loc3)
      scf.yield %next, %sum : tensor<4x!tt.ptr<f32>> loc(#loc3)
    }} loc(#loc3)
    tt.store %rows, %c0 : !tt.ptr<f32> loc(#loc2)
"""


@pytest.mark.parametrize(("end", "found"), [("", ["state"]), ("ttg.barrier local loc(#loc2)", [])])
def test_what_a_turn_of_a_loop_reads_the_next_one_changes_behind_a_barrier(end, found):
    assert unordered(LOOP.replace("END", end)) == found


DEALT = f"""
#blocked = #ttg.blocked{TALL}
#blocked1 = #ttg.blocked{TALL.replace("4, 1]", "2, 1]")}
  tt.func public @kernel(%state: !tt.ptr<f32>) attributes {{}} {{
    %1 = tt.splat %state : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>>
    %2 = tt.load %1, %mask : tensor<4x!tt.ptr<f32>, #ttg.slice<{{dim = 1, parent = #blocked}}>> loc(#loc1)
    %3 = ttg.convert_layout %2 : tensor<4xf32, #ttg.slice<{{dim = 1, parent = #blocked}}>> -> tensor<4xf32, #blocked1>
    %4 = ttg.convert_layout %1 : tensor<4x!tt.ptr<f32>> -> tensor<4x!tt.ptr<f32>, #blocked1>
    tt.store %4, STORED, %mask : tensor<4x!tt.ptr<f32>, #blocked1> loc(#loc2)
"""


@pytest.mark.parametrize(("stored", "found"), [("%cst", ["state"]), ("%3", [])])
def test_warps_that_store_what_others_have_read_store_what_they_got_from_them(stored, found):
    assert unordered(DEALT.replace("STORED", stored)) == found


def test_numbers_are_read_by_all_warps():
    code = "tt.func public @kernel(%a: !tt.ptr<i32>) attributes {\n%1 = tt.load %a : !tt.ptr<i32> loc(#loc1)\n"
    assert not unordered(code)
    assert unordered(code + "tt.store %a, %1 : !tt.ptr<i32> loc(#loc2)") == ["a"]


def test_divisions_and_roots_that_are_not_rounded_correctly():
    assert approximate("div.full.f32 %f1, %f2, %f3;\nsqrt.approx.ftz.f32 %f1, %f2;\ndiv.rn.f32 %f1, %f2, %f3;") == [
        "div.full.f32",
        "sqrt.approx.ftz.f32",
    ]
