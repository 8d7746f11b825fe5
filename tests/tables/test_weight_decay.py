"""Weight decay of rows: plain torch on the rows that a step touches, wherever rows are and however they travel."""

import re
from dataclasses import replace

import pytest
import torch

from rowmesh import EmbeddingCollection, TableSpec
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.ops.merge_update import Singles, update
from rowmesh.run.resolve import resolve
from rowmesh.run.tables import update_rule
from rowmesh.tables import Tiers, fuse
from rowmesh.tables.update_rules import RULES, SGD, AdaGrad, Adam
from rowmesh.tensor_train import TensorTrainEmbeddingBag, TensorTrainOptimizer
from tests.collection.test_equivalence import assert_close, assert_same_bits, on_ranks
from tests.support.plans import in_groups, with_copies
from tests.support.scenario import Scenario
from tests.support.tables import several
from tests.support.training import merged, train, train_reference
from tests.support.triton import kernels_of

DECAY = 0.2
TORCH = {
    "sgd": lambda rows: torch.optim.SGD([rows], lr=0.1, weight_decay=DECAY),
    "adagrad": lambda rows: torch.optim.Adagrad([rows], lr=0.1, weight_decay=DECAY),
    "adam": lambda rows: torch.optim.AdamW([rows], lr=0.1, weight_decay=DECAY),
}


def decaying(rule, dtype=torch.float64, **options):
    return tuple(
        replace(table, optimizer=replace(table.optimizer, weight_decay=DECAY), **options)
        for table in several(rule, dtype)[:3]  # one group
    )


def changed(rule, rows, gradients, steps=3):
    """The rows after some steps of the kernels that a CPU has."""
    rows, dims = rows.clone(), {"row": rows.shape[:1], "element": rows.shape}
    state = [
        torch.full(dims[extent], rule.initial_state[name], dtype=rows.dtype) for name, extent in rule.state.items()
    ]
    slots, singles = torch.arange(len(rows), dtype=torch.int32), Singles()
    for step in range(1, steps + 1):
        singles(slots.data_ptr(), gradients.data_ptr(), gradients[0].nbytes, len(rows))
        update(rows, state, singles, rule.name, rule.numbers(0.1, 1.0, step))
    return rows


