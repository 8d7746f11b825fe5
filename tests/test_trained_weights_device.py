"""Weights of ids that are trained, with rows on a device: what rows on the CPU train."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rowmesh.mesh import Mesh
from rowmesh.tables import Tiers
from tests.collection.test_equivalence import assert_close
from tests.support.devices import READ, train_on_device
from tests.support.plans import with_copies
from tests.support.scenario import Scenario
from tests.support.tables import several, table
from tests.support.training import merged, train
from tests.support.triton import kernels_of
from tests.test_tensor_train_tables import cored

pytestmark = pytest.mark.triton
kernels_of("weigh")  # or all are skipped

FEW = (table("user", 20, 3, "adagrad", pooling="mean"), table("seen", 9, 4, "adagrad", pooling="none"))
ONE_RANK = {
    "every pooling": Scenario(tables=several("sgd"), batch_sizes=(3,), num_steps=2),
    "fixed bags, float64, weights of their own too": Scenario(
        tables=several("adam", torch.float64), batch_sizes=(3,), bag_sizes=(2, 2), is_weighted=True, num_steps=2
    ),
    "several backwards a step": Scenario(tables=FEW, batch_sizes=(3,), accumulate=2, num_steps=2, evaluates=True),
    "no samples": Scenario(tables=FEW, batch_sizes=(0,), num_steps=1),
    "tensor-train tables": Scenario(
        tables=(*FEW[:1], cored("page", 30, 3, "adagrad"), cored("word", 30, 4, "adagrad", pooling="none")),
        batch_sizes=(3,),
        num_steps=2,
    ),
}
TWO_RANKS = {
    "bags": Scenario(tables=FEW, num_steps=2),
    "copies": Scenario(tables=FEW, num_steps=2, plan=with_copies(FEW, 2)),
}


@pytest.mark.parametrize("name", ONE_RANK)
def test_trains_the_same_model(name):
    scenario = replace(ONE_RANK[name], trains_weights=True)
    assert_close(scenario, train(Mesh(), scenario, device="cuda"), train(Mesh(), scenario))


def test_tiered_tables():
    scenario = Scenario(tables=FEW, batch_sizes=(3,), num_steps=2, trains_weights=True)
    tiers = Tiers(fast_share=0.001, fast_rows=20, verify=True, poison=True, timeout_s=20.0)
    tables = tuple(replace(each, storage="tiered") for each in FEW)
    tiered = train(Mesh(), replace(scenario, tables=tables, tiers=tiers), device="cuda")
    assert_close(scenario, tiered, train(Mesh(), scenario))


@READ
@pytest.mark.parametrize("transport", ["auto", "one_sided"])
@pytest.mark.parametrize("name", TWO_RANKS)
def test_trains_the_same_model_on_two_ranks(ranks, name, transport):
    scenario = replace(TWO_RANKS[name], trains_weights=True)
    found = merged(scenario, train_on_device(ranks, scenario, transport))
    assert_close(scenario, found, merged(scenario, ranks.run(train, scenario, "collective")))
