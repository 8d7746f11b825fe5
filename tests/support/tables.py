"""Tables to train, with optimizers whose results can be compared.

AdaGrad and Adam divide by the size of a gradient: where the gradients of a row cancel, they blow the rounding of the
sum up to the size of a whole step. Their eps is chosen here so that it does not, which hides nothing else.
"""

from __future__ import annotations

import torch

from rowmesh.tables import Normal, TableSpec, Uniform
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad

OPTIMIZERS = {
    "sgd": SGD(lr=0.3),
    "adagrad": AdaGrad(lr=0.1, eps=0.1),
    "row_wise_adagrad": RowWiseAdaGrad(lr=0.1, eps=0.1, initial_accumulator=0.01),
    "adam": Adam(lr=0.05, eps=0.1),
}


def table(name, num_rows, dim=3, rule="sgd", **options):
    """A table whose rows do not start too small to see."""
    options.setdefault("initializer", Uniform(bound=1.0))
    return TableSpec(name=name, num_rows=num_rows, dim=dim, optimizer=OPTIMIZERS[rule], **options)


def several(rule, dtype=torch.float32):
    """Two groups, a shared table, every pooling, a table with fewer rows than ranks."""
    return (
        table("user", 50, 3, rule, features=("user", "friend"), dtype=dtype),
        table("tag", 7, 3, rule, pooling="mean", dtype=dtype),
        table("day", 1, 3, rule, dtype=dtype),
        table("item", 200, 16, rule, dtype=dtype, initializer=Normal(std=0.5)),
        table("history", 40, 16, rule, pooling="none", dtype=dtype, initializer=Normal(std=0.5)),
    )
