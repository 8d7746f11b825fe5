"""rowmesh: recommendation models whose embedding tables outgrow one device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rowmesh.checkpoint.periodic import Checkpoints
    from rowmesh.checkpoint.saving import Saving, async_save, load, save
    from rowmesh.checkpoint.sharded_state import ShardedState
    from rowmesh.collection.averaged_rows import AveragedRows
    from rowmesh.collection.joint_optimizer import JointOptimizer
    from rowmesh.collection.module import EmbeddingCollection
    from rowmesh.collection.optimizer import EmbeddingOptimizer
    from rowmesh.collection.outputs import Embeddings, JaggedRows
    from rowmesh.errors import RowmeshError
    from rowmesh.mesh import Mesh
    from rowmesh.mesh.synchronization import Synchronization
    from rowmesh.models import DotInteraction
    from rowmesh.models.linear_layers import FastLinear, fast_linear
    from rowmesh.pipeline import Pipeline
    from rowmesh.placement import Plan
    from rowmesh.run.trained_model import load_run
    from rowmesh.sparse import PositionWeights, SparseBatch
    from rowmesh.tables import Constant, Normal, TableSpec, TensorTrain, Tiers, Uniform
    from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad
    from rowmesh.tensor_train import TensorTrainEmbeddingBag, TensorTrainOptimizer

# Imported at first use: `rowmesh --help` must not wait for torch.
_EXPORTS = {
    "rowmesh.collection.averaged_rows": ("AveragedRows",),
    "rowmesh.collection.module": ("EmbeddingCollection",),
    "rowmesh.collection.outputs": ("Embeddings", "JaggedRows"),
    "rowmesh.mesh.synchronization": ("Synchronization",),
    "rowmesh.errors": ("RowmeshError",),
    "rowmesh.models.linear_layers": ("FastLinear", "fast_linear"),
    "rowmesh.mesh": ("Mesh",),
    "rowmesh.models": ("DotInteraction",),
    "rowmesh.collection.joint_optimizer": ("JointOptimizer",),
    "rowmesh.collection.optimizer": ("EmbeddingOptimizer",),
    "rowmesh.tables.update_rules": ("SGD", "AdaGrad", "Adam", "RowWiseAdaGrad"),
    "rowmesh.pipeline": ("Pipeline",),
    "rowmesh.placement": ("Plan",),
    "rowmesh.checkpoint.periodic": ("Checkpoints",),
    "rowmesh.checkpoint.saving": ("Saving", "async_save", "load", "save"),
    "rowmesh.checkpoint.sharded_state": ("ShardedState",),
    "rowmesh.sparse": ("PositionWeights", "SparseBatch"),
    "rowmesh.tables": ("Constant", "Normal", "TableSpec", "TensorTrain", "Tiers", "Uniform"),
    "rowmesh.tensor_train": ("TensorTrainEmbeddingBag", "TensorTrainOptimizer"),
    "rowmesh.run.trained_model": ("load_run",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "AveragedRows",
    "Checkpoints",
    "Constant",
    "DotInteraction",
    "EmbeddingCollection",
    "EmbeddingOptimizer",
    "Embeddings",
    "FastLinear",
    "JaggedRows",
    "JointOptimizer",
    "Mesh",
    "Normal",
    "Pipeline",
    "Plan",
    "PositionWeights",
    "RowWiseAdaGrad",
    "RowmeshError",
    "Saving",
    "ShardedState",
    "SparseBatch",
    "Synchronization",
    "TableSpec",
    "TensorTrain",
    "TensorTrainEmbeddingBag",
    "TensorTrainOptimizer",
    "Tiers",
    "Uniform",
    "async_save",
    "fast_linear",
    "load",
    "load_run",
    "save",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'rowmesh' has no attribute {name!r}")
