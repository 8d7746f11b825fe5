"""Rows as vectors: the Numba intrinsics that the CPU kernels are written in.

A row of D elements is loaded into one LLVM vector `<D x float>` and stays in registers; LLVM splits it into whatever
the processor has (AVX-512, AVX2, NEON). Addresses are 64-bit integers, so a table may be of any size.

    acc = add(acc, load_row(rows + slot * row_bytes, DIM, STORAGE))

`DIM` and `STORAGE` must be constants where the kernel is compiled (closure variables of its factory). The intrinsics
are at module level and take them as literals: built inside a factory they would miss Numba's disk cache every time.

Nothing here checks bounds. Kernels are called through wrappers that do.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import signature
from numba.extending import intrinsic, models, register_model

from rowmesh.ops.compiled import compiled

# How elements are stored; arithmetic is in float32, for FLOAT64 in float64.
FLOAT32, FLOAT64, BFLOAT16 = 0, 1, 2
STORAGE = {torch.float32: FLOAT32, torch.float64: FLOAT64, torch.bfloat16: BFLOAT16}
COMPUTE_DTYPE = {FLOAT32: torch.float32, FLOAT64: torch.float64, BFLOAT16: torch.float32}
STORAGE_BYTES = {FLOAT32: 4, FLOAT64: 8, BFLOAT16: 2}
COMPUTE_BYTES = {FLOAT32: 4, FLOAT64: 8, BFLOAT16: 4}

# Options of every kernel. Never parallel=True: its default threading layer aborts the process when two Python
# threads enter it. fastmath stays off: sums keep their order.
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
uncached_kernel = compiled(cache=False, **_OPTIONS)  # for code that contains an address of this process
inlined = compiled(inline="always", **_OPTIONS)  # into the kernels that call it: constants stay constants


def kernel(function: Any) -> Any:
    """Compiles a kernel at its first call, and keeps it on disk under a name that no other kernel has.

    The constants and the sources of all kernels are part of the name: else specialisations would share one, and of what
    a kernel is compiled from only its own file would be looked at, not those of the functions inlined into it.
    """
    constants = [cell.cell_contents for cell in function.__closure__ or ()]
    digest = hashlib.blake2b(f"{_sources()} {constants}".encode(), digest_size=8).hexdigest()
    function.__qualname__ += f"_{digest}"
    return compiled(function, **_OPTIONS)


@functools.cache
def _sources() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_intrinsic: Any = intrinsic  # its result takes one argument less than type checkers think

_F32, _F64 = ir.FloatType(), ir.DoubleType()
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_ALIGNMENT = {_I8: 1, _I16: 2, _I32: 4, _F32: 4, _I64: 8, _F64: 8}
_ELEMENT = {FLOAT32: _F32, FLOAT64: _F64, BFLOAT16: _F32}
_CACHE_LINE = 64


class RowType(types.Type):
    """Numba's view of `<dim x float>` or `<dim x double>`."""

    def __init__(self, dim: int, storage: int) -> None:
        self.dim = dim
        self.double = storage == FLOAT64
        super().__init__(f"row{'f64' if self.double else 'f32'}x{dim}")

    @property
    def element(self) -> ir.Type:
        """The LLVM type of one element."""
        return _F64 if self.double else _F32

    @property
    def scalar(self) -> Any:
        """The Numba type of one element."""
        return types.float64 if self.double else types.float32

    @property
    def suffix(self) -> str:
        """How LLVM names this vector in the names of its intrinsic functions."""
        return f"v{self.dim}{'f64' if self.double else 'f32'}"


@register_model(RowType)
class _RowModel(models.PrimitiveModel):
    def __init__(self, manager: Any, row: RowType) -> None:
        super().__init__(manager, row, ir.VectorType(row.element, row.dim))


def _literal(value: Any) -> int | None:
    return value.literal_value if isinstance(value, types.IntegerLiteral) else None


def _splat(builder: Any, row: RowType, scalar: Any) -> Any:
    vector = ir.VectorType(row.element, row.dim)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, row.dim), [0] * row.dim))


@_intrinsic
def zero_row(typing: Any, dim: Any, storage: Any) -> Any:
    """A row of zeros."""
    d, s = _literal(dim), _literal(storage)
    if d is None or s is None:
        return None
    row = RowType(d, s)
    return row(dim, storage), lambda ctx, b, sig, args: ir.Constant(ir.VectorType(row.element, d), None)


@_intrinsic
def splat(typing: Any, scalar: Any, dim: Any, storage: Any) -> Any:
    """A row whose elements all equal `scalar`."""
    d, s = _literal(dim), _literal(storage)
    if d is None or s is None:
        return None
    row = RowType(d, s)
    return row(row.scalar, dim, storage), lambda ctx, b, sig, args: _splat(b, row, args[0])


