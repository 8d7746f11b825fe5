"""Vocabulary: gives every distinct value of a column a code, in order of first appearance.

The values themselves are kept, back to back, and compared byte by byte: two values never share a code.
Memory: the bytes of the distinct values, up to twice, and 24 to 48 bytes for each (a hash table of int32 codes
at most half full, an offset and a hash, in arrays that double).
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmesh.errors import DataError
from rowmesh.ops.compiled import compiled

MAX_CODES = 2**31 - 2  # codes and rows are stored as int32
_FIRST_SLOTS = 1 << 10


class Vocabulary:
    """The distinct values of one column.

    Example:
        >>> vocabulary = Vocabulary("C1")
        >>> vocabulary.encode(pa.array(["a", "b", None, "a"])).tolist()
        [0, 1, 2, 0]
        >>> vocabulary.values(np.array([1, 2])).to_pylist()
        ['b', None]
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_integer: bool | None = None
        self._is_unsigned: bool | None = None  # None until there is an id below 0, or of 2⁶³ or more
        self._slots = np.full(_FIRST_SLOTS, -1, np.int32)
        self._hashes = np.zeros(_FIRST_SLOTS // 2, np.uint64)
        self._offsets = np.zeros(_FIRST_SLOTS // 2 + 1, np.int64)
        self._heap = np.zeros(1 << 14, np.uint8)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def encode(self, values: pa.Array) -> NDArray[np.int32]:
        """Codes of some values; values not met before get the next codes. Null and "" are one value: missing.

        Args:
            values: integers, strings or binary; of type null where all are missing.

        Raises:
            DataError: integers and strings are mixed, or ids below 0 and of 2⁶³ or more, or the codes no
                longer fit int32.
        """
        data, offsets = self._as_bytes(values)
        codes = np.empty(len(values), np.int32)
        done = 0
        while True:
            # [Note: growing between calls] The kernel stops where the next new value might not fit; the
            # arrays then grow here and it goes on. Growing by doubling keeps the total work linear.
            done, self._size = _encode(
                data, offsets, done, codes, self._slots, self._hashes, self._offsets, self._heap, self._size
            )
            if done == len(codes):
                return codes
            self._grow(int(offsets[done + 1] - offsets[done]))

    def find(self, values: pa.Array) -> NDArray[np.int32]:
        """Codes of some values, −1 for those not met before; adds none. Integers are found in text as decimal numbers.

        Raises:
            DataError: text is looked for where the vocabulary has integers.

        Example:
            >>> vocabulary = Vocabulary("C1")
            >>> _ = vocabulary.encode(pa.array(["7", "b"]))
            >>> vocabulary.find(pa.array(["b", "c"])).tolist(), vocabulary.find(pa.array([7, 8])).tolist()
            ([1, -1], [0, -1])
        """
        is_integer = pa.types.is_integer(values.type)
        if len(values) and self.is_integer is not None and not pa.types.is_null(values.type):
            if self.is_integer and not is_integer:
                raise DataError(
                    f"column {self.name!r} holds text, and the values it is compared with are integers; "
                    "store it as integers"
                )
            if is_integer and not self.is_integer:
                values = values.cast(pa.string())
        known = self.is_integer, self._is_unsigned
        try:
            data, offsets = self._as_bytes(values)
        finally:
            self.is_integer, self._is_unsigned = known
        codes = np.empty(len(values), np.int32)
        _find(data, offsets, codes, self._slots, self._hashes, self._offsets, self._heap)
        return codes

    def values(self, codes: NDArray[np.integer]) -> pa.Array:
        """The values of some codes; the missing value is null. Text that is no UTF-8 comes as binary,
        integers as int64, or as uint64 where one does not fit.
        """
        starts, ends = self._offsets[codes], self._offsets[np.asarray(codes) + 1]
        lengths = ends - starts
        offsets = np.concatenate([[0], lengths.cumsum()])
        data = np.empty(int(offsets[-1]), np.uint8)
        _copy_spans(self._heap, starts, offsets, data)
        missing = pa.array(lengths == 0)
        if self.is_integer:
            integers = np.zeros(len(lengths), np.int64)
            integers[lengths > 0] = data.view(np.int64)
            return pc.if_else(missing, None, pa.array(integers.view(np.uint64) if self._is_unsigned else integers))
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        array = pc.if_else(missing, None, pa.Array.from_buffers(pa.large_binary(), len(lengths), buffers))
        try:
            return array.cast(pa.large_string())
        except pa.ArrowInvalid:
            return array

    def _as_bytes(self, values: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The bytes of all values back to back, and where each begins."""
        if pa.types.is_null(values.type):
            return np.empty(0, np.uint8), np.zeros(len(values) + 1, np.int64)
        is_integer = pa.types.is_integer(values.type)
        if self.is_integer is None and len(values):
            self.is_integer = is_integer
        if len(values) and self.is_integer != is_integer:
            raise DataError(
                f"column {self.name!r} holds integers in one file and text in another; "
                "store it with one type everywhere"
            )
        if is_integer:
            valid = values.is_valid().to_numpy(zero_copy_only=False)
            return self._bits(values.drop_null()).view(np.uint8), np.concatenate([[0], (valid * 8).cumsum()])
        binary = values.cast(pa.large_binary()).fill_null(b"")
        _, offset_buffer, data_buffer = binary.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64)[binary.offset : binary.offset + len(binary) + 1]
        data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
        return data, offsets

    def _bits(self, values: pa.Array) -> NDArray[np.int64]:
        """Integers as 64 bits, those of 2⁶³ and more as negative ones, which then must not occur themselves."""
        is_uint64 = pa.types.is_uint64(values.type)
        bits = (values.view(pa.int64()) if is_uint64 else values.cast(pa.int64())).to_numpy()
        if len(bits) and bits.min() < 0:
            if self._is_unsigned is not None and self._is_unsigned != is_uint64:
                raise DataError(
                    f"column {self.name!r} holds ids below 0 in one file and ids of 2^63 or more in another; "
                    "store it as text everywhere"
                )
            self._is_unsigned = is_uint64
        return bits

    def _grow(self, next_length: int) -> None:
        used = int(self._offsets[self._size])
        if used + next_length > len(self._heap):
            self._heap = _resized(self._heap, max(2 * len(self._heap), used + next_length))
        if self._size >= len(self._hashes):
            if self._size >= MAX_CODES:
                raise DataError(
                    f"column {self.name!r} has more than {MAX_CODES} distinct values; "
                    "hash it into fewer before preparation"
                )
            self._hashes = _resized(self._hashes, 2 * self._size)
            self._offsets = _resized(self._offsets, 2 * self._size + 1)
            self._slots = np.full(4 * self._size, -1, np.int32)
            _reinsert(self._slots, self._hashes, self._size)


def _resized(array: np.ndarray, length: int) -> np.ndarray:
    larger = np.zeros(length, array.dtype)
    larger[: len(array)] = array
    return larger


@compiled(nogil=True)
def _hash(data, start, end):  # pragma: no cover - compiled
    """FNV-1a with the finalizer of SplitMix64, so that the low bits are good enough for a table."""
    value = np.uint64(0xCBF29CE484222325)
    for i in range(start, end):
        value = (value ^ np.uint64(data[i])) * np.uint64(0x100000001B3)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@compiled(nogil=True)
def _equal(data, start, length, heap, heap_start, heap_end):  # pragma: no cover - compiled
    if heap_end - heap_start != length:
        return False
    for i in range(length):  # noqa: SIM110 - Numba compiles loops best
        if data[start + i] != heap[heap_start + i]:
            return False
    return True


@compiled(nogil=True)
def _encode(data, offsets, first, codes, slots, hashes, heap_offsets, heap, size):  # pragma: no cover
    """Codes from position `first` on; returns (position reached, number of codes)."""
    mask = np.uint64(len(slots) - 1)
    for i in range(first, len(codes)):
        start, end = offsets[i], offsets[i + 1]
        key = _hash(data, start, end)
        slot = key & mask
        while True:
            code = slots[slot]
            if code < 0:
                used = heap_offsets[size]
                if size >= len(hashes) or used + end - start > len(heap):
                    return i, size
                heap[used : used + end - start] = data[start:end]
                heap_offsets[size + 1] = used + end - start
                hashes[size] = key
                slots[slot] = size
                code = size
                size += 1
                break
            if hashes[code] == key and _equal(
                data, start, end - start, heap, heap_offsets[code], heap_offsets[code + 1]
            ):
                break
            slot = (slot + np.uint64(1)) & mask
        codes[i] = code
    return len(codes), size


@compiled(nogil=True)
def _find(data, offsets, codes, slots, hashes, heap_offsets, heap):  # pragma: no cover - compiled
    """Codes of values, −1 where there is none."""
    mask = np.uint64(len(slots) - 1)
    for i in range(len(codes)):
        start, end = offsets[i], offsets[i + 1]
        key = _hash(data, start, end)
        slot = key & mask
        while True:
            code = slots[slot]
            if code < 0 or (
                hashes[code] == key
                and _equal(data, start, end - start, heap, heap_offsets[code], heap_offsets[code + 1])
            ):
                break
            slot = (slot + np.uint64(1)) & mask
        codes[i] = code


@compiled(nogil=True)
def _reinsert(slots, hashes, size):  # pragma: no cover - compiled
    mask = np.uint64(len(slots) - 1)
    for code in range(size):
        slot = hashes[code] & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = code


@compiled(nogil=True)
def _copy_spans(heap, starts, offsets, out):  # pragma: no cover - compiled
    for i in range(len(starts)):
        length = offsets[i + 1] - offsets[i]
        out[offsets[i] : offsets[i] + length] = heap[starts[i] : starts[i] + length]
