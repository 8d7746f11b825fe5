"""Two towers: one vector for who asks, one for what is offered; and the softmax over the items of a batch.

[Note: all items of the global batch]
The items that a sample is compared with are those of all ranks, not of its own alone: `rowmesh.mesh.RowsOfAllRanks`
gathers item vectors, and brings their gradients back. So any number of ranks trains the same model, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowmesh._support.suggest import hint
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.models.layers import check_inputs, check_positive, mlp, one_label
from rowmesh.models.protocol import Vectors

Gather = Callable[[Tensor], tuple[Tensor, int]]
"""Takes the rows of this rank; returns the rows of all ranks, and the number of this rank's first."""
IN_BATCH = "in_batch_softmax"
LOSSES = ("binary_cross_entropy", IN_BATCH)


class TwoTower(nn.Module):
    """The product of a query's vector and an item's.

    ::

        u = query_tower(dense, features of the query)               [B, W], W = the last of `widths`
        v = item_tower(features of the item)                        [B, W]
        logit = ⟨u, v⟩ / temperature                                u, v of length 1 where they are normalized

    Logits of clicks are trained by the binary cross entropy; of positive samples, `towers` gives what `InBatchSoftmax`
    takes. Tables may have different dims.

    Args:
        dims: D of the vector of every feature, by name.
        num_dense: number of dense features, 0 or more; they belong to the query.
        labels: names of the labels; one.
        item: the features that describe the item; all others describe the query. The first is the item's id, by which
            the softmax tells items apart.
        widths: of the layers of each tower.
        normalize: whether vectors have length 1.
        temperature: divides the products.
        loss: what `rowmesh train` trains with: "binary_cross_entropy" of the logits, or "in_batch_softmax".
        log_q: of the softmax: whether it corrects for how often items are in a batch; True if not given.

    Attributes:
        softmax: the loss over the items of a batch; None where the loss is the binary cross entropy.

    Raises:
        ConfigurationError: a size is not positive, a feature does not exist, a tower has no inputs, or there is no such
            loss.

    Example:
        >>> from rowmesh.collection.outputs import Embeddings
        >>> model = TwoTower(dims={"user": 4, "item": 2}, num_dense=3, item=["item"], widths=[8])
        >>> model(torch.zeros(5, 3), Embeddings(torch.zeros(5, 6), ("user", "item"), (4, 2), {})).shape
        torch.Size([5])

    Source: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations" (RecSys 2019),
    §3.
    """

    def __init__(
        self,
        *,
        dims: Mapping[str, int],
        num_dense: int,
        item: Sequence[str],
        labels: Sequence[str] = ("label",),
        widths: Sequence[int] = (256, 64),
        normalize: bool = True,
        temperature: float = 0.1,
        loss: str = LOSSES[0],
        log_q: bool | None = None,
    ) -> None:
        super().__init__()
        if loss not in LOSSES:
            raise ConfigurationError(f"two_tower: loss should be one of {', '.join(LOSSES)}, got {loss!r}")
        if log_q is not None and loss != IN_BATCH:
            raise ConfigurationError(f"two_tower: log_q is for {IN_BATCH}, and loss is {loss}; leave it out")
        check_inputs("two_tower", dims, num_dense)
        check_positive("two_tower", widths=widths)
        one_label("two_tower", labels)
        if isinstance(item, str):
            raise ConfigurationError(f"two_tower: item must be a list of features; write [{item!r}]")
        if unknown := [name for name in item if name not in dims]:
            raise ConfigurationError(
                f"two_tower: item names {unknown[0]!r}, which is no feature{hint(unknown[0], dims)}; there are "
                f"{', '.join(dims)}"
            )
        if not widths or not temperature > 0:
            raise ConfigurationError(
                f"two_tower: widths needs one layer or more, and temperature must be above 0; got {list(widths)} and "
                f"{temperature}"
            )
        self.item, self.query = tuple(item), tuple(name for name in dims if name not in item)
        query = num_dense + sum(dims[name] for name in self.query)
        if not self.item or not query:
            tower = "query" if self.item else "item"
            raise ConfigurationError(
                f"two_tower: the {tower} tower has no inputs; item names the features of the item, out of "
                f"{', '.join(dims)}, and not all of them"
            )
        self.normalize, self.temperature = normalize, temperature
        self.query_tower = mlp((query, *widths), relu_last=False)
        self.item_tower = mlp((sum(dims[name] for name in self.item), *widths), relu_last=False)
        corrects = loss == IN_BATCH and log_q is not False
        frequency = ItemFrequency() if corrects else None
        self.softmax = InBatchSoftmax(temperature, frequency) if loss == IN_BATCH else None

    def towers(self, dense: Tensor, embeddings: Vectors) -> tuple[Tensor, Tensor]:
        """Vectors of the queries and of the items, both `[B, W]`."""
        query = [dense] if dense.shape[1] else []
        query += [embeddings[name] for name in self.query]
        u = self.query_tower(torch.cat(query, dim=1))
        v = self.item_tower(torch.cat([embeddings[name] for name in self.item], dim=1))
        return (F.normalize(u, dim=1), F.normalize(v, dim=1)) if self.normalize else (u, v)

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        """Logits `[B]` from `dense` `[B, num_dense]` and the vectors."""
        u, v = self.towers(dense, embeddings)
        return (u * v).sum(1) / self.temperature


