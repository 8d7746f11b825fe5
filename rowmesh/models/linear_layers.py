"""fast_linear: linear layers of a dense network on a CPU by oneDNN, where that is faster than torch's own.

Every rank gets what rank 0 has measured, since ranks that computed differently would get other bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from rowmesh.errors import PeerError
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import broadcast_object, gather_objects
from rowmesh.ops.linear import Choices, Measured, Shape, linear_shapes, measure, obstacle, using

Wanted = Literal["auto", "torch", "onednn"]
_DOING = "choosing how linear layers are computed"


class FastLinear:
    """How the linear layers of a network are computed; made by `fast_linear`.

    Attributes:
        choices: of the layers' shapes.
        reason: what was chosen and why, as a line for a log.
    """

    def __init__(self, choices: Choices, reason: str) -> None:
        self.choices, self.reason = choices, reason

    def __call__(self) -> AbstractContextManager[None]:
        """A block in which linear layers of this thread are computed as chosen; backward may come after it."""
        return using(self.choices)

    def state_dict(self) -> dict[str, Any]:
        """The choices, for a checkpoint: a run that goes on from there computes the same bits."""
        return {"choices": self.choices.to_plain()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave; where oneDNN is missing, layers stay torch's own."""
        self.choices = Choices.from_plain(state["choices"])
        self.reason = "as in the training of the model" + (f"; but by torch: {obstacle()}" if obstacle() else "")


def fast_linear(
    network: nn.Module,
    batch_size: int,
    *,
    mesh: Mesh | None = None,
    use: Wanted = "auto",
    score_shapes: Sequence[Shape] = (),
    varies: bool = False,
) -> FastLinear:
    """Chooses, for every linear layer of a network, between oneDNN and torch's own matrix products.

    Torch multiplies by MKL, which is slow on processors of AMD: there a dense network becomes twice as fast. Rank 0
    measures for about a second, and keeps the times on disk for the next run on this machine. Collective: every rank
    calls it, and all choose the same. The network is not changed.

    Args:
        network: the same on every rank; its `nn.Linear` are looked at, float32 on a CPU.
        batch_size: samples of a step, over all ranks: layers of small batches are faster with torch's own.
        mesh: the ranks; None: this process alone.
        use: auto measures; torch or onednn is taken unmeasured.
        score_shapes: `[N, K]` of products that are no `nn.Linear`: `rowmesh.models.sequence.losses.score_shape` of the
            items' dimension where `full_softmax` is the loss.
        varies: whether layers multiply another number of rows in every step, as events of sequences are: oneDNN makes
            its operators for each number anew, which is measured, too.

    Returns:
        The choices to compute with, in `with fast():`; torch's own where there is no oneDNN, as `reason` says.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout.

    Example:
        >>> network = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> fast = fast_linear(network, 4096, use="torch")
        >>> with fast():
        ...     logits = network(torch.zeros(2, 8))
        >>> fast.reason
        'by torch'
    """
    mesh = mesh or Mesh()
    shapes = list(dict.fromkeys([*linear_shapes(network), *score_shapes]))
    if use == "torch":
        return FastLinear(Choices(), "by torch")
    if not shapes or not _is_float32_on_cpu(network):
        return FastLinear(Choices(), "by torch: there are none in float32 on a CPU")
    obstacles = list(filter(None, gather_objects(mesh, obstacle(), _DOING)))
    if obstacles:
        return FastLinear(Choices(), f"by torch: {obstacles[0]}")
    if use == "onednn":
        return FastLinear(Choices.everything(shapes), f"by oneDNN, all {len(shapes)} shapes, unmeasured")
    found = None
    if mesh.rank == 0:
        measured = measure(shapes, batch_size, varies=varies)
        found = [measured.choices.to_plain(), _reason(measured)]
    try:
        values, reason = broadcast_object(mesh, found, _DOING)
        return FastLinear(Choices.from_plain(values), reason)
    except (ValueError, TypeError) as error:
        raise PeerError(
            f"while {_DOING}, rank 0 sent what this rank cannot read ({error}); start all ranks with the same version "
            "of rowmesh"
        ) from error


def _is_float32_on_cpu(network: nn.Module) -> bool:
    return all(
        layer.weight.dtype == torch.float32 and layer.weight.is_cpu
        for layer in network.modules()
        if isinstance(layer, nn.Linear)
    )


def _reason(measured: Measured) -> str:
    products = [chosen for passes in measured.choices.passes.values() for chosen in passes]
    known = f"as measured{' before' * measured.is_kept} with {measured.samples:,} samples"
    if measured.varies:
        known = f"{known} or some fewer, another number each time"
    if not any(products):
        return f"by torch: oneDNN is not faster here, {known}"
    return (
        f"by oneDNN in {sum(products)} of {len(products)} products, by torch in the others: {measured.gain:.1f} times "
        f"as fast as torch alone, {known}"
    )
