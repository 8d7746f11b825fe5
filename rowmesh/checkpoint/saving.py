"""`rowmesh.save` and `rowmesh.load`: a model and its optimizers in a folder, which any layout reads.

The rows are as `rowmesh.checkpoint` writes them, by table and row; the other state dictionaries are beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rowmesh import checkpoint
from rowmesh._support.background_saves import begin_background_save, end_background_save, wait_for_background_saves
from rowmesh._support.files.places import local_path
from rowmesh._support.random_states import RANDOM_STATES
from rowmesh.checkpoint.background import BackgroundSave
from rowmesh.checkpoint.manifest import MANIFEST
from rowmesh.checkpoint.parts import Parts, check_plain
from rowmesh.checkpoint.room import Room
from rowmesh.checkpoint.together import on_every_rank
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.errors import CheckpointError
from rowmesh.mesh import Mesh

logger = logging.getLogger("rowmesh")


def save(
    folder: str | Path,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model, its optimizers and where training stands to a folder.

    Collective and blocking: every rank calls it with the same names, and all must see the same file system. No rows
    travel; every rank writes its own, and rank 0 all else. A checkpoint that was there stays until all is on disk.

    Args:
        folder: where; made if need be.
        state: name → a module, an optimizer, a schedule, a GradScaler, a loader, or anything else that has `state_dict`
            and `load_state_dict`; or a plain value (numbers, text, tensors, lists and dictionaries of them). Its
            modules have all `EmbeddingCollection`s to write. Optimizer states of rows are written in any case.
        overwrite: replace a checkpoint that is in the folder.
        metadata: JSON values, which `rowmesh.checkpoint.read_manifest` returns.

    Raises:
        CheckpointError: on every rank: there is a checkpoint in the folder, or a value that could not be read again, or
            a rank cannot write; names it.
        ConfigurationError: no module has tables, or two have tables of the same name.
        PeerError: a rank died, or was stopped for the mesh's timeout; names it.

    Example:
        >>> import tempfile
        >>> from rowmesh import EmbeddingCollection, EmbeddingOptimizer, TableSpec, load
        >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
        >>> state = {"embeddings": embeddings, "optimizer": EmbeddingOptimizer(embeddings), "step": 7}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/model", state)
        ...     load(f"{folder}/model", state)["step"]
        7
    """
    folder, parts = local_path(folder, "folder"), Parts(state)
    wait_for_background_saves(parts.tables.collections)  # perhaps to the same folder
    dense = _state_for(folder, parts, overwrite=overwrite)
    checkpoint.save(folder, parts.tables, dense, metadata=metadata, peers=parts.tables.mesh.peers)


class Saving:
    """A model that is being written while training goes on; `async_save` gives it."""

    def __init__(self, save: BackgroundSave, collections: Sequence[EmbeddingCollection]) -> None:
        self._save, self._collections = save, collections
        begin_background_save(collections, self)

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once on this rank."""
        return self._save.is_done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the model is on disk, so long at most; returns whether it is. Every rank calls it.

        Raises:
            CheckpointError: on every rank, as `save`. Where this was not called, the next that writes or sets these
                rows raises it, once.
            PeerError: as `save`.
        """
        try:
            is_written = self._save.wait(timeout_s)
        except Exception:  # which says that it has ended; an interrupt does not
            end_background_save(self._collections, self)
            raise
        if is_written:
            end_background_save(self._collections, self)
        return is_written