class ItemFrequency(nn.Module):
    """How likely an item is to be in a batch, estimated from the steps between its appearances.

    ::

        B[h] = (1 − α) B[h] + α (t − A[h]);   A[h] = t;   probability = 1 / B[h]        h = hash of the id

    Every id of a batch counts once. Items that share a slot share an estimate.

    Args:
        num_slots: how many estimates there are.
        rate: α.

    Source: Yi et al. (RecSys 2019), Algorithm 2.
    """

    last: Tensor
    gap: Tensor

    def __init__(self, num_slots: int = 1 << 20, rate: float = 0.01) -> None:
        super().__init__()
        check_positive("item frequency", num_slots=num_slots)
        if not 0 < rate <= 1:
            raise ConfigurationError(f"item frequency: rate must be above 0 and at most 1, got {rate}")
        self.rate, self.num_slots = rate, num_slots
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(num_slots, dtype=torch.int64))
        self.register_buffer("gap", torch.zeros(num_slots, dtype=torch.float64))

    def observe(self, ids: Tensor) -> None:
        """Takes the ids of one batch of all ranks: int64 `[n]`."""
        self.step += 1
        slots = self._slots(ids).unique()
        passed, gap = (self.step - self.last[slots]).to(self.gap.dtype), self.gap[slots]
        # The paper starts B from a constant; the first gap is that constant here, so none is to be guessed.
        self.gap[slots] = torch.where(gap > 0, (1 - self.rate) * gap + self.rate * passed, passed)
        self.last[slots] = self.step

    def log_probability(self, ids: Tensor) -> Tensor:
        """`[n]`: log Q of every id; 0 (certain) of one that was never seen."""
        return -self.gap[self._slots(ids)].clamp(min=1.0).log()

    def _slots(self, ids: Tensor) -> Tensor:
        mixed = (ids ^ (ids >> 32 & 0xFFFFFFFF)) * -0x61C8864680B583EB  # Fibonacci hashing: 2⁶⁴ / golden ratio
        return ((mixed >> 32) & 0x7FFFFFFF) % self.num_slots


class InBatchSoftmax(nn.Module):
    """The cross entropy of every sample's item among all items of the global batch.

    ::

        s_ij = ⟨u_i, v_j⟩ / temperature − log Q(j)
        loss_i = −log (exp s_ii / Σ_j exp s_ij)

    The sum leaves out other samples of the same item, which are no negatives. With several ranks it is collective:
    every rank calls it, and the items of all of them count.

    Args:
        temperature: divides the products.
        frequency: estimates Q, from the batches of training; None: no correction.
        gather: gives the rows of all ranks, and where those of this one begin; None: there is one rank. An attribute,
            which may be set later.

    Example:
        >>> loss = InBatchSoftmax(temperature=0.1, frequency=ItemFrequency(1000))
        >>> u, v = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
        >>> loss(u, v, torch.tensor([3, 1, 4, 1])).shape
        torch.Size([4])

    Source: Yi et al. (RecSys 2019), equations 4 to 6.
    """

    def __init__(
        self, temperature: float = 0.1, frequency: ItemFrequency | None = None, gather: Gather | None = None
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ConfigurationError(f"in-batch softmax: temperature must be above 0, got {temperature}")
        self.temperature, self.frequency = temperature, frequency
        self.gather = gather

    def forward(self, queries: Tensor, items: Tensor, item_ids: Tensor) -> Tensor:
        """The losses `[B]` of this rank's samples.

        Args:
            queries: `[B, W]`.
            items: `[B, W]`, of the same samples.
            item_ids: int64 `[B]`: tell items apart.

        Raises:
            DataError: shapes do not fit together.
        """
        if queries.shape != items.shape or item_ids.shape != queries.shape[:1]:
            raise DataError(
                f"in-batch softmax takes queries [B, W], items [B, W] and item_ids [B], got {list(queries.shape)}, "
                f"{list(items.shape)} and {list(item_ids.shape)}"
            )
        first, all_items, all_ids = 0, items, item_ids
        if self.gather is not None:
            all_items, first = self.gather(items)
            all_ids, _ = self.gather(item_ids)
        scores = queries @ all_items.T / self.temperature
        if self.frequency is not None:
            if self.training:
                self.frequency.observe(all_ids)
            scores = scores - self.frequency.log_probability(all_ids).to(scores.dtype)
        own = torch.arange(first, first + len(items), device=items.device)
        same = item_ids[:, None] == all_ids[None, :]
        same[torch.arange(len(own), device=items.device), own] = False
        return F.cross_entropy(scores.masked_fill(same, -torch.inf), own, reduction="none")
