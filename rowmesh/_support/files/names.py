"""File names for the names of tables and features, which may be any text, of any length."""

from __future__ import annotations

from hashlib import blake2b
from urllib.parse import quote

MOST_BYTES = 240
"""Bytes of a name without its ending: file systems allow 255 bytes."""
_DIGEST_BYTES = 16


def file_stem(name: str, most: int = MOST_BYTES) -> str:
    """The name of a table's file, without its ending: ASCII, so many bytes at most.

    >>> file_stem("C1"), file_stem("a/b"), len(file_stem("a" * 1000))
    ('C1', 'a%2Fb', 240)
    """
    return shortened(quote(name, safe=""), most)


def shortened(stem: str, most: int = MOST_BYTES) -> str:
    """A name that a file system takes: a long one is cut and gets a digest of the whole, so that two of them differ.

    >>> shortened("C1"), shortened("a" * 1000, 40)
    ('C1', 'aaaaaaa~a0e5a332e985551c28a377c40f4139c3')
    """
    encoded = stem.encode("utf-8", "surrogatepass")
    if len(encoded) <= most:
        return stem
    digest = blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()
    return f"{encoded[: most - len(digest) - 1].decode('utf-8', 'ignore')}~{digest}"
