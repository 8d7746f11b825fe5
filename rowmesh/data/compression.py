"""open_stream: reads a file's text, decompressed by its first bytes, whatever its name is."""

from __future__ import annotations

import bz2
import contextlib
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from rowmesh._support.files.regular import open_regular
from rowmesh.errors import DataError

_HEAD_BYTES = 16
_READ_BYTES = 1 << 20
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


CORRUPT = (pa.ArrowException, OSError, EOFError, zlib.error)
"""Errors of reading a stream whose file is damaged or cut."""


class Stream(Protocol):
    """A source of bytes."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""
        ...


@contextlib.contextmanager
def open_stream(path: Path) -> Iterator[tuple[Stream, BinaryIO]]:
    """The decompressed stream of a file, and the file below it, whose position is how much was read.

    Raises:
        DataError: the file is in a format that is not read as text.
        OSError: the file cannot be opened.
    """
    with os.fdopen(open_regular(path), "rb") as raw:
        head = raw.read(_HEAD_BYTES)
        raw.seek(0)
        for what, pattern in _UNREADABLE.items():
            if pattern.match(head):
                raise DataError(f"{path} is {what}")
        compression = next((name for name, pattern in _COMPRESSIONS.items() if pattern.match(head)), None)
        if compression == "gzip":
            yield _Members(raw, lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), pads=True), raw
        elif compression == "bz2":
            yield _Members(raw, bz2.BZ2Decompressor, pads=False), raw
        else:
            with pa.input_stream(raw, compression=compression) as stream:
                yield stream, raw


class _Members:
    """The text of compressed streams in one file, one behind the other, as gzip and bzip2 write them; some are empty.

    Arrow takes an empty stream of bzip2 for the end of the file, and zero bytes behind one of gzip for another.

    Args:
        raw: the file.
        made: makes a decompressor of one stream.
        pads: whether zero bytes may stand behind a stream.
    """

    def __init__(self, raw: BinaryIO, made: Callable[[], Any], *, pads: bool) -> None:
        self._raw, self._made, self._pads = raw, made, pads
        self._current: Any = made()
        self._input, self._is_over = b"", False

    def read(self, size: int, /) -> bytes:
        """See `Stream`."""
        parts, missing = [], size
        while missing and (data := self._some(missing)):
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def _some(self, size: int) -> bytes:
        """Some bytes, none at the end."""
        while self._current is not None or self._begin():
            if not self._input:
                self._fill()
            stream: Any = self._current
            data = stream.decompress(self._input, size)
            if stream.eof:
                self._input, self._current = stream.unused_data, None
            else:
                self._input = getattr(stream, "unconsumed_tail", b"")  # bz2 keeps it
                if self._is_over and not self._input and not data:
                    raise EOFError("it ends within a compressed stream")
            if data:
                return data
        return b""

    def _begin(self) -> bool:
        """Whether another stream follows."""
        while True:
            if self._pads:
                self._input = self._input.lstrip(b"\0")
            if self._input:
                self._current = self._made()
                return True
            if self._is_over:
                return False
            self._fill()

    def _fill(self) -> None:
        self._input = self._raw.read(_READ_BYTES)
        self._is_over = not self._input
