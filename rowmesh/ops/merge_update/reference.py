"""Merge and update in plain torch: the formulas of the update rules, on whole rows."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(slots: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Distinct slots `[M]` and the sums of their gradients `[M, D]`, added in the order of the lists."""
    merged = torch.unique(torch.cat(slots))
    total = torch.zeros(len(merged), grads[0].shape[1], dtype=grads[0].dtype)
    for s, g in zip(slots, grads, strict=True):
        total.index_add_(0, torch.searchsorted(merged, s), g)
    return merged, total


def update(
    rule: str,
    weights: Tensor,
    state: dict[str, Tensor],
    slots: Tensor,
    grads: Tensor,
    lr: float,
    eps: float = 0.0,
    beta1: float = 0.0,
    beta2: float = 0.0,
    step: int = 1,
    moment_scale: float = 1.0,
    weight_decay: float = 0.0,
) -> None:
    """Applies one step of a rule to distinct rows, in place; see `rowmesh.tables.update_rules` for the formulas."""
    g = grads
    rows = weights[slots].to(g.dtype)
    if rule == "adam":
        rows *= 1 - lr * weight_decay
    elif weight_decay:
        g = g + weight_decay * rows
    if rule == "sgd":
        rows -= lr * g
    elif rule == "adagrad":
        state["sum"][slots] += g * g
        rows -= lr * g / ((state["sum"][slots] / moment_scale).sqrt() + eps)
    elif rule == "row_wise_adagrad":
        state["sum"][slots] += (g * g).mean(1)
        rows -= lr * g / ((state["sum"][slots] / moment_scale).sqrt() + eps)[:, None]
    elif rule == "adam":
        state["m"][slots] = beta1 * state["m"][slots] + (1 - beta1) * g
        state["v"][slots] = beta2 * state["v"][slots] + (1 - beta2) * g * g
        m = state["m"][slots] / (1 - beta1**step)
        v = state["v"][slots] / (1 - beta2**step)
        rows -= lr * m / ((v / moment_scale).sqrt() + eps)
    else:
        raise ValueError(f"unknown rule {rule!r}")
    weights[slots] = rows.to(weights.dtype)
