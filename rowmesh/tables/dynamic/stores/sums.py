"""RowSums: a checksum behind every row or record that is kept by its key in a store without checksums of its own."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from rowmesh.errors import DamagedFileError

SUM_BYTES = 8


class RowSums:
    """XXH3 (64 bits) of key and value, whose seed says whose they are: what is damaged, or of another owner, shows.

    Args:
        owner: whose rows these are, such as a table.

    Example:
        >>> sums = RowSums("user")
        >>> [value] = sums.add([b"7"], [b"row"])
        >>> len(value), sums.take([b"7", b"8"], [value, None], "a store", "")
        (11, [b'row', None])
    """

    def __init__(self, owner: str) -> None:
        self._seed = xxhash.xxh3_64_intdigest(owner.encode())

    def add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bytes]:
        """The values, each with its checksum behind it."""
        seed, digest = self._seed, xxhash.xxh3_64_digest
        return [value + digest(key + value, seed) for key, value in zip(keys, values, strict=True)]

    def take(self, keys: Sequence[bytes], stored: Sequence[bytes | None], name: str, advice: str) -> list[bytes | None]:
        """The values alone; None where there is none.

        Raises:
            DamagedFileError: a value is not what was written by this key; names it.
        """
        seed, digest, values = self._seed, xxhash.xxh3_64_digest, []
        for key, whole in zip(keys, stored, strict=True):
            value = None if whole is None else whole[:-SUM_BYTES]
            if whole is not None and digest(key + whole[:-SUM_BYTES], seed) != whole[-SUM_BYTES:]:
                raise DamagedFileError(
                    f"{name}: what is stored by the key {key.hex()} is not what was written; {advice}"
                )
            values.append(value)
        return values
