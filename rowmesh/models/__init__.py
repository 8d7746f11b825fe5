"""Models in plain torch: dense features and looked-up embeddings in, one logit a sample and label out."""

from rowmesh.models.dcn import CrossLayer, DCNv2
from rowmesh.models.dlrm import DLRM, DotInteraction, ProjectedDLRM
from rowmesh.models.layers import Projection
from rowmesh.models.multi_task import MMoE, SharedBottom
from rowmesh.models.protocol import Model, Vectors
from rowmesh.models.two_tower import InBatchSoftmax, ItemFrequency, TwoTower
from rowmesh.models.wide import DeepFM, WideAndDeep

__all__ = [
    "DLRM",
    "CrossLayer",
    "DCNv2",
    "DeepFM",
    "DotInteraction",
    "InBatchSoftmax",
    "ItemFrequency",
    "MMoE",
    "Model",
    "ProjectedDLRM",
    "Projection",
    "SharedBottom",
    "TwoTower",
    "Vectors",
    "WideAndDeep",
]
