"""Tensor-train tables: an embedding table as the product of three small cores.

`TensorTrainEmbeddingBag` takes the place of `nn.EmbeddingBag`; `TensorTrainOptimizer` is its fused update.
"""

from rowmesh.tables.tensor_train import TensorTrainShape
from rowmesh.tensor_train.decompose import tt_svd
from rowmesh.tensor_train.module import TensorTrainEmbeddingBag
from rowmesh.tensor_train.optimizer import TensorTrainOptimizer

__all__ = ["TensorTrainEmbeddingBag", "TensorTrainOptimizer", "TensorTrainShape", "tt_svd"]
