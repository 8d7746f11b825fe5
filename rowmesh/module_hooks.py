"""What torch does to modules, done to tables: `state_dict`, `load_state_dict`.

Rows are neither parameters nor buffers, so `nn.Module` would pass over them in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from rowmesh.errors import CheckpointError
from rowmesh.row_state import Holder, Kind, entries, load_rows, save_rows
from rowmesh.state_form import state_form


class TableModule(nn.Module):
    """Base of `EmbeddingCollection`: the methods of `nn.Module` that must know of rows."""

    def save_state(self, kind: Kind) -> dict[str, Tensor]:
        """The rows of all tables by name, or the optimizer states of all rows; see `rowmesh.row_state`.

        Raises:
            CheckpointError: they are spread over several ranks, or in tiers.
        """
        return save_rows(cast("Holder", self), kind)

    def load_state(self, kind: Kind, tensors: Mapping[str, Tensor]) -> None:
        """Sets what `save_state` returned.

        Raises:
            CheckpointError: it is of other tables, or of another optimizer.
        """
        holder = cast("Holder", self)
        wanted = set(entries(holder, kind))
        if wanted != set(tensors):
            raise CheckpointError(
                f"the state dictionary lacks {sorted(wanted - set(tensors)) or 'nothing'} and has "
                f"{sorted(set(tensors) - wanted) or 'nothing'} besides; use the tables and optimizers it was saved with"
            )
        if problems := load_rows(holder, kind, tensors):
            raise CheckpointError("; ".join(problems))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": rows for name, rows in self.save_state("rows").items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As torch calls it: sets the rows that are there, and notes what is missing, unknown or of another shape."""
        if state_form() == "elsewhere":
            return
        holder = cast("Holder", self)
        wanted = entries(holder, "rows")
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        missing_keys += [f"{prefix}{name}" for name in wanted if name not in given]
        if strict:
            unexpected_keys += [f"{prefix}{name}" for name in given if name not in wanted]
        error_msgs += load_rows(holder, "rows", {name: value for name, value in given.items() if name in wanted})
