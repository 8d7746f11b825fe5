"""Memory of a run's dense network on every rank, estimated before the run allocates it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rowmesh.data.data_set import DataSet
from rowmesh.models import DLRM
from rowmesh.run.config import Config, OptimizerConfig, chosen
from rowmesh.run.networks import make_network, network_dtype, own_model, takes_vectors
from rowmesh.run.tables import table_specs

_STATES = {"adam": 2, "adagrad": 1, "sgd": 0}
"""Numbers that optimizers keep for every parameter; sgd with momentum keeps one."""

_SUMMED = 4
"""Vectors as long as all gradients that averaging takes, on one host; about as many between hosts."""


def network_bytes(config: Config, data: DataSet, world_size: int, *, trains: bool) -> int:
    """Parameters, gradients and optimizer state, and about what a batch leaves in the network for its gradients.

    A model that takes vectors by feature is made to be counted, and what a batch leaves in it is not known.

    Args:
        config: of the run.
        data: whose features the network has.
        world_size: ranks that share a batch.
        trains: whether there are gradients and an optimizer, or parameters alone.
    """
    parameters, outputs = _sizes(config, data)
    itemsize = network_dtype(table_specs(config.tables, data)).itemsize
    if not trains:
        return itemsize * parameters
    samples = -(-chosen(config.data.batch_size) // world_size)
    copies = 2 + _states(config.optimizer) + (_SUMMED if world_size > 1 else 0)
    return itemsize * (copies * parameters + samples * outputs)


def _sizes(config: Config, data: DataSet) -> tuple[int, int]:
    """Parameters, and numbers that a sample makes."""
    tables = table_specs(config.tables, data)
    if takes_vectors(config, tables):
        network = own_model(config, data, tables).network
        return sum(parameter.numel() for parameter in network.parameters()), 0
    with without_memory():
        network = make_network(config, data)
    return sum(parameter.numel() for parameter in network.parameters()), _outputs(network)


@contextmanager
def without_memory() -> Iterator[None]:
    """Has networks made without memory, and without drawing weights: for that torch would load its compiler."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _states(optimizer: OptimizerConfig) -> int:
    return 1 if optimizer.name == "sgd" and optimizer.momentum else _STATES[optimizer.name]


def _outputs(network: DLRM) -> int:
    """Numbers that a sample makes: of every layer, the vectors, and their products."""
    num_vectors = network.num_features + 1
    layers = sum(network.bottom_widths) + sum(network.top_widths)
    return layers + 2 * num_vectors * network.dim + num_vectors**2
