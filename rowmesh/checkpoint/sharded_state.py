"""ShardedState: what a program saves, for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from rowmesh.checkpoint.parts import Parts, has_state


class ShardedState:
    """A `Stateful` of torch.distributed.checkpoint (DCP) that has the rows of all tables, and their optimizer states.

    `dcp.save` and `dcp.load` call its methods on all ranks. Its tensors of rows are DTensors of which each rank has an
    equal block, whatever the plan, so any number of ranks can load what others saved. Both need memory for a copy of
    this rank's rows, and move each row once between ranks; `rowmesh.save` does neither.

    Args:
        state: as for `rowmesh.save`, in a mapping that can change: `dcp.load` sets its plain values.

    Raises:
        ConfigurationError: no module has tables, or two have tables of the same name.

    Example:
        >>> import tempfile, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> from rowmesh import EmbeddingCollection, EmbeddingOptimizer, TableSpec
        >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
        >>> state = {"embeddings": embeddings, "optimizer": EmbeddingOptimizer(embeddings), "step": 7}
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        ...     _ = dcp.save({"training": ShardedState(state)}, checkpoint_id=f"{folder}/model")
        ...     state["step"] = 0
        ...     dcp.load({"training": ShardedState(state)}, checkpoint_id=f"{folder}/model")
        >>> state["step"]
        7
    """

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state, self._parts = state, Parts(state)

    def state_dict(self) -> dict[str, Any]:
        """All parts by name. Collective.

        Raises:
            CheckpointError: tables are tiered or dynamic, which `rowmesh.save` writes.
        """
        self._parts.prepare()
        return self._parts.state("sharded")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Gives them to what they are of. Collective.

        Raises:
            CheckpointError: something does not fit; names it.
        """
        self._parts.load(state_dict, "sharded")
        for name, part in self._state.items():
            if not has_state(part):
                self._state[name] = state_dict[name]
