"""Several labels: a shared bottom, or a mixture of experts with a gate for each label (MMoE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rowmesh.models.layers import check_inputs, check_positive, mlp, per_label, side_by_side
from rowmesh.models.protocol import Vectors


class SharedBottom(nn.Module):
    """One MLP for all labels, and a tower for each.

    ::

        logit_l = tower_l(bottom(x))                                x = (dense, embeddings)

    Tables may have different dims.

    Args:
        dims: D of the vector of every feature, by name.
        num_dense: number of dense features, 0 or more.
        labels: names of the labels, each of which gets a tower and a logit.
        bottom: widths of the shared layers.
        tower: widths of the hidden layers of a tower.

    Raises:
        ConfigurationError: a size is not positive.

    Example:
        >>> from rowmesh.collection.outputs import Embeddings
        >>> model = SharedBottom(dims={"user": 4}, num_dense=3, labels=("click", "buy"), bottom=[8], tower=[4])
        >>> model(torch.zeros(5, 3), Embeddings(torch.zeros(5, 4), ("user",), (4,), {})).shape
        torch.Size([5, 2])

    Source: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts" (KDD
    2018), equation 1.
    """

    def __init__(
        self,
        *,
        dims: Mapping[str, int],
        num_dense: int,
        labels: Sequence[str] = ("label",),
        bottom: Sequence[int] = (512, 256),
        tower: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        check_inputs("shared_bottom", dims, num_dense)
        check_positive("shared_bottom", bottom=bottom, tower=tower)
        widths = (num_dense + sum(dims.values()), *bottom)
        self.bottom = mlp(widths, relu_last=True)
        self.towers = nn.ModuleList(mlp((widths[-1], *tower, 1), relu_last=False) for _ in labels)

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        """Logits `[B]`, or `[B, L]` of several labels, from `dense` `[B, num_dense]` and the vectors."""
        shared = self.bottom(side_by_side(dense, embeddings))
        return per_label(torch.cat([tower(shared) for tower in self.towers], dim=1), len(self.towers))


class MMoE(nn.Module):
    """Experts that all labels share, mixed by a gate for each label, and a tower for each.

    ::

        g_l = softmax(W_l x)                                        x = (dense, embeddings)
        logit_l = tower_l(Σ_e g_le expert_e(x))

    Tables may have different dims.

    Args:
        dims: D of the vector of every feature, by name.
        num_dense: number of dense features, 0 or more.
        labels: names of the labels, each of which gets a gate, a tower and a logit.
        num_experts: how many experts there are.
        expert: widths of the layers of an expert.
        tower: widths of the hidden layers of a tower.

    Raises:
        ConfigurationError: a size is not positive.

    Example:
        >>> from rowmesh.collection.outputs import Embeddings
        >>> model = MMoE(dims={"user": 4}, num_dense=3, labels=("click", "buy"), expert=[8], tower=[4])
        >>> model(torch.zeros(5, 3), Embeddings(torch.zeros(5, 4), ("user",), (4,), {})).shape
        torch.Size([5, 2])

    Source: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts" (KDD
    2018), equations 5 to 7.
    """

    def __init__(
        self,
        *,
        dims: Mapping[str, int],
        num_dense: int,
        labels: Sequence[str] = ("label",),
        num_experts: int = 4,
        expert: Sequence[int] = (256, 128),
        tower: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        check_inputs("mmoe", dims, num_dense)
        check_positive("mmoe", num_experts=num_experts, expert=expert, tower=tower)
        width = num_dense + sum(dims.values())
        self.experts = nn.ModuleList(mlp((width, *expert), relu_last=True) for _ in range(num_experts))
        self.gates = nn.ModuleList(nn.Linear(width, num_experts, bias=False) for _ in labels)
        self.towers = nn.ModuleList(mlp(((width, *expert)[-1], *tower, 1), relu_last=False) for _ in labels)

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        """Logits `[B]`, or `[B, L]` of several labels, from `dense` `[B, num_dense]` and the vectors."""
        x = side_by_side(dense, embeddings)
        experts = torch.stack([expert(x) for expert in self.experts], dim=2)  # [B, width, E]
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            mixed = torch.bmm(experts, gate(x).softmax(1).unsqueeze(2)).squeeze(2)
            logits.append(tower(mixed))
        return per_label(torch.cat(logits, dim=1), len(self.towers))
