"""Numbers of placements as people read them."""

from __future__ import annotations

import re

from rowmesh.errors import ConfigurationError

_BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "ps": 1e-12}


def bytes_text(num_bytes: float) -> str:
    """Bytes with three digits.

    >>> bytes_text(0), bytes_text(512), bytes_text(1_407_644), bytes_text(-2.5e9)
    ('0 B', '512 B', '1.41 MB', '-2.50 GB')
    """
    unit = next((unit for unit, size in reversed(_BYTES.items()) if abs(num_bytes) >= size), "B")
    return f"{_three_digits(num_bytes / _BYTES[unit])} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds with three digits.

    >>> seconds_text(0), seconds_text(7.758e-5), seconds_text(0.0123), seconds_text(3.1e-14)
    ('0 s', '77.6 µs', '12.3 ms', '0.0310 ps')
    """
    if seconds == 0:
        return "0 s"
    unit = next((unit for unit, size in _SECONDS.items() if abs(seconds) >= size), "ps")
    return f"{_three_digits(seconds / _SECONDS[unit])} {unit}"


def share_text(share: float) -> str:
    """A share as percentage; what is not nothing does not read as nothing.

    >>> share_text(0.12345), share_text(1), share_text(0.00004), share_text(0)
    ('12.3 %', '100 %', '<0.1 %', '0 %')
    """
    if 0 < share < 5e-4:
        return "<0.1 %"
    return "100 %" if share == 1 else "0 %" if share == 0 else f"{share:.1%}".replace("%", " %")


def rows_text(start: int, stop: int) -> str:
    """Which rows a range holds.

    >>> rows_text(0, 1), rows_text(5, 1005)
    ('row 0', 'rows 5 to 1,004')
    """
    return f"row {start:,}" if stop == start + 1 else f"rows {start:,} to {stop - 1:,}"


def parse_bytes(text: str, what: str) -> int:
    """The number of bytes in a size such as 40GB, 1.5 GiB or 65536.

    Raises:
        ConfigurationError: it is no size; names `what`.

    >>> parse_bytes("40GB", "memory"), parse_bytes("1.5 KiB", "memory"), parse_bytes("65536", "memory")
    (40000000000, 1536, 65536)
    """
    units = {unit.lower(): size for unit, size in (_BYTES | _BINARY).items()} | {"": 1}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units or float(match[1]) * units[match[2]] < 1:
        raise ConfigurationError(f"{what}: {text!r} is no size; write bytes, or a unit as in 40GB, 512MB or 1.5GiB")
    return int(float(match[1]) * units[match[2]])


def _three_digits(value: float) -> str:
    """Without an exponent, and without a fraction where there is none."""
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.{2 if size >= 0.1 else 4}f}"
