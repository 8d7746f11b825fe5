"""Suggestions: what is near, and that nothing is suggested where nothing is."""

import pytest

from rowmesh._support.suggest import hint, nearest


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("epoch", ["steps", "epochs"], "epochs"),
        ("c1", ["C1", "C2"], "C1"),
        ("c1", ["C1", "c1"], "C1"),
        ("color", ["name", "size"], None),
        ("a", [], None),
    ],
)
def test_the_nearest_name_without_regard_to_case(name, known, expected):
    assert nearest(name, iter(known)) == expected
    assert hint(name, iter(known)) == (f"; did you mean {expected!r}?" if expected else "")


def test_how_near_it_must_be():
    assert nearest("steps", ["step_count"], cutoff=0.5) == "step_count"
    assert nearest("steps", ["step_count"], cutoff=0.75) is None
