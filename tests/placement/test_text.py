import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.placement.text import bytes_text, parse_bytes, seconds_text, share_text


@given(st.floats(1.0, 1e15))
def test_sizes_read_back_to_three_digits(size):
    assert parse_bytes(bytes_text(size).replace(",", ""), "size") == pytest.approx(size, rel=0.011, abs=1)


@pytest.mark.parametrize("text", ["", "40 XB", "GB", "-1", "0", "1e9", "4 0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"--memory: .* is no size; write bytes, or a unit as in 40GB"):
        parse_bytes(text, "--memory")


def test_nothing_and_everything_are_told_from_almost():
    assert [share_text(share) for share in (0, 1e-9, 0.9999, 1)] == ["0 %", "<0.1 %", "100.0 %", "100 %"]
    assert seconds_text(2.0) == "2 s"
