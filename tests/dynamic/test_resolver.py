"""Dynamic tables on real ranks against the rules in plain Python and dense rows, to the bit."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from rowmesh.mesh import Mesh
from rowmesh.tables import Dynamic
from tests.support.dynamic import Stream, assert_same, run_dynamic, run_oracle

RULES = {
    "lru": Dynamic(capacity=40, shards=4),
    "one shard": Dynamic(capacity=40, shards=1, eviction="lfu"),
    "lfu": Dynamic(capacity=60, shards=5, eviction="lfu", decay_steps=3),
    "both": Dynamic(capacity=60, shards=3, eviction="lru_lfu", admit_after=2),
    "window": Dynamic(capacity=60, shards=3, admit_after=3, window_steps=4),
    "sketch": Dynamic(capacity=60, shards=2, admit_after=3, sketch_width=5, sketch_depth=2, window_steps=5),
    "ttl": Dynamic(capacity=400, shards=4, eviction="ttl", ttl_steps=2),
}


def streams():
    rules = st.sampled_from(sorted(RULES))
    return st.builds(
        lambda first, second, **options: Stream(rules=(("user", RULES[first]), ("item", RULES[second])), **options),
        rules,
        rules,
        seed=st.integers(0, 2**16),
        num_steps=st.integers(1, 7),
        batch_size=st.integers(0, 3),
        rule=st.sampled_from(["row_wise_adagrad", "adam", "sgd"]),
        evaluates=st.booleans(),
    )


@settings(max_examples=12, deadline=None)
@given(stream=streams())
def test_one_rank_does_as_the_rules_say(stream):
    assert_same([run_dynamic(Mesh(), stream)], [run_oracle(Mesh(), stream)])


@pytest.mark.parametrize("world_size", [2, 3])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stream=streams())
def test_ranks_do_as_the_rules_say(ranks, world_size, stream):
    expected = ranks.run(run_oracle, stream, world_size=world_size)
    for transport in ("collective", "one_sided"):
        seen = ranks.run(run_dynamic, stream, transport, world_size=world_size)
        assert {each.transport for each in seen} == {transport}
        assert_same(seen, expected)