@_intrinsic
def load_row(typing: Any, address: Any, dim: Any, storage: Any) -> Any:
    """The row at `address`; bfloat16 is widened to float32."""
    d, s = _literal(dim), _literal(storage)
    if d is None or s is None:
        return None
    row = RowType(d, s)

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        if s != BFLOAT16:
            value = b.load(b.inttoptr(args[0], ir.VectorType(row.element, d).as_pointer()))
            value.align = STORAGE_BYTES[s]
            return value
        value = b.load(b.inttoptr(args[0], ir.VectorType(_I16, d).as_pointer()))
        value.align = 2
        wide = ir.VectorType(_I32, d)
        bits = b.shl(b.zext(value, wide), ir.Constant(wide, [16] * d))
        return b.bitcast(bits, ir.VectorType(_F32, d))

    return row(types.int64, dim, storage), codegen


@_intrinsic
def store_row(typing: Any, address: Any, value: Any, storage: Any) -> Any:
    """Writes a row; float32 is rounded to the nearest bfloat16, ties to even, NaN kept."""
    s = _literal(storage)
    if s is None or not isinstance(value, RowType):
        return None

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        bits = args[1]
        if s == BFLOAT16:
            bits = _round_to_bfloat16(b, bits, value.dim)
        store = b.store(bits, b.inttoptr(args[0], bits.type.as_pointer()))
        store.align = STORAGE_BYTES[s]
        return ctx.get_dummy_value()

    return types.void(types.int64, value, storage), codegen


def _round_to_bfloat16(b: Any, value: Any, dim: int) -> Any:
    wide, narrow = ir.VectorType(_I32, dim), ir.VectorType(_I16, dim)
    bits = b.bitcast(value, wide)
    odd = b.and_(b.lshr(bits, ir.Constant(wide, [16] * dim)), ir.Constant(wide, [1] * dim))
    rounded = b.add(bits, b.add(odd, ir.Constant(wide, [0x7FFF] * dim)))
    is_nan = b.fcmp_unordered("uno", value, value)
    quiet = b.or_(bits, ir.Constant(wide, [0x400000] * dim))  # rounding could carry a NaN into infinity
    kept = b.select(is_nan, quiet, rounded)
    return b.trunc(b.lshr(kept, ir.Constant(wide, [16] * dim)), narrow)


def _binary(name: str) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return getattr(b, name)(args[0], args[1])

    return codegen


@_intrinsic
def add(typing: Any, x: Any, y: Any) -> Any:
    """X + y, element by element."""
    return x(x, y), _binary("fadd")


@_intrinsic
def mul(typing: Any, x: Any, y: Any) -> Any:
    """X · y, element by element."""
    return x(x, y), _binary("fmul")


@_intrinsic
def div(typing: Any, x: Any, y: Any) -> Any:
    """X / y, element by element."""
    return x(x, y), _binary("fdiv")


@_intrinsic
def axpy(typing: Any, a: Any, x: Any, y: Any) -> Any:
    """A · x + y for a scalar a, rounded once in every kernel: so sums are the same wherever they are made."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        vector = ir.VectorType(x.element, x.dim)
        function = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.{x.suffix}"
        )
        return b.call(function, [_splat(b, x, args[0]), args[1], args[2]])

    return x(x.scalar, x, x), codegen


@_intrinsic
def scale(typing: Any, a: Any, x: Any) -> Any:
    """A · x for a scalar a."""
    return x(x.scalar, x), lambda ctx, b, sig, args: b.fmul(_splat(b, x, args[0]), args[1])


@_intrinsic
def sqrt_row(typing: Any, x: Any) -> Any:
    """√x, element by element."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        vector = ir.VectorType(x.element, x.dim)
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(vector, [vector]), f"llvm.sqrt.{x.suffix}")
        return b.call(function, [args[0]])

    return x(x), codegen


