"""CUDA graphs of the dense network: all its kernels are launched at once, forward and backward.

The recording itself is torch's (`torch.cuda.make_graphed_callables`), which warms up on a stream of its own. Here is
what of training goes through it. It has not run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.run.config import Config

logger = logging.getLogger("rowmesh")
Network = Callable[[Tensor, Tensor], Tensor]


class GraphedNetwork:
    """A dense network that is recorded with the first batch and replayed for all batches of its size.

    Batches of another size (the last of an epoch), and whatever is computed without gradients, go through the network
    itself. Parameters are the same ones: an optimizer updates them in place, where graphs find them, and gradients are
    added to those that are there, so that the buffer of `SharedGradients` fits.

    Logits, and the gradient of the vectors, lie in memory of the graphs, which the next batch overwrites: the backward
    of a batch comes before the forward of the next one, as it does in the training loop.

    Args:
        network: takes dense features `[B, …]` and vectors `[B, F, D]`.
        record: makes a graphed network of a module and samples of its arguments.
    """

    def __init__(self, network: nn.Module, record: Callable[..., Any] | None = None) -> None:
        self._network = network
        self._record: Callable[..., Any] = record or torch.cuda.make_graphed_callables
        self._graphed: Network | None = None
        self._shapes: tuple[torch.Size, torch.Size] | None = None

    def __call__(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Logits `[B]`.

        Raises:
            RowmeshError: the network cannot be recorded.
        """
        if not torch.is_grad_enabled() or not len(dense):
            return self._network(dense, vectors)
        if self._graphed is None:
            self._graphed, self._shapes = self._recorded(dense, vectors), (dense.shape, vectors.shape)
        network = self._graphed if (dense.shape, vectors.shape) == self._shapes else self._network
        return network(dense, vectors)

    def _recorded(self, dense: Tensor, vectors: Tensor) -> Network:
        # Graphs keep these tensors and copy every batch into them. Only the vectors get a gradient.
        samples = dense.detach().clone(), vectors.detach().clone().requires_grad_()
        try:
            graphed = self._record(_Whole(self._network), samples)
        except RuntimeError as error:
            raise RowmeshError(
                f"the dense network cannot be recorded as CUDA graphs, set train.cuda_graphs=off: {error}"
            ) from error
        logger.info("dense network: CUDA graphs for %d samples; batches of other sizes go without", len(dense))
        return graphed


class _Whole(nn.Module):
    """The network in another module: torch replaces the forward of the one it records, and the network's is needed."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """As the network's."""
        return self.network(dense, vectors)


def training_network(network: nn.Module, config: Config) -> Network:
    """The network that computes logits in training: the given network, or CUDA graphs of it."""
    return GraphedNetwork(network) if config.train.cuda_graphs == "on" else network


def check_graphs(config: Config) -> None:
    """Raises ConfigurationError where CUDA graphs were asked for and cannot be."""
    if config.train.cuda_graphs == "off":
        return
    tables = config.tables.sections
    obstacle = None
    if config.train.device == "cpu":
        obstacle = "needs train.device=cuda: it records what a GPU does"
    elif not torch.cuda.is_available():
        obstacle = "needs a GPU, and torch.cuda.is_available() is false: interpreted kernels cannot be recorded"
    elif not config.pipeline.is_off:
        obstacle = "cannot be combined with a pipeline, whose threads use the GPU while it is recorded"
    elif not config.model.is_dlrm:
        obstacle = f"records dlrm alone, and model.name is {config.model.name}"
    elif len({table.dim for table in tables}) > 1:
        obstacle = "records dlrm over tables of one dim alone, and the configuration has several"
    elif any(table.caches_rows for table in tables):
        obstacle = "cannot be combined with tiered tables, whose threads use the GPU while it is recorded"
    if obstacle:
        raise ConfigurationError(f"train.cuda_graphs=on {obstacle}; change that, or set train.cuda_graphs=off")
