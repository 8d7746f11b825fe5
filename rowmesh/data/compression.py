"""open_stream: reads a file's text, decompressed by its first bytes, whatever its name is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from rowmesh.errors import DataError

_HEAD_BYTES = 16
_COMPRESSIONS = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),  # data, or nothing
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}
_UNREADABLE = {
    "a zip archive; unpack it": re.compile(rb"PK[\x03\x05]"),
    "compressed with xz; decompress it": re.compile(rb"\xfd7zXZ\x00"),
    "compressed with LZ4; decompress it": re.compile(rb"\x04\x22\x4d\x18"),
    'a Parquet file; use a schema with format = "parquet"': re.compile(rb"PAR1"),
    "text in UTF-16; save it as UTF-8": re.compile(rb"\xff\xfe|\xfe\xff"),
}


@contextlib.contextmanager
def open_stream(path: Path) -> Iterator[tuple[pa.NativeFile, BinaryIO]]:
    """The decompressed stream of a file, and the file below it, whose position is how much was read.

    Raises:
        DataError: the file is in a format that is not read as text.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as raw:
        head = raw.read(_HEAD_BYTES)
        raw.seek(0)
        for what, pattern in _UNREADABLE.items():
            if pattern.match(head):
                raise DataError(f"{path} is {what}")
        compression = next((name for name, pattern in _COMPRESSIONS.items() if pattern.match(head)), None)
        with pa.input_stream(raw, compression=compression) as stream:
            yield stream, raw
