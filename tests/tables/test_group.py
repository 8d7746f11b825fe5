"""Fusing: which tables share a group, and what groups are called."""

import torch

from rowmesh.tables import Constant, TableSpec, fuse
from rowmesh.tables.update_rules import SGD, Adam


def table(name, **options):
    return TableSpec(**({"name": name, "num_rows": 9, "dim": 4, "optimizer": SGD()} | options))


def test_one_specification_is_one_group():
    tables = [table("a"), table("b", num_rows=5, pooling="mean"), table("c", features=("x", "y"))]
    (group,) = fuse(tables)
    assert group.tables == tuple(tables)
    assert group.features == ("a", "b", "x", "y")
    assert (group.dim, group.dtype, group.optimizer) == (4, torch.float32, SGD())
    assert not group.is_sequence


def test_every_part_of_a_specification_separates():
    others = [
        table("dim", dim=5),
        table("optimizer", optimizer=Adam()),
        table("lr", optimizer=SGD(lr=0.5)),
        table("initializer", initializer=Constant()),
        table("dtype", dtype=torch.bfloat16),
        table("sequence", pooling="none"),
    ]
    groups = fuse([table("a"), *others, table("b")])
    assert [[member.name for member in group.tables] for group in groups] == [
        ["a", "b"],
        ["dim"],
        ["optimizer"],
        ["lr"],
        ["initializer"],
        ["dtype"],
        ["sequence"],
    ]
    assert [group.name for group in groups] == [
        "dim4_sgd",
        "dim5_sgd",
        "dim4_adam",
        "dim4_sgd_2",
        "dim4_sgd_3",
        "dim4_sgd_bfloat16",
        "dim4_sgd_sequence",
    ]
    assert groups[-1].is_sequence
