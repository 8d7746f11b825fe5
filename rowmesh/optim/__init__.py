"""How rows change: SGD, AdaGrad, row-wise AdaGrad and Adam, fused with the merge of duplicate rows."""

from rowmesh.optim.joint import JointOptimizer
from rowmesh.optim.optimizer import EmbeddingOptimizer
from rowmesh.optim.rules import RULES, SGD, AdaGrad, Adam, RowWiseAdaGrad, UpdateRule

__all__ = ["RULES", "SGD", "AdaGrad", "Adam", "EmbeddingOptimizer", "JointOptimizer", "RowWiseAdaGrad", "UpdateRule"]
