"""Plain columns: what Arrow has several encodings of, as the few types that readers know.

Readers ask only of plain types whether they are text, lists or numbers, so that a type of Arrow is known to all uses of
a column (ids, dense values, labels, times) and to all that read one, or to none.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_Known = pa.types


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The plain type in which values of a type are taken.

    Dictionaries, run ends and extensions are taken in the type of their values; views and values of fixed size as text,
    bytes or lists.

    Example:
        >>> str(plain_type(pa.string_view())), str(plain_type(pa.list_(pa.dictionary(pa.int8(), pa.string()), 2)))
        ('large_string', 'list<item: string>')
    """
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if _Known.is_dictionary(kind) or _Known.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if _Known.is_string_view(kind):
        return pa.large_string()
    if _Known.is_binary_view(kind):
        return pa.large_binary()
    if _Known.is_fixed_size_binary(kind):
        return pa.binary()
    if _Known.is_decimal32(kind) or _Known.is_decimal64(kind):  # which Arrow casts to fewer types
        return pa.decimal128(kind.precision, kind.scale)
    if _holds_lists(kind):
        is_large = _Known.is_large_list(kind) or _Known.is_large_list_view(kind)
        return (pa.large_list if is_large else pa.list_)(plain_type(kind.value_type))
    return kind


def plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns the values, of the column's plain type.

    Example:
        >>> plain(pa.chunked_array([["a"], ["b", "a"]], pa.dictionary(pa.int8(), pa.string()))).to_pylist()
        ['a', 'b', 'a']
    """
    if isinstance(column, pa.Array):
        return _plain(column)
    return joined(pa.chunked_array([_plain(chunk) for chunk in column.chunks], plain_type(column.type)))


def joined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Joins the values to one array."""
    if isinstance(column, pa.Array):
        return column
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no rows, or too large for one array
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def is_text(kind: pa.DataType) -> bool:
    """Whether a plain type is a string or bytes."""
    tests = (_Known.is_binary, _Known.is_string, _Known.is_large_binary, _Known.is_large_string)
    return any(test(kind) for test in tests)


def is_list(kind: pa.DataType) -> bool:
    """Whether a plain type is a list."""
    return _Known.is_list(kind) or _Known.is_large_list(kind)


def _holds_lists(kind: pa.DataType) -> bool:
    views = _Known.is_list_view(kind) or _Known.is_large_list_view(kind)
    return is_list(kind) or views or _Known.is_fixed_size_list(kind)


def _plain(array: pa.Array) -> pa.Array:
    kind = plain_type(array.type)
    if kind == array.type:
        return array
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if isinstance(array, pa.DictionaryArray):
        return _plain(array.dictionary).take(array.indices)
    if isinstance(array, pa.RunEndEncodedArray):
        values = _plain(array.values)  # of these Arrow decodes fewer types
        encoded = pa.run_end_encoded(array.type.run_end_type, values.type)
        children = [array.run_ends, values]
        decoded = pa.RunEndEncodedArray.from_buffers(encoded, len(array), [None], -1, array.offset, children)
        return pc.run_end_decode(decoded)
    if _holds_lists(array.type):
        # Arrow's own cast of list views keeps their offsets, which lists cannot have.
        lengths = pc.list_value_length(array)
        offsets = np.concatenate([[0], lengths.fill_null(0).to_numpy(zero_copy_only=False).cumsum(dtype=np.int64)])
        is_large = _Known.is_large_list(kind)
        made = pa.LargeListArray if is_large else pa.ListArray
        starts = pa.array(offsets, pa.int64() if is_large else pa.int32())
        return made.from_arrays(starts, _plain(array.flatten()), type=kind, mask=lengths.is_null())
    return array.cast(kind)
