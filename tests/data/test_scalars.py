"""Every scalar of Arrow can be shown."""

import datetime
import decimal

import pyarrow as pa
import pytest

from rowmesh.data.scalars import shown


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        (pa.scalar(None), None),
        (pa.scalar(None, pa.list_(pa.int8())), None),
        (pa.scalar(7), 7),
        (pa.scalar(decimal.Decimal("1.5")), decimal.Decimal("1.5")),
        (pa.scalar(b"\xff", pa.large_binary()), "\\xff"),
        (pa.scalar(b"abc", pa.binary(3)), "abc"),
        (pa.scalar("é"), "é"),
        (pa.scalar({"a": [b"\xff"]}), {"a": ["\\xff"]}),
        (pa.scalar([("a", 1)], pa.map_(pa.string(), pa.int8())), [{"key": "a", "value": 1}]),
        (pa.scalar(datetime.date(2024, 2, 3)), "2024-02-03"),
        (pa.scalar(1, pa.timestamp("ns", "Europe/Berlin")), "1970-01-01 01:00:00.000000001+0100"),
        (pa.scalar(1, pa.time64("ns")), "00:00:00.000000001"),
        (pa.scalar(1, pa.duration("ns")), "1"),
        (
            pa.scalar((1, 2, 3), pa.month_day_nano_interval()),
            "MonthDayNano(months=1, days=2, nanoseconds=3) (month_day_nano_interval)",
        ),
        (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"\xff" * 16], pa.binary(16)))[0], "\\xff" * 16),
    ],
)
def test_shown(scalar, expected):
    assert shown(scalar) == expected