@_intrinsic
def dot(typing: Any, x: Any, y: Any) -> Any:
    """Σ x · y, summed as a tree."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        vector = ir.VectorType(x.element, x.dim)
        function = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(x.element, [x.element, vector]), f"llvm.vector.reduce.fadd.{x.suffix}"
        )
        products = b.fmul(args[0], args[1])
        # "reassoc" lets LLVM halve the vector again and again instead of adding element by element.
        return b.call(function, [ir.Constant(x.element, 0.0), products], fastmath=("reassoc",))

    return x.scalar(x, x), codegen


_SECOND_CACHE, _FIRST_CACHE = 2, 3


def _prefetch(write: int, level: int = _FIRST_CACHE) -> Any:
    def typer(typing: Any, address: Any, num_bytes: Any) -> Any:
        n = _literal(num_bytes)
        if n is None:
            return None

        def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            pointer = ir.IntType(8).as_pointer()
            function = cgutils.get_or_insert_function(
                b.module, ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32]), "llvm.prefetch.p0"
            )
            for offset in range(0, n, _CACHE_LINE):
                line = b.inttoptr(b.add(args[0], ir.Constant(_I64, offset)), pointer)
                b.call(function, [line, *(ir.Constant(_I32, v) for v in (write, level, 1))])
            return ctx.get_dummy_value()

        return types.void(types.int64, num_bytes), codegen

    return typer


@_intrinsic
def prefetch(typing: Any, address: Any, num_bytes: Any) -> Any:
    """Asks for the cache lines of `num_bytes` (a constant) from `address` on, for reading."""
    return _prefetch(0)(typing, address, num_bytes)


@_intrinsic
def prefetch_far(typing: Any, address: Any, num_bytes: Any) -> Any:
    """As `prefetch`, into the second-level cache: more lines can be under way at a time, and none leaves the first."""
    return _prefetch(0, _SECOND_CACHE)(typing, address, num_bytes)


@_intrinsic
def prefetch_to_write(typing: Any, address: Any, num_bytes: Any) -> Any:
    """As `prefetch`, for lines that will be written: of this core alone."""
    return _prefetch(1)(typing, address, num_bytes)


def _load(llvm: Any, numba: Any, widen: str | None = None) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        value = b.load(b.inttoptr(args[0], llvm.as_pointer()))
        value.align = _ALIGNMENT[llvm]
        return getattr(b, widen)(value, _I64) if widen else value

    return numba(types.int64), codegen


def _store(llvm: Any, numba: Any, narrow: bool = False) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        value = b.trunc(args[1], llvm) if narrow else args[1]
        b.store(value, b.inttoptr(args[0], llvm.as_pointer())).align = _ALIGNMENT[llvm]
        return ctx.get_dummy_value()

    return types.void(types.int64, numba), codegen


@_intrinsic
def copy_bytes(typing: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    """Copies `num_bytes` (a constant) of any alignment, bit by bit."""
    n = _literal(num_bytes)
    if n is None:
        return None

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        pointer = _I8.as_pointer()
        cgutils.raw_memcpy(b, b.inttoptr(args[0], pointer), b.inttoptr(args[1], pointer), ir.Constant(_I64, n), 1)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, num_bytes), codegen


@_intrinsic
def stream_line(typing: Any, to: Any, source: Any) -> Any:
    """Copies 64 bytes past the caches, to a multiple of 64; `stream_end` comes before anything else reads them."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        line = ir.VectorType(_I8, _CACHE_LINE).as_pointer()
        value = b.load(b.inttoptr(args[1], line))
        value.align = 1
        stored = b.store(value, b.inttoptr(args[0], line))
        stored.align = _CACHE_LINE
        stored.set_metadata("nontemporal", b.module.add_metadata([_I32(1)]))
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@_intrinsic
def stream_row(typing: Any, address: Any, value: Any) -> Any:
    """Writes a row past the caches, to a multiple of 64, as `stream_line` does; its bytes are a multiple of 64, too."""
    if not isinstance(value, RowType):
        return None

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        stored = b.store(args[1], b.inttoptr(args[0], args[1].type.as_pointer()))
        stored.align = _CACHE_LINE
        stored.set_metadata("nontemporal", b.module.add_metadata([_I32(1)]))
        return ctx.get_dummy_value()

    return types.void(types.int64, value), codegen


