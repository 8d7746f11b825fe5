"""Ids that are demoted come back to the bit, on real ranks, against the rules in plain Python and dense rows."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings

from rowmesh.mesh import Mesh
from rowmesh.tables import Dynamic
from tests.exchange.resolve.test_resolver import at_the_end, in_parts, pipelines
from tests.support.dynamic import assert_same, run_dynamic, run_oracle, run_pipeline
from tests.support.dynamic_streams import LOOKED_AT, streams

DEMOTE = {"mode": "demote", "store": "memory", "store_capacity": 1000}
RULES = {
    "lru": Dynamic(capacity=24, shards=2, **DEMOTE),
    "one shard": Dynamic(capacity=20, shards=1, eviction="lfu", **DEMOTE),
    "lfu": Dynamic(capacity=36, shards=3, eviction="lfu", decay_steps=3, **DEMOTE),
    "both": Dynamic(capacity=16, shards=2, eviction="lru_lfu", admit_after=2, **DEMOTE),
    "window": Dynamic(capacity=16, shards=1, admit_after=2, window_steps=4, **DEMOTE),
    "sketch": Dynamic(capacity=16, shards=1, admit_after=2, sketch_width=5, sketch_depth=2, window_steps=5, **DEMOTE),
    "ttl": Dynamic(capacity=400, shards=4, eviction="ttl", ttl_steps=2, **DEMOTE),
    "ttl too": Dynamic(capacity=30, shards=2, ttl_steps=2, **DEMOTE),
    "seconds": Dynamic(capacity=30, shards=2, ttl_seconds=12, **DEMOTE),
    "forgetting": Dynamic(capacity=24, shards=2, **{**DEMOTE, "store_capacity": 12}),
    "forgetting much": Dynamic(capacity=18, shards=1, eviction="lfu", **{**DEMOTE, "store_capacity": 2}),
    "score": Dynamic(capacity=24, shards=2, eviction="score", admit_after=2, **DEMOTE),
    "dropping": Dynamic(capacity=24, shards=2),
}


STREAMS = streams(RULES, **LOOKED_AT)


@settings(max_examples=8, deadline=None)
@given(stream=STREAMS)
def test_one_rank_does_as_the_rules_say(stream):
    assume(stream.fits(1))
    assert_same([run_dynamic(Mesh(), stream)], [run_oracle(Mesh(), stream)])


@settings(max_examples=8, deadline=None)
@given(stream=STREAMS, pipeline=pipelines())
def test_a_pipeline_on_one_rank_does_as_the_rules_say(stream, pipeline):
    stream = in_parts(stream, pipeline[1])
    assume(stream.fits(1))
    mine = run_pipeline(Mesh(), stream, "auto", *pipeline)
    assert_same([mine], [run_oracle(Mesh(), stream, every_step=False)])


SLOW = [pytest.param(2, 25, marks=pytest.mark.slow), pytest.param(3, 25, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world_size, examples", [(2, 2), (3, 2), *SLOW])
def test_ranks_do_as_the_rules_say(ranks, world_size, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(stream=STREAMS, pipeline=pipelines())
    def check(stream, pipeline):
        stream = in_parts(replace(stream, batch_size=min(stream.batch_size, 2)), pipeline[1])
        assume(stream.fits(world_size))
        expected = ranks.run(run_oracle, stream, world_size=world_size)
        for transport in ("collective", "one_sided"):
            seen = ranks.run(run_dynamic, stream, transport, world_size=world_size)
            assert {each.transport for each in seen} == {transport}
            assert_same(seen, expected)
            seen = ranks.run(run_pipeline, stream, transport, *pipeline, world_size=world_size)
            assert_same(seen, at_the_end(expected))

    check()
