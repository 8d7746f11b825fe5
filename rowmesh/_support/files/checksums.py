"""Checksums of files by block, so that a flipped bit is noticed, and located, when the block is first read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import xxhash

from rowmesh.errors import DamagedFileError

BLOCK_BYTES = 4 << 20
"""The bytes of a block, which has a checksum: 16 hexadecimal digits for 4 MiB, 4 KB of manifest for a GiB."""


@dataclass(frozen=True)
class Checksums:
    """The contents that a file must have: its size, and the XXH3 (64 bits) of each of its blocks.

    These find what disks, memory and interrupted copies do. They are no defence against an attacker that changes a file
    and its checksums.

    Attributes:
        size_bytes: of the whole file.
        blocks: checksums in hexadecimal, one for every `block_bytes` bytes; the last block may be shorter.
        block_bytes: the size of a block.
    """

    size_bytes: int
    blocks: tuple[str, ...]
    block_bytes: int = BLOCK_BYTES

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a manifest."""
        return {"size_bytes": self.size_bytes, "block_bytes": self.block_bytes, "xxh3_64": list(self.blocks)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From the values in a manifest.

        Raises:
            ValueError, KeyError, TypeError: they are none.
        """
        size, block, blocks = values["size_bytes"], values["block_bytes"], tuple(values["xxh3_64"])
        if not (isinstance(size, int) and isinstance(block, int) and size >= 0 and block > 0):
            raise ValueError("sizes of a file and its blocks are positive whole numbers")
        if len(blocks) != -(-size // block) or not all(isinstance(each, str) for each in blocks):
            raise ValueError(f"{len(blocks)} checksums for {size} bytes in blocks of {block}")
        return cls(size, blocks, block)


class Writable(Protocol):
    """The receiver of bytes."""

    def write(self, data: Any, /) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...


class ChecksumWriter:
    """Passes bytes on to a file and keeps their checksums: what is written need not be read again for them.

    Args:
        file: open for writing, in binary mode; it is written from here on in order, without seeks.

    Example:
        >>> import io
        >>> writer = ChecksumWriter(io.BytesIO())
        >>> _ = writer.write(b"rows")
        >>> writer.checksums().size_bytes
        4
    """

    def __init__(self, file: Writable, block_bytes: int = BLOCK_BYTES) -> None:
        self._file, self._block_bytes = file, block_bytes
        self._done: list[str] = []
        self._open, self._open_bytes = xxhash.xxh3_64(), 0

    def write(self, data: Any) -> int:
        """Writes the bytes of any contiguous buffer; returns how many."""
        view = memoryview(data).cast("B")
        begin = 0
        while begin < len(view):
            part = view[begin : begin + self._block_bytes - self._open_bytes]
            self._open.update(part)
            self._open_bytes += len(part)
            begin += len(part)
            if self._open_bytes == self._block_bytes:
                self._close_block()
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        """Flushes the file."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def checksums(self) -> Checksums:
        """The checksums of all that was written so far."""
        rest = (self._open.hexdigest(),) if self._open_bytes else ()
        return Checksums(self.size_bytes, (*self._done, *rest), self._block_bytes)

    @property
    def size_bytes(self) -> int:
        """How much was written so far."""
        return len(self._done) * self._block_bytes + self._open_bytes

    def _close_block(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open, self._open_bytes = xxhash.xxh3_64(), 0


def checksums_of(path: Path, block_bytes: int = BLOCK_BYTES) -> Checksums:
    """Reads a file for its checksums."""
    with path.open("rb") as file:
        blocks = tuple(xxhash.xxh3_64_hexdigest(block) for block in iter(lambda: file.read(block_bytes), b""))
        return Checksums(file.tell(), blocks, block_bytes)


def checksums_of_bytes(data: bytes, block_bytes: int = BLOCK_BYTES) -> Checksums:
    """The checksums of bytes in memory.

    >>> checksums_of_bytes(b"rows").size_bytes
    4
    """
    firsts = range(0, len(data), block_bytes)
    blocks = tuple(xxhash.xxh3_64_hexdigest(data[first : first + block_bytes]) for first in firsts)
    return Checksums(len(data), blocks, block_bytes)


def verify_bytes(data: bytes, expected: Checksums, name: str, advice: str) -> None:
    """Compares bytes that were read with what was written.

    Args:
        data: the bytes.
        expected: what they are to be.
        name: of the file, for the error.
        advice: what a user does about a damaged file.

    Raises:
        DamagedFileError: they are others; names the bytes.
    """
    if len(data) != expected.size_bytes:
        raise DamagedFileError(f"{name} has {len(data):,} bytes where {expected.size_bytes:,} were written; {advice}")
    found = checksums_of_bytes(data, expected.block_bytes)
    for number, (is_block, was) in enumerate(zip(found.blocks, expected.blocks, strict=True)):
        if is_block != was:
            begin = number * expected.block_bytes
            end = min(begin + expected.block_bytes, len(data)) - 1
            raise DamagedFileError(f"{name} is damaged: bytes {begin:,} to {end:,} are not what was written; {advice}")
