"""Times are what strptime makes of them, in whatever way they are stored."""

import datetime

import hypothesis
import hypothesis.strategies as st
import pyarrow as pa
import pytest

from rowmesh.data.times import HOUR, MICROSECONDS, SECONDS, WEEKDAY, of_times

NUMBERS = (SECONDS, MICROSECONDS, HOUR, WEEKDAY)
FORMATS = ["%Y-%m-%d", "%Y-%m-%d %H:%M:%S", "%d.%m.%YT%H", "%Y%m%d%H%M%S", "%y%m%d%H", "%Y-%m-%d %H:%M:%S.%f", "%H:%M"]


def by_strptime(text, time_format, number):
    try:
        return number.of_time(datetime.datetime.strptime(text, time_format).replace(tzinfo=datetime.UTC))
    except ValueError:
        return None


@pytest.mark.parametrize("time_format", FORMATS)
@hypothesis.given(st.data())
def test_texts_are_what_strptime_makes_of_them(time_format, data):
    """In all numbers, also where a digit was changed, so that there is no such day or second, or no time at all."""
    texts = []
    for time in data.draw(st.lists(st.datetimes(min_value=datetime.datetime(1000, 1, 1)), min_size=1, max_size=5)):
        text = time.strftime(time_format)
        place = data.draw(st.integers(0, len(text) - 1))
        texts += [text, text[:place] + data.draw(st.sampled_from("0123569 /x²")) + text[place + 1 :], text[1:]]
    for number in NUMBERS:
        expected = [by_strptime(text, time_format, number) for text in texts]
        assert of_times(pa.array(texts), time_format, number).to_pylist() == expected


@pytest.mark.parametrize(
    "text", ["2024-02-30", "2023-02-29", "1900-02-29", "0000-01-01", "2024-13-01", "2024-00-01", "2024-01-00", "", None]
)
def test_what_is_no_day_is_no_time(text):
    assert of_times(pa.array([text, "2024-02-29"]), "%Y-%m-%d", SECONDS).to_pylist() == [None, 1709164800]


def test_text_that_is_no_utf8_is_no_time():
    column = pa.Array.from_buffers(pa.string(), 1, pa.array([b"2024-02-\xe9"], pa.binary()).buffers())
    for array in (column, column.cast(pa.binary())):
        assert of_times(array, "%Y-%m-%d", SECONDS).to_pylist() == [None]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("time_format", ["unix", "%Y-%m-%d"])
def test_timestamps_need_no_format(unit, time_format):
    time = datetime.datetime(2024, 2, 29, 23, 30)
    column = pa.array([time, None]).cast(pa.timestamp(unit))
    found = [of_times(column, time_format, number).to_pylist() for number in NUMBERS]
    assert found == [[1709249400, None], [1709249400000000, None], [23, None], [3, None]]
    zoned = column.cast(pa.timestamp(unit, "UTC")).cast(pa.timestamp(unit, "Europe/Berlin"))
    found = [of_times(zoned, time_format, number).to_pylist() for number in NUMBERS]
    assert found == [[1709249400, None], [1709249400000000, None], [0, None], [4, None]]


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()])
def test_dates_are_their_first_second(kind):
    column = pa.array([datetime.date(2024, 2, 29)], kind)
    assert of_times(column, "unix", SECONDS).to_pylist() == [1709164800]


@pytest.mark.parametrize(
    "column",
    [pa.array([-(2**62), 2**62], pa.timestamp("s")), pa.array([2**31 - 1], pa.date32())],
)
def test_times_of_no_year_are_none(column):
    for number in NUMBERS:
        assert of_times(column, "unix", number).null_count == len(column)
