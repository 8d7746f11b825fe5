"""Random streams for dynamic tables, by hypothesis."""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis.strategies as st

from rowmesh.tables import Dynamic
from tests.support.dynamic import Stream

LOOKED_AT = {
    "evaluates": st.booleans(),
    "missing": st.sampled_from(["initial", "zero", "error"]),
    "pooling": st.sampled_from(["sum", "mean", "none"]),
    "is_hooked": st.booleans(),
}
"""What changes no decision."""


def streams(rules: Mapping[str, Dynamic], **options: st.SearchStrategy) -> st.SearchStrategy[Stream]:
    """Streams of two tables whose rules are among these."""
    names = st.sampled_from(sorted(rules))
    common = {
        "seed": st.integers(0, 2**16),
        "num_steps": st.integers(3, 8),
        "batch_size": st.integers(1, 3),
        "rule": st.sampled_from(["row_wise_adagrad", "adam", "sgd"]),
    }
    return st.builds(
        lambda first, second, **options: Stream(rules=(("user", rules[first]), ("item", rules[second])), **options),
        names,
        names,
        **(common | options),
    )
