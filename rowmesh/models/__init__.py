"""Models in plain torch: dense features and looked-up embeddings in, one logit a sample and label out."""

from rowmesh.models.dlrm import DLRM
from rowmesh.models.interaction import DotInteraction
from rowmesh.models.protocol import Model, Vectors

__all__ = ["DLRM", "DotInteraction", "Model", "Vectors"]