@pytest.mark.parametrize("name", TORCH)
def test_rows_that_every_step_touches_are_those_of_torch(name):
    generator = torch.Generator().manual_seed(0)
    rows, gradients = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(rows.clone())
    optimizer = TORCH[name](parameter)
    for _ in range(3):
        parameter.grad = gradients.clone()
        optimizer.step()
    found = changed(RULES[name](weight_decay=DECAY), rows, gradients)
    torch.testing.assert_close(found, parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_no_decay_is_the_plain_rule_to_the_bit(name):
    """Rows that are not finite would tell: 0 · inf is not 0."""
    rows, gradients = torch.full((4, 3), -0.0), torch.zeros(4, 3)
    rows[1] = torch.inf
    plain, zero = RULES[name](lr=0.1, **({} if name == "sgd" else {"eps": 1.0})), {"weight_decay": 0.0}
    assert replace(plain, **zero) == plain
    assert len(plain.numbers(0.1, 1.0, 1)) == 6
    found = changed(replace(plain, **zero), rows, gradients)
    assert torch.equal(found, rows)
    assert found[0].signbit().all()


@pytest.mark.parametrize("rule", RULES)
def test_ranks_train_the_reference_and_transports_agree(ranks, rule):
    scenario = Scenario(tables=decaying(rule), batch_sizes=(5, 4), num_steps=3, decay=0.7, accumulate=2)
    expected = train_reference(scenario)
    plain = train_reference(replace(scenario, tables=several(rule, torch.float64)))
    assert not torch.allclose(expected.rows["user"], plain.rows["user"], rtol=1e-3)
    one_sided, collective = (on_ranks(ranks, scenario, transport) for transport in ("one_sided", "collective"))
    assert_close(scenario, merged(scenario, one_sided), expected)
    for mine, theirs in zip(one_sided, collective, strict=True):
        assert_same_bits(mine, theirs)
    pipelined = replace(scenario, accumulate=1)
    in_turn = on_ranks(ranks, pipelined, "collective")
    for mine, theirs in zip(
        on_ranks(ranks, replace(pipelined, pipeline={"depth": 2}), "collective"), in_turn, strict=True
    ):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("rule", ["row_wise_adagrad", "adam"])
def test_micro_batches_copies_and_replicas_decay_a_row_once(ranks, rule):
    options = {"depth": 1, "micro_batches": 3, "verify": True}
    tables = decaying(rule)
    scenario = Scenario(tables=tables, batch_sizes=(4, 3, 5, 2), num_steps=3, sharing="hot")
    expected = train_reference(scenario)
    copied = replace(scenario, plan=with_copies(tables, world_size=4))
    for job in (copied, in_groups(scenario, 2), replace(copied, pipeline=options)):
        assert_close(job, merged(job, on_ranks(ranks, job, "collective")), expected)


@pytest.mark.parametrize("rule", ["row_wise_adagrad", "adam"])
def test_tiers_are_equal_to_the_bit(rule):
    scenario = Scenario(tables=decaying(rule), batch_sizes=(6,), num_steps=3)
    tiered = replace(scenario, tables=decaying(rule, storage="tiered"), tiers=Tiers(fast_rows=60, fast_share=0.3))
    assert_same_bits(train(Mesh(), tiered), train(Mesh(), scenario))


@pytest.mark.triton
@pytest.mark.parametrize("rule", ["row_wise_adagrad", "adam"])
def test_devices_train_the_same_model(rule):
    kernels_of("merge_update")
    scenario = Scenario(tables=decaying(rule, torch.float32), batch_sizes=(3,), num_steps=2)
    on_device = train(Mesh(), scenario, device="cuda")
    assert_close(scenario, on_device, train(Mesh(), scenario))
    assert_same_bits(on_device, train(Mesh(), scenario, device="cuda"))


def test_decays_are_specifications_of_their_own():
    tables = [
        TableSpec(name=f"t{decay}", num_rows=9, dim=4, optimizer=AdaGrad(weight_decay=decay)) for decay in (0.0, 0.1, 0)
    ]
    tables[2] = replace(tables[2], name="other", features=("other",))
    assert [[table.name for table in group.tables] for group in fuse(tables)] == [["t0.0", "other"], ["t0.1"]]


def test_refusals():
    for bad in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match=f"adam: weight_decay must be 0 or more and finite, got {bad}"):
            Adam(weight_decay=bad)
    with pytest.raises(ConfigurationError, match="'item': weight_decay is of the rows that a step touches"):
        TableSpec(name="item", num_rows=1000, dim=8, storage="tensor_train", optimizer=SGD(weight_decay=0.1))
    with pytest.raises(ConfigurationError, match="weight_decay of adagrad is of the rows"):
        TensorTrainOptimizer(TensorTrainEmbeddingBag(100, 8, mode="sum", rank=4), AdaGrad(weight_decay=0.1))


def test_configuration(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('data.folder = "x"\ntables.optimizer.weight_decay = 0.25\ntables.C2.optimizer.eps = 0.5')
    tables = resolve(path, ["tables.optimizer.name=adam"]).tables
    assert [update_rule(name, tables, is_cored=False).weight_decay for name in ("C1", "C2")] == [0.25, 0.25]
    with pytest.raises(ConfigurationError, match=re.escape("tables.tensor_train.optimizer without it")):
        update_rule("C2", tables, is_cored=True)


def test_ranks_compare_it(ranks):
    for message in ranks.run(make_unlike_tables):
        assert "weight_decay=0.1" in message


def make_unlike_tables(mesh):
    table = TableSpec(name="item", num_rows=20, dim=4, optimizer=SGD(weight_decay=0.1 * mesh.rank))
    with pytest.raises(ConfigurationError, match="ranks disagree") as caught:
        EmbeddingCollection([table], mesh=mesh)
    return str(caught.value)