@_intrinsic
def stream_end(typing: Any) -> Any:
    """What `stream_line` and `stream_row` wrote is seen by whatever sees what comes after."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.fence("seq_cst")
        return ctx.get_dummy_value()

    return types.void(), codegen


@_intrinsic
def transpose_tile(
    typing: Any, source: Any, source_bytes: Any, target: Any, target_bytes: Any, lanes: Any, storage: Any
) -> Any:
    """Writes the transpose of `lanes` rows of as many elements, a power of two; rows are so many bytes apart."""
    n, s = _literal(lanes), _literal(storage)
    if n is None or s is None:
        return None
    vector = ir.VectorType(_ELEMENT[s], n)

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        def pointer(number: int, row: int) -> Any:
            offset = b.mul(args[number + 1], ir.Constant(_I64, row))
            return b.inttoptr(b.add(args[number], offset), vector.as_pointer())

        rows = []
        for row in range(n):
            rows.append(b.load(pointer(0, row)))
            rows[-1].align = STORAGE_BYTES[s]
        for row, value in enumerate(_transposed(b, rows)):
            b.store(value, pointer(2, row)).align = STORAGE_BYTES[s]
        return ctx.get_dummy_value()

    return types.void(*(types.int64,) * 4, lanes, storage), codegen


def _transposed(b: Any, rows: list[Any]) -> list[Any]:
    """Swaps halves of pairs of rows, then quarters, and so on."""
    n, half = len(rows), 1
    while half < n:
        for row in (row for row in range(n) if not row & half):
            x, y = rows[row], rows[row + half]
            # Lanes of x are numbered 0 … n − 1, those of y from n on.
            low = [n + lane - half if lane & half else lane for lane in range(n)]
            high = [n + lane if lane & half else lane + half for lane in range(n)]
            for place, lanes in ((row, low), (row + half, high)):
                rows[place] = b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, n), lanes))
        half *= 2
    return rows


@_intrinsic
def load_i64(typing: Any, address: Any) -> Any:
    """The int64 at `address`."""
    return _load(_I64, types.int64)


@_intrinsic
def store_i64(typing: Any, address: Any, value: Any) -> Any:
    """Writes an int64."""
    return _store(_I64, types.int64)


@_intrinsic
def load_u32(typing: Any, address: Any) -> Any:
    """The uint32 at `address`, as an int64."""
    return _load(_I32, types.int64, "zext")


@_intrinsic
def store_u32(typing: Any, address: Any, value: Any) -> Any:
    """Writes the low 32 bits of an int64."""
    return _store(_I32, types.int64, narrow=True)


@_intrinsic
def load_u8(typing: Any, address: Any) -> Any:
    """The uint8 at `address`, as an int64."""
    return _load(_I8, types.int64, "zext")


@_intrinsic
def store_u8(typing: Any, address: Any, value: Any) -> Any:
    """Writes the low 8 bits of an int64."""
    return _store(_I8, types.int64, narrow=True)


@_intrinsic
def load_f32(typing: Any, address: Any) -> Any:
    """The float32 at `address`."""
    return _load(_F32, types.float32)


@_intrinsic
def store_f32(typing: Any, address: Any, value: Any) -> Any:
    """Writes a float32."""
    return _store(_F32, types.float32)


@_intrinsic
def load_f64(typing: Any, address: Any) -> Any:
    """The float64 at `address`."""
    return _load(_F64, types.float64)


@_intrinsic
def store_f64(typing: Any, address: Any, value: Any) -> Any:
    """Writes a float64."""
    return _store(_F64, types.float64)


@_intrinsic
def float_bits(typing: Any, value: Any) -> Any:
    """The bits of a float64, as an int64."""
    return types.int64(types.float64), lambda ctx, b, sig, args: b.bitcast(args[0], _I64)


@_intrinsic
def opaque(typing: Any, value: Any) -> Any:
    """The same int64, of which the compiler knows nothing: it makes no branch of a mask."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [args[0]], side_effect=False)

    return types.int64(types.int64), codegen


@_intrinsic
def load_scalar(typing: Any, address: Any, storage: Any) -> Any:
    """One element of the arithmetic's type."""
    s = _literal(storage)
    if s is None:
        return None
    scalar = types.float64 if s == FLOAT64 else types.float32
    _, codegen = _load(_ELEMENT[s], scalar)
    return scalar(types.int64, storage), lambda ctx, b, sig, args: codegen(ctx, b, sig, args[:1])


@_intrinsic
def store_scalar(typing: Any, address: Any, value: Any, storage: Any) -> Any:
    """Writes one element of the arithmetic's type."""
    s = _literal(storage)
    if s is None:
        return None
    scalar = types.float64 if s == FLOAT64 else types.float32
    _, codegen = _store(_ELEMENT[s], scalar)
    return types.void(types.int64, scalar, storage), lambda ctx, b, sig, args: codegen(ctx, b, sig, args[:2])


@_intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """Atomic load: what the writer wrote before its `store_release` is visible after it."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@_intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Atomic store that publishes everything written before it."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], _I64.as_pointer()), "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@_intrinsic
def load_ordered(typing: Any, address: Any) -> Any:
    """Atomic load in the one order that all ranks see of such loads, `exchange_atomic` and `add_atomic`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


def _change_atomic(operation: str) -> Any:
    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.atomic_rmw(operation, b.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return codegen


@_intrinsic
def exchange_atomic(typing: Any, address: Any, value: Any) -> Any:
    """Writes an int64 and publishes everything written before it; returns what was there."""
    return types.int64(types.int64, types.int64), _change_atomic("xchg")


@_intrinsic
def add_atomic(typing: Any, address: Any, value: Any) -> Any:
    """Adds to an int64; returns what was there."""
    return types.int64(types.int64, types.int64), _change_atomic("add")


def c_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the C library, for kernels; by name, so that they can be kept on disk."""
    return types.ExternalFunction(name, signature(result, *arguments))


sched_yield = c_function("sched_yield", types.int32)
