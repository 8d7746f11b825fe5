"""Every configuration trains the same model: rowmesh against plain torch, and the transports against each other.

Tolerances are DESIGN's: another world size than the reference's one process sums in another order, so results are
equal to 1e-6 relative in fp32 and 1e-12 in fp64, relative to the largest element of a tensor, or to the size of the
gradients here where that is larger (a sum that cancels is not exact to its own size). Long sums are left to fp64: in
fp32 those of plain torch are themselves further off than this. Rows in bf16 are rounded to 8 bits after each step, so a
difference in the last bit of fp32 may come out as one unit of bf16. Transports are equal to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.mesh import Mesh
from rowmesh.tables import Constant, Normal, Uniform
from tests.support.scenario import Scenario
from tests.support.tables import OPTIMIZERS, several, table
from tests.support.training import Trained, merged, train, train_reference

GRADIENT_SIZE = 0.1
RELATIVE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2.0**-7}


def on_ranks(ranks, scenario: Scenario, transport: str) -> list[Trained]:
    if scenario.world_size == 1:
        return [train(Mesh(), scenario, transport)]
    return ranks.run(train, scenario, transport, world_size=scenario.world_size)


def assert_close(scenario: Scenario, actual: Trained, expected: Trained):
    rounding = max(RELATIVE[spec.dtype] for spec in scenario.tables)
    torch.testing.assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), rtol=rounding, atol=rounding)
    for mine, theirs in zip(actual.head + actual.outputs, expected.head + expected.outputs, strict=True):
        assert_near(mine, theirs, rounding, "dense layers and vectors")
    for spec in scenario.tables:
        tolerance = RELATIVE[spec.dtype]
        assert_near(actual.rows[spec.name], expected.rows[spec.name], tolerance, f"rows of {spec}")
        for name, tensor in actual.state[spec.name].items():
            assert_near(tensor, expected.state[spec.name][name], tolerance, f"{name} of {spec}")


def assert_near(mine, theirs, tolerance, what):
    assert mine.shape == theirs.shape
    if mine.numel():
        difference = float((mine.double() - theirs.double()).abs().max())
        bound = tolerance * max(float(theirs.abs().max()), GRADIENT_SIZE)
        assert difference <= bound, f"{what}: differ by {difference:.3g}, more than {bound:.3g}"


def assert_same_bits(mine: Trained, theirs: Trained):
    assert mine.losses == theirs.losses
    assert mine.owned == theirs.owned
    tensors = [*mine.outputs, *mine.head, *mine.rows.values(), *(t for s in mine.state.values() for t in s.values())]
    others = [
        *theirs.outputs,
        *theirs.head,
        *theirs.rows.values(),
        *(t for s in theirs.state.values() for t in s.values()),
    ]
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def check(ranks, scenario: Scenario) -> None:
    """A job equals the reference, whatever the transport, and the transports equal each other to the bit."""
    reference = train_reference(scenario)
    if scenario.world_size == 1:
        assert_close(scenario, merged(scenario, on_ranks(ranks, scenario, "auto")), reference)
        return
    one_sided = on_ranks(ranks, scenario, "one_sided")
    assert {part.transport for part in one_sided} == {"one_sided"}
    assert_close(scenario, merged(scenario, one_sided), reference)
    collective = on_ranks(ranks, scenario, "collective")
    assert {part.transport for part in collective} == {"collective"}
    for mine, theirs in zip(one_sided, collective, strict=True):
        assert_same_bits(mine, theirs)


HARD = {
    "one rank": Scenario(tables=several("sgd"), batch_sizes=(6,)),
    "two ranks": Scenario(tables=several("row_wise_adagrad")),
    "three ranks": Scenario(tables=several("adagrad"), batch_sizes=(2, 5, 3)),
    "four ranks": Scenario(tables=several("adam"), batch_sizes=(4, 1, 3, 2)),
    "fewer rows than ranks": Scenario(tables=(table("a", 1), table("b", 2), table("c", 3)), batch_sizes=(2, 2, 2, 2)),
    "a rank without samples": Scenario(tables=several("adam"), batch_sizes=(0, 4)),
    "samples on one rank only": Scenario(tables=several("row_wise_adagrad"), batch_sizes=(0, 0, 5, 0)),
    "no samples at all": Scenario(tables=several("adagrad"), batch_sizes=(0, 0)),
    "all ids equal": Scenario(tables=several("row_wise_adagrad"), batch_sizes=(9, 7), skew=1e9),
    "duplicates": Scenario(tables=(table("a", 5, 16, "adagrad"),), batch_sizes=(40, 30), bag_sizes=(1, 1)),
    "many duplicates": Scenario(
        tables=(table("a", 5, 16, "adagrad", dtype=torch.float64),), batch_sizes=(900, 700), bag_sizes=(1, 1)
    ),
    "one id a bag": Scenario(tables=several("sgd"), bag_sizes=(1, 1)),
    "fixed bags": Scenario(tables=several("row_wise_adagrad"), bag_sizes=(4, 4)),
    "fixed bags, weights": Scenario(tables=several("row_wise_adagrad"), bag_sizes=(2, 2), is_weighted=True),
    "empty bags only": Scenario(tables=several("adagrad"), bag_sizes=(0, 0)),
    "weights": Scenario(tables=several("adam"), is_weighted=True),
    "long bags": Scenario(tables=several("sgd", torch.float64), bag_sizes=(0, 40)),
    "accumulation": Scenario(tables=several("adam"), accumulate=3),
    "schedule": Scenario(tables=several("row_wise_adagrad"), decay=0.5, num_steps=5),
    "evaluation between steps": Scenario(tables=several("adam"), evaluates=True),
    "skew": Scenario(tables=(table("a", 100_000, 16, "row_wise_adagrad"),), batch_sizes=(300, 200), skew=6.0),
    "one element a row": Scenario(tables=(table("a", 20, 1, "sgd"),)),
    "only sequences": Scenario(tables=(table("a", 20, 3, "adam", pooling="none"),), is_weighted=True),
    "constant": Scenario(tables=(table("a", 20, 3, "sgd", initializer=Constant(value=0.25)),)),
    "bf16": Scenario(tables=several("row_wise_adagrad", torch.bfloat16), batch_sizes=(3, 2)),
    "bf16 and fp32": Scenario(tables=(*several("adam"), table("b", 9, 3, "adagrad", dtype=torch.bfloat16))),
    "fp64, four ranks": Scenario(tables=several("adam", torch.float64), batch_sizes=(4, 0, 3, 2), is_weighted=True),
    "many groups": Scenario(tables=tuple(table(f"t{i}", 10 + i, 3, name) for i, name in enumerate([*OPTIMIZERS] * 2))),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_configurations(ranks, name):
    check(ranks, HARD[name])


@st.composite
def scenarios(draw, dims=(3, 16)):
    """Jobs; kernels are compiled for every dim."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    tables = []
    for index in range(draw(st.integers(1, 5))):
        names = tuple(f"f{index}{letter}" for letter in "xyz"[: draw(st.integers(1, 3))])
        tables.append(
            table(
                f"t{index}",
                draw(st.sampled_from([1, 2, 5, 30, 9000])),
                draw(st.sampled_from(dims)),
                draw(st.sampled_from(list(OPTIMIZERS))),
                features=names,
                pooling=draw(st.sampled_from(["sum", "mean", "none"])),
                initializer=draw(st.sampled_from([Uniform(bound=1.0), Normal(std=0.5), Uniform()])),
                dtype=dtype,
            )
        )
    world_size = draw(st.sampled_from([1, 2, 3, 4]))
    fewest = draw(st.integers(0, 2))
    largest = 40 if dtype == torch.float64 else 4
    return Scenario(
        tables=tuple(tables),
        batch_sizes=tuple(draw(st.lists(st.integers(0, largest), min_size=world_size, max_size=world_size))),
        bag_sizes=(fewest, fewest + draw(st.integers(0, 2))),
        skew=draw(st.sampled_from([1.0, 3.0, 1e9])),
        is_weighted=draw(st.booleans()),
        num_steps=draw(st.integers(1, 4)),
        accumulate=draw(st.sampled_from([1, 1, 2])),
        decay=draw(st.sampled_from([1.0, 0.7])),
        evaluates=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=8)
