"""Where a run computes: the CPU, or a GPU for each rank."""

from __future__ import annotations

import os

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.run.config import Config, PipelineConfig
from rowmesh.run.graphs import check_graphs


def check_device(config: Config) -> None:
    """Raises ConfigurationError where something needs rows in the host's memory and they are to be on a GPU."""
    check_graphs(config)
    if config.train.device == "cpu":
        return
    obstacles = _pipeline_obstacles(config.pipeline)
    if obstacles:
        raise ConfigurationError(
            f"train.device={config.train.device!r} cannot be combined with {' and '.join(obstacles)} yet; change that, "
            "or set train.device=cpu"
        )


def _pipeline_obstacles(config: PipelineConfig) -> list[str]:
    """The options of a pipeline that need rows in the host's memory."""
    obstacles = ["pipeline.exchange=naive (use delta or unsplit)"] if config.exchange == "naive" else []
    return [*obstacles, "pipeline.verify"] if config.verify else obstacles


def use_device(config: Config) -> str:
    """Makes a GPU this rank's current one, if it is to use any: ranks of a host take one after the other.

    Returns:
        The device for an `EmbeddingCollection`.
    """
    if config.train.device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return config.train.device
