"""shown: the value of an Arrow scalar as messages and the quarantine show it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def shown(scalar: pa.Scalar) -> Any:
    """The value in plain Python; lists, structs and maps item by item.

    It never fails, as `as_py` does: what is no UTF-8 has backslashes in its place, and dates and times are text, since
    Python's hold no nanoseconds and no year after 9999.

    Example:
        >>> shown(pa.scalar(b"caf\\xe9")), shown(pa.scalar([1], pa.list_(pa.timestamp("ns"))))
        ('caf\\\\xe9', ['1970-01-01 00:00:00.000000001'])
    """
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar):
        return shown(scalar.value)
    if isinstance(scalar, pa.BinaryScalar):  # strings too
        return scalar.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
    if isinstance(scalar, pa.StructScalar):
        return {kind.field(i).name: shown(scalar[i]) for i in range(kind.num_fields)}
    if isinstance(scalar, pa.ListScalar):  # maps too, as lists of their pairs
        return [shown(item) for item in scalar.values]
    if pa.types.is_temporal(kind):
        return _time(scalar)
    return scalar.as_py()


def _time(scalar: pa.Scalar) -> str:
    try:
        return str(scalar.cast(pa.string()))
    except pa.ArrowException:  # a time zone that is not known here, or a kind without text
        return f"{getattr(scalar, 'value', scalar)} ({scalar.type})"
