"""Small matrix products in vector registers, as Numba intrinsics.

Both products are written tile by tile. A tile of the result stays in registers over the whole sum, which costs one
multiplication and addition a vector, and a load for several of them. Shapes and strides are constants where the kernel
is compiled, so that loops over tiles have no remainders to handle at run time; strides are in bytes.

Sums keep their order, which depends on the shapes alone: the same numbers come out of every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rowmesh.ops.simd import FLOAT64, STORAGE_BYTES

VECTOR_BYTES = 64
# Vectors of a tile: half of AVX-512's registers; elsewhere 64 bytes take two or four registers.
TILE_VECTORS = 16 if llvm.get_host_cpu_features().get("avx512f") else 6
MOST_COLUMNS = 4  # vectors of a tile's row, where it has rows enough

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_intrinsic: Any = intrinsic  # its result takes one argument less than type checkers think


def lanes(storage: int) -> int:
    """Elements of a vector.

    >>> from rowmesh.ops.simd import FLOAT32
    >>> lanes(FLOAT32)
    16
    """
    return VECTOR_BYTES // STORAGE_BYTES[storage]


def tile_of(num_rows: int, num_columns: int, storage: int) -> tuple[int, int]:
    """Rows and columns of the tiles that a product of this shape is computed in.

    >>> from rowmesh.ops.simd import FLOAT32
    >>> rows, columns = tile_of(4, 256, FLOAT32)
    >>> rows * columns <= TILE_VECTORS * lanes(FLOAT32)
    True
    """
    vectors = -(-num_columns // lanes(storage))
    wide = min(vectors, max(MOST_COLUMNS, TILE_VECTORS // max(num_rows, 1)), TILE_VECTORS)
    return max(1, min(num_rows, TILE_VECTORS // max(wide, 1))), wide * lanes(storage)


class _Emitter:
    """The means with which both products are written: a builder, an element type and 64-bit addresses."""

    def __init__(self, builder: Any, storage: int) -> None:
        self.b = builder
        self.element = ir.DoubleType() if storage == FLOAT64 else ir.FloatType()
        self.bytes = STORAGE_BYTES[storage]
        self.lanes = lanes(storage)

    def at(self, address: Any, index: Any, stride: int) -> Any:
        """Address + index · stride."""
        return self.b.add(address, self.b.mul(index, ir.Constant(_I64, stride)))

    def load(self, address: Any, width: int) -> Any:
        value = self.b.load(self.b.inttoptr(address, ir.VectorType(self.element, width).as_pointer()))
        value.align = self.bytes
        return value

    def store(self, value: Any, address: Any) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = self.bytes

    def load_splats(self, address: Any, widths: list[int]) -> dict[int, Any]:
        """The element at an address, once in every lane; for each of the widths."""
        pointer = self.b.inttoptr(address, self.element.as_pointer())
        scalar = self.b.load(pointer)
        scalar.align = self.bytes
        return {width: self._splat(scalar, width) for width in set(widths)}

    def _splat(self, scalar: Any, width: int) -> Any:
        undefined = ir.Constant(ir.VectorType(self.element, width), ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self.shuffle(first, undefined, [0] * width)

    def shuffle(self, x: Any, y: Any, order: list[int]) -> Any:
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(order)), order))

    def zero(self, width: int) -> Any:
        return ir.Constant(ir.VectorType(self.element, width), None)

    def add_product(self, total: Any, x: Any, y: Any) -> Any:
        product = self.b.fmul(x, y, flags=("contract",))
        return self.b.fadd(total, product, flags=("contract",))

    def blocks(self, total: int, size: int, emit: Callable[[Any, int], None]) -> None:
        """`emit(first, size)` for every block of a range; the last one may be smaller."""
        full, rest = divmod(total, size)
        if full == 1:
            emit(ir.Constant(_I64, 0), size)
        elif full:
            with cgutils.for_range(self.b, ir.Constant(_I64, full), intp=_I64) as loop:
                emit(self.b.mul(loop.index, ir.Constant(_I64, size)), size)
        if rest:
            emit(ir.Constant(_I64, full * size), rest)

    def sum_over(self, count: Any, totals: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """A loop of `count` ≥ 1 turns that carries its totals in registers."""
        b, before = self.b, self.b.block
        body, after = b.append_basic_block("sum"), b.append_basic_block("summed")
        b.branch(body)
        b.position_at_end(body)
        index = b.phi(_I64)
        index.add_incoming(ir.Constant(_I64, 0), before)
        carried = [b.phi(total.type) for total in totals]
        for phi, total in zip(carried, totals, strict=True):
            phi.add_incoming(total, before)
        results = step(index, carried)
        following = b.add(index, ir.Constant(_I64, 1))
        index.add_incoming(following, b.block)
        for phi, result in zip(carried, results, strict=True):
            phi.add_incoming(result, b.block)
        b.cbranch(b.icmp_signed("<", following, count), body, after)
        b.position_at_end(after)
        return results


def _literals(values: tuple[Any, ...]) -> list[int] | None:
    numbers = [value.literal_value if isinstance(value, types.IntegerLiteral) else None for value in values]
    return None if None in numbers else numbers  # pyright: ignore[reportReturnType]


@_intrinsic
def multiply(
    typing: Any,
    out: Any,
    a: Any,
    b: Any,
    count: Any,
    rows: Any,
    columns: Any,
    out_row: Any,
    a_row: Any,
    a_step: Any,
    b_step: Any,
    fresh: Any,
    storage: Any,
) -> Any:
    """`out[m, :columns] += Σ_k a[m, k] · b[k, :columns]` for k < count and m < rows; `=` where `fresh`.

    a[m, k] is at a + m·a_row + k·a_step, so a may be transposed. `count` is 1 or more and need not be constant.
    """
    constants = (rows, columns, out_row, a_row, a_step, b_step, fresh, storage)
    numbers = _literals(constants)
    if numbers is None:
        return None

    def codegen(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        _emit_multiply(builder, *args[:4], *numbers)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, *constants), codegen


def _emit_multiply(
    builder: Any,
    out: Any,
    a: Any,
    b: Any,
    count: Any,
    rows: int,
    columns: int,
    out_row: int,
    a_row: int,
    a_step: int,
    b_step: int,
    fresh: int,
    storage: int,
) -> None:
    e = _Emitter(builder, storage)
    if rows == 0 or columns == 0:
        return
    tile_rows, tile_columns = tile_of(rows, columns, storage)

    def column_block(column: Any, width: int) -> None:
        part = [e.lanes] * (width // e.lanes) + ([width % e.lanes] if width % e.lanes else [])
        e.blocks(rows, tile_rows, lambda row, height: tile(row, height, column, part))

    def tile(row: Any, height: int, column: Any, widths: list[int]) -> None:
        left, right = e.at(a, row, a_row), e.at(b, column, e.bytes)
        corner = e.at(e.at(out, row, out_row), column, e.bytes)
        starts = [sum(widths[:v]) * e.bytes for v in range(len(widths))]
        cells = [(m, v) for m in range(height) for v in range(len(widths))]
        targets = [builder.add(corner, ir.Constant(_I64, m * out_row + starts[v])) for m, v in cells]
        if fresh:
            totals = [e.zero(widths[v]) for _, v in cells]
        else:
            totals = [e.load(target, widths[v]) for target, (_, v) in zip(targets, cells, strict=True)]

        def step(k: Any, carried: list[Any]) -> list[Any]:
            line, scalars = e.at(right, k, b_step), e.at(left, k, a_step)
            vectors = [
                e.load(builder.add(line, ir.Constant(_I64, start)), width)
                for start, width in zip(starts, widths, strict=True)
            ]
            factors = [e.load_splats(e.at(scalars, ir.Constant(_I64, m), a_row), widths) for m in range(height)]
            return [
                e.add_product(total, factors[m][widths[v]], vectors[v])
                for total, (m, v) in zip(carried, cells, strict=True)
            ]

        for target, total in zip(targets, e.sum_over(count, totals, step), strict=True):
            e.store(total, target)

    e.blocks(columns, tile_columns, column_block)


@_intrinsic
def multiply_transposed(
    typing: Any,
    out: Any,
    x: Any,
    z: Any,
    rows: Any,
    columns: Any,
    length: Any,
    out_row: Any,
    x_row: Any,
    z_row: Any,
    fresh: Any,
    storage: Any,
) -> Any:
    """`out[m, n] += Σ_k x[m, k] · z[n, k]` for m < rows, n < columns, k < length; `=` where `fresh`.

    Each is a product of two rows. The sums over the lanes are made for a whole vector of results at once, in a tree.
    """
    constants = (rows, columns, length, out_row, x_row, z_row, fresh, storage)
    numbers = _literals(constants)
    if numbers is None:
        return None

    def codegen(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        _emit_multiply_transposed(builder, *args[:3], *numbers)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, *constants), codegen


def _emit_multiply_transposed(
    builder: Any,
    out: Any,
    x: Any,
    z: Any,
    rows: int,
    columns: int,
    length: int,
    out_row: int,
    x_row: int,
    z_row: int,
    fresh: int,
    storage: int,
) -> None:
    e = _Emitter(builder, storage)
    if rows == 0 or columns == 0:
        return
    block_columns = min(columns, e.lanes)
    block_rows = min(rows, e.lanes // block_columns)

    def block(row: Any, height: int, column: Any, width: int) -> None:
        left, right = e.at(x, row, x_row), e.at(z, column, z_row)
        sums = _row_products(e, left, right, height, width, length, x_row, z_row)
        for m in range(height):
            part = e.shuffle(sums, sums, list(range(m * width, (m + 1) * width)))
            target = e.at(builder.add(e.at(out, row, out_row), ir.Constant(_I64, m * out_row)), column, e.bytes)
            e.store(part if fresh else builder.fadd(e.load(target, width), part), target)

    def column_block(column: Any, width: int) -> None:
        e.blocks(rows, block_rows, lambda row, height: block(row, height, column, width))

    e.blocks(columns, block_columns, column_block)


def _row_products(e: _Emitter, x: Any, z: Any, height: int, width: int, length: int, x_row: int, z_row: int) -> Any:
    """A vector of the products of every row of x with every row of z; at most as many as a vector has lanes."""
    cells = [(m, n) for m in range(height) for n in range(width)]
    full, rest = divmod(length, e.lanes)

    def products(offset: Any, lanes_: int, totals: list[Any]) -> list[Any]:
        def load(base: Any, row: int) -> Any:
            return e.load(e.b.add(base, e.b.add(offset, ir.Constant(_I64, row))), lanes_)

        left, right = [load(x, m * x_row) for m in range(height)], [load(z, n * z_row) for n in range(width)]
        return [e.add_product(total, left[m], right[n]) for total, (m, n) in zip(totals, cells, strict=True)]

    totals = [e.zero(e.lanes) for _ in cells]
    if full:
        count = ir.Constant(_I64, full)
        step = e.b.mul
        totals = e.sum_over(
            count, totals, lambda k, t: products(step(k, ir.Constant(_I64, e.lanes * e.bytes)), e.lanes, t)
        )
    if rest:
        offset = ir.Constant(_I64, full * e.lanes * e.bytes)
        tails = products(offset, rest, [e.zero(rest) for _ in cells])
        padded = [e.shuffle(tail, e.zero(rest), [*range(rest), *[rest] * (e.lanes - rest)]) for tail in tails]
        totals = [e.b.fadd(total, tail) for total, tail in zip(totals, padded, strict=True)]
    return _sum_lanes(e, totals)


def _sum_lanes(e: _Emitter, vectors: list[Any]) -> Any:
    """A vector of the sums of each vector's lanes: neighbours are added, of two vectors at a time, level by level."""
    count = len(vectors)
    vectors = vectors + [e.zero(e.lanes)] * (e.lanes - count)
    evens, odds = list(range(0, 2 * e.lanes, 2)), list(range(1, 2 * e.lanes, 2))
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [e.b.fadd(e.shuffle(u, v, evens), e.shuffle(u, v, odds)) for u, v in pairs]
    return e.shuffle(vectors[0], vectors[0], list(range(count)))
