"""The models that a configuration chooses by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from rowmesh.models.dcn import DCNv2
from rowmesh.models.multi_task import MMoE, SharedBottom
from rowmesh.models.two_tower import TwoTower
from rowmesh.models.wide import DeepFM, WideAndDeep

NAMED: Mapping[str, type[nn.Module]] = MappingProxyType(
    {
        "dcn_v2": DCNv2,
        "deep_fm": DeepFM,
        "mmoe": MMoE,
        "shared_bottom": SharedBottom,
        "two_tower": TwoTower,
        "wide_and_deep": WideAndDeep,
    }
)
"""What `model.name` may be besides dlrm: models made as `Model` says, with the keys of `model.options`."""
