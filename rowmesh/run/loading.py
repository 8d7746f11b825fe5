"""load_model: the rows and the network of a run that has a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rowmesh import checkpoint
from rowmesh.checkpoint.together import on_every_rank
from rowmesh.errors import RowmeshError
from rowmesh.run.checks import SETTING_UP
from rowmesh.run.job import Job
from rowmesh.run.run_folder import RunFolder


def load_model(job: Job, run: RunFolder, verify: bool, *, optimizer_state: bool = False) -> dict[str, Any]:
    """Reads the rows of this rank and the network of a run; returns what was saved beside the rows.

    Collective: all ranks fail where one does.

    Args:
        job: of the same tables and network.
        run: whose model.
        verify: compare what is read with its checksums.
        optimizer_state: whether the state of rows is read, too.

    Raises:
        RowmeshError: there is no model, it is damaged, or it is of other tables or another network.
    """
    read = partial(checkpoint.load, run.model, job.embeddings, optimizer_state=optimizer_state, verify=verify)
    state = on_every_rank(job.mesh.peers, read, SETTING_UP)
    try:
        job.network.load_state_dict(state["network"])
    except KeyError:
        raise RowmeshError(f"the model in {run.model} has no network; rowmesh train writes one") from None
    except (RuntimeError, TypeError) as error:
        is_state = isinstance(state["network"], Mapping)
        what = (_unlike(state["network"], job.network.state_dict()) if is_state else "") or str(error)
        raise RowmeshError(f"the network in {run.model} is another; leave model.… as it was trained: {what}") from None
    if "linear" in state and job.config.train.linear != "torch" and job.config.train.precision == "float32":
        job.linear.load_state_dict(state["linear"])
    job.embeddings.barrier()
    return state


def _unlike(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """In which tensors two states of networks differ, the first by name; "" where only torch knows.

    >>> import torch
    >>> _unlike({"0.weight": torch.zeros(8, 4), "1.bias": torch.zeros(3)}, {"0.weight": torch.zeros(2, 4)})
    '0.weight is [8, 4] there and [2, 4] here, and 1 more differs'
    """

    def shape(state: Mapping[str, Any], name: str) -> str:
        found = getattr(state.get(name), "shape", None)
        return "none" if found is None else str(list(found))

    names = [name for name in dict.fromkeys([*saved, *own]) if shape(saved, name) != shape(own, name)]
    if not names:
        return ""
    others = len(names) - 1
    more = f", and {others} more differ{'s' if others == 1 else ''}" if others else ""
    return f"{names[0]} is {shape(saved, names[0])} there and {shape(own, names[0])} here{more}"
