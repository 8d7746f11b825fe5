"""A request says what is wrong with it, and what memory it means."""

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.placement import TableShape
from rowmesh.placement.request import Request

SHAPES = [TableShape("user", 10, 64, 64, 4), TableShape("item", 7, 16, 16, 4)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, but must be at least 1"),
        ({"mode": "serve"}, r"mode is 'serve', but must be one of \['train', 'infer'\]"),
        ({"extra_memory": -0.1}, "extra_memory is -0.1, but must be at least 0"),
        ({"extra_memory": float("nan")}, "extra_memory is nan"),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes is 0, but must be at least 1, or left out"),
        ({"objective": "fastest"}, "objective is 'fastest'"),
        ({"max_hops": 3}, "max_hops is 3, but must be 1 or 2"),
        ({"fetch_weight": 0.0}, "fetch_weight is 0.0, but must be above 0"),
        ({"time_limit_s": 0}, "time_limit_s is 0, but must be above 0"),
    ],
)
def test_a_request_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        Request(**{"batch_size": 8} | fields)


def test_extra_memory_is_a_share_of_what_rows_take_without_copies():
    # Four ranks hold at most 3 rows of 68 bytes and 2 rows of 20.
    assert Request(batch_size=8, extra_memory=0).limit_bytes(SHAPES, 4) == 244
    assert Request(batch_size=8, extra_memory=0.5).limit_bytes(SHAPES, 4) == 366


def test_a_limit_replaces_the_share_and_a_device_is_never_exceeded():
    request = Request(batch_size=8, memory_limit_bytes=1000)
    assert request.limit_bytes(SHAPES, 4) == 1000
    assert request.limit_bytes(SHAPES, 4, device_bytes=900) == 900
    assert Request(batch_size=8).limit_bytes(SHAPES, 4, device_bytes=10**9) == 256


def test_the_sum_over_links_is_minimized_unless_asked():
    assert not Request(batch_size=8).minimizes_slowest_link
    assert Request(batch_size=8, objective="slowest_link").minimizes_slowest_link