def async_save(
    folder: str | Path,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    copy_bytes: int | None = None,
) -> Saving:
    """Writes what `save` writes, to the bit, in a thread beside training, which goes on at once.

    Collective: every rank calls it between two steps, with nothing of a pipeline under way. All but rows is copied
    before it returns. Rows are read as they were then: a thread copies them ahead of the disk, and those that a step is
    about to update before that are saved first, so that memory is needed. Writes do not overlap: the next call
    waits for this one, and so does the end of the program, where an error is a line of the log. Tiered tables cannot be
    read any more by then: wait for theirs.

    Args:
        folder: as for `save`.
        state: as for `save`; may change as soon as the call returns.
        overwrite: as for `save`.
        metadata: as for `save`.
        copy_bytes: memory of each rank for copies ahead of the disk; with less than the rows take, steps save more of
            them. Default: a quarter of what is available, shared by the ranks of a host.

    Raises:
        CheckpointError: as `save`; also where the one before could not be written, and nobody waited for that.
        ConfigurationError, PeerError: as `save`.

    Example:
        >>> import tempfile
        >>> from rowmesh import EmbeddingCollection, TableSpec, async_save
        >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = async_save(f"{folder}/model", {"embeddings": embeddings})
        ...     saving.wait()
        True
    """
    folder, parts = local_path(folder, "folder"), Parts(state)
    collections = parts.tables.collections
    wait_for_background_saves(collections)
    dense = _state_for(folder, parts, overwrite=overwrite)
    peers = parts.tables.mesh.with_process_group("async_save").peers
    hosts = parts.tables.mesh.hosts
    room = Room(copy_bytes, sharers=hosts.count(hosts[parts.tables.mesh.rank]))
    save = BackgroundSave(folder, parts.tables, dense, metadata=metadata, peers=peers, room=room)
    return Saving(save, collections)


def _state_for(folder: Path, parts: Parts, *, overwrite: bool) -> dict[str, Any]:
    """All but the rows, where there is no model or it may be replaced."""

    def state() -> dict[str, Any]:
        if not overwrite and parts.tables.mesh.rank == 0 and (folder / MANIFEST).exists():
            raise CheckpointError(
                f"there is a model in {folder} already; save to another folder, or give overwrite=True, which replaces "
                "it when the new one is on disk"
            )
        return parts.state("elsewhere")

    return prepared(parts.tables.mesh, state)


def prepared(mesh: Mesh, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """All but the rows, checked on every rank.

    Raises:
        CheckpointError: on every rank: a value could not be read again; names it.
    """
    dense: dict[str, Any] = {}

    def prepare() -> None:
        dense.update(state())
        for name, value in dense.items():
            check_plain(value, f"{name!r}")

    on_every_rank(mesh.peers, prepare, "saving a model")
    return dense


def load(folder: str | Path, state: Mapping[str, Any], *, verify: bool = True) -> dict[str, Any]:
    """Reads what `save` wrote, on any number of ranks, under any plan and transport, on any device.

    Collective and blocking: every rank calls it, and reads the rows that it holds. What `rowmesh train` wrote to its
    `model` folder can be read too: its parts are "network", "dense_optimizer", "embedding_optimizer" and "step".

    Args:
        folder: the checkpoint.
        state: name → what to load into, as for `save`: all tables of the checkpoint, and as many of the other parts as
            are needed. Optimizer states of rows are loaded where an optimizer of rows is among them. Plain values are
            not changed.
        verify: compare what is read with the checksums; False reads damaged files as they are.

    Returns:
        The rest of the checkpoint: plain values, and the state dictionaries of what `state` has not.

    Raises:
        CheckpointError: on every rank: something is missing or damaged, or does not fit; names it. Some of it may be
            loaded by then.
        ConfigurationError, PeerError: as for `save`.
    """
    saved = read(folder, state, verify=verify)
    saved.pop(RANDOM_STATES, None)
    return saved


def read(folder: str | Path, state: Mapping[str, Any], *, verify: bool = True) -> dict[str, Any]:
    """What `load` does, which returns all that a checkpoint has."""
    folder, parts = local_path(folder, "folder"), Parts(state)
    tables, saved = parts.tables, {}
    tables.barrier()  # no rank looks rows up any more

    def fill() -> None:
        saved.update(checkpoint.load(folder, tables, optimizer_state=parts.has_optimizer, verify=verify))
        if lacking := [name for name in parts.names if name not in saved]:
            raise CheckpointError(f"the model in {folder} has no {lacking}; it has the tables and {sorted(saved)}")
        parts.load(saved, "elsewhere")

    on_every_rank(tables.mesh.peers, fill, "loading a model")
    tables.barrier()
    return {name: value for name, value in saved.items() if name not in parts.stateful}
