"""Dynamic tables on real ranks against the rules in plain Python and dense rows, to the bit."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, given, settings

from rowmesh.mesh import Mesh
from rowmesh.tables import Dynamic
from tests.support.dynamic import Stream, assert_same, run_dynamic, run_oracle, run_pipeline
from tests.support.dynamic_streams import LOOKED_AT, streams
from tests.support.pipelines import late_on_odd_ranks

RULES = {
    "lru": Dynamic(capacity=40, shards=4),
    "one shard": Dynamic(capacity=40, shards=1, eviction="lfu"),
    "lfu": Dynamic(capacity=60, shards=5, eviction="lfu", decay_steps=3),
    "both": Dynamic(capacity=60, shards=3, eviction="lru_lfu", admit_after=2),
    "window": Dynamic(capacity=60, shards=3, admit_after=3, window_steps=4),
    "sketch": Dynamic(capacity=60, shards=2, admit_after=3, sketch_width=5, sketch_depth=2, window_steps=5),
    "ttl": Dynamic(capacity=400, shards=4, eviction="ttl", ttl_steps=2),
    "score": Dynamic(capacity=60, shards=3, eviction="score"),
    "seconds": Dynamic(capacity=60, shards=3, ttl_seconds=12),
}
SLOW = [pytest.param(4, 20, marks=pytest.mark.slow)]


STREAMS = streams(RULES, num_steps=st.integers(1, 7), batch_size=st.integers(0, 3), **LOOKED_AT)


def pipelines():
    """Depth and micro-batches."""
    return st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 2]))


def in_parts(stream, parts):
    """Such that the sums of gradients are exact, in whatever parts they are added."""
    pooling = "sum" if stream.pooling == "mean" else stream.pooling
    return replace(stream, is_linear=parts > 1, pooling=pooling if parts > 1 else stream.pooling)


def at_the_end(seen):
    return [replace(each, known=each.known[-1:]) for each in seen]


@settings(max_examples=12, deadline=None)
@given(stream=STREAMS)
def test_one_rank_does_as_the_rules_say(stream):
    assume(stream.fits(1))
    assert_same([run_dynamic(Mesh(), stream)], [run_oracle(Mesh(), stream)])


@settings(max_examples=12, deadline=None)
@given(stream=STREAMS, pipeline=pipelines())
def test_a_pipeline_on_one_rank_does_as_the_rules_say(stream, pipeline):
    stream = in_parts(stream, pipeline[1])
    assume(stream.fits(1))
    mine = run_pipeline(Mesh(), stream, "auto", *pipeline)
    assert_same([mine], [run_oracle(Mesh(), stream, every_step=False)])


@pytest.mark.parametrize("world_size, examples", [(2, 4), (3, 4), *SLOW])
def test_ranks_do_as_the_rules_say(ranks, world_size, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(stream=STREAMS, pipeline=pipelines())
    def check(stream, pipeline):
        stream = in_parts(stream, pipeline[1])
        assume(stream.fits(world_size))
        expected = ranks.run(run_oracle, stream, world_size=world_size)
        for transport in ("collective", "one_sided"):
            seen = ranks.run(run_dynamic, stream, transport, world_size=world_size)
            assert {each.transport for each in seen} == {transport}
            assert_same(seen, expected)
            seen = ranks.run(run_pipeline, stream, transport, *pipeline, world_size=world_size)
            assert_same(seen, at_the_end(expected))

    check()


@pytest.mark.parametrize("world_size, examples", [(2, 4), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_exact_replicas_know_the_same(ranks, world_size, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(stream=STREAMS, pipeline=pipelines(), transport=st.sampled_from(["collective", "auto"]))
    def check(stream, pipeline, transport):
        stream = in_parts(stream, pipeline[1])
        assume(stream.fits(world_size))
        expected = ranks.run(run_oracle, stream, 2, world_size=world_size)  # which adds gradients up in the same order
        assert_same(ranks.run(run_dynamic, stream, transport, 2, world_size=world_size), expected, replicas=2)
        seen = ranks.run(run_pipeline, stream, transport, *pipeline, 2, world_size=world_size)
        assert_same(seen, at_the_end(expected), replicas=2)

    check()


@pytest.mark.parametrize("depth", [0, 2])
def test_ranks_whose_replicas_send_late_look_up_alike(ranks, depth):
    """A look-up beside a pipeline, when some ranks have sent their messages and others have not."""
    rules = (("user", RULES["lru"]), ("item", RULES["lfu"]))
    stream = Stream(rules=rules, seed=3, num_steps=3, batch_size=2, evaluates=True)
    expected = ranks.run(run_oracle, stream, 2, world_size=4)
    seen = ranks.run(run_pipeline, stream, "one_sided", depth, 1, 2, late_on_odd_ranks, world_size=4)
    assert_same(seen, at_the_end(expected), replicas=2)