@given(scenario=scenarios())
def test_random_configurations(ranks, scenario):
    check(ranks, scenario)


@pytest.mark.slow
@settings(max_examples=200)
@given(scenario=scenarios(dims=(1, 3, 16)))
def test_many_random_configurations(ranks, scenario):
    check(ranks, scenario)


@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_the_same_mesh_repeats_to_the_bit(ranks, transport):
    scenario = Scenario(tables=several("adam"), batch_sizes=(40, 30), skew=3.0, accumulate=2)
    for mine, theirs in zip(on_ranks(ranks, scenario, transport), on_ranks(ranks, scenario, transport), strict=True):
        assert_same_bits(mine, theirs)


def test_the_sum_over_ranks_has_the_order_of_the_ranks(ranks):
    """Rank order is part of the promise: one rank that sums the ranks' gradients in order gives the same bits."""
    scenario = Scenario(
        tables=(table("a", 1, 16, "sgd", initializer=Constant()),),
        batch_sizes=(1, 1, 1, 1),
        bag_sizes=(1, 1),
        num_steps=1,
    )
    rows = on_ranks(ranks, scenario, "one_sided")[0].rows["a"]
    gradients = ranks.run(gradient_of_a_bag, scenario, world_size=4)
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    assert torch.equal(rows, -(OPTIMIZERS["sgd"].lr * (total * 0.25)))
    backwards = gradients[3] + gradients[2] + gradients[1] + gradients[0]
    assert not torch.equal(backwards, total), "the example cannot distinguish orders"


def gradient_of_a_bag(mesh, scenario):
    """The gradient of the only row that a rank's sample gives, by autograd alone."""
    from tests.support.training import Head

    vectors = torch.zeros(1, 16, requires_grad=True)
    labels = scenario.local_batch(0, 0, mesh.rank).labels
    loss = torch.nn.functional.binary_cross_entropy_with_logits(Head(scenario)(vectors), labels, reduction="sum")
    (loss * mesh.world_size / scenario.global_batch).backward()
    return vectors.grad


def test_world_sizes_start_from_the_same_rows(ranks):
    """Initial values are a function of (seed, table, row): to the bit the same on 1, 2, 3 and 4 ranks."""
    tables = (*several("sgd"), table("bf", 33, 3, "sgd", dtype=torch.bfloat16))
    starts = []
    for world_size in (1, 2, 3, 4):
        scenario = Scenario(tables=tables, batch_sizes=(1,) * world_size, num_steps=0, seed=5)
        starts.append(merged(scenario, on_ranks(ranks, scenario, "auto")).rows)
    for name in starts[0]:
        assert all(torch.equal(start[name], starts[0][name]) for start in starts[1:])
    other = replace(scenario, seed=6, batch_sizes=(1,))
    assert not torch.equal(merged(other, on_ranks(ranks, other, "auto")).rows["user"], starts[0]["user"])
