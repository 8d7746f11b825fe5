"""Publisher: writes generations, whole ones and what changed since, and removes old ones."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from rowmesh._support.faults import reach
from rowmesh._support.files.checksums import checksums_of_bytes
from rowmesh.errors import ConfigurationError, DataError, RowmeshError, StoreError
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import on_all_ranks, on_rank_0
from rowmesh.mesh.waiting import gather_objects
from rowmesh.publish.generation import Generation, Part, PublishedTable
from rowmesh.publish.guard import guarded
from rowmesh.publish.target import PartWriter, Target

logger = logging.getLogger("rowmesh")
_NONE = np.empty(0, np.int64)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """A rank's changes of a table to publish. An id is in one chunk of one rank, or in `deleted`, or in neither.

    Attributes:
        rows: chunks of ids, int64 `[N]`, with their vectors, float32 `[N, D]`.
        deleted: int64 `[N]`, ids that are gone since the last generation; a whole generation ignores them.
    """

    rows: Iterable[tuple[np.ndarray, np.ndarray]] = ()
    deleted: np.ndarray = field(default_factory=lambda: _NONE)


class Publisher:
    """Writes versions of tables and network, which readers see whole or not at all.

    A generation has all rows, or those that changed since the last one together with the ids that are gone. The first
    one of each publisher is whole, and the one after a failure, since nothing says then what readers have; and so is
    one after `whole_every − 1` others. `is_whole` says what the next one wants.

    Args:
        target: where to; see `open_target`.
        tables: by name; all of the model that are served.
        mesh: the ranks, each of which publishes what it owns; None: this process alone. Making one is collective.
        keep_last: how many generations can be read; one that a kept one changes stays, too.
        whole_every: 1: all generations are whole.
        run: a name for what is trained, which generations have.

    Raises:
        ConfigurationError: a number is below 1.
        DataError: something else is in the target, or what is there is damaged.

    Example:
        >>> import tempfile
        >>> from rowmesh.publish import PublishedReader, open_target
        >>> from rowmesh.tables import Constant
        >>> target = open_target(f"parquet:{tempfile.mkdtemp()}")
        >>> publisher = Publisher(target, {"user": PublishedTable(dim=2, initializer=Constant(value=1))})
        >>> changes = Changes(rows=[(np.array([7]), np.array([[3, 4]], np.float32))])
        >>> publisher.publish(100, {"user": changes}, {}).number
        1
        >>> PublishedReader(target).look_up("user", np.array([8, 7])).tolist()
        [[1.0, 1.0], [3.0, 4.0]]
    """

    def __init__(
        self,
        target: Target,
        tables: Mapping[str, PublishedTable],
        *,
        mesh: Mesh | None = None,
        keep_last: int = 3,
        whole_every: int = 10,
        run: str = "",
    ) -> None:
        if keep_last < 1 or whole_every < 1:
            raise ConfigurationError(
                f"keep_last and whole_every of publishing must be 1 or more, got {keep_last} and {whole_every}"
            )
        self._target, self._tables = guarded(target, target.name), dict(tables)
        self._mesh = Mesh() if mesh is None else mesh
        self._keep_last, self._whole_every, self._run = keep_last, whole_every, run
        self._last: Generation | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the next generation takes all rows."""
        return self._last is None or len(self._last.chain) >= self._whole_every

    def begin_anew(self) -> None:
        """The next generation is whole: what changed is not known. All ranks call it alike."""
        self._last = None

    def newest(self) -> Generation | None:
        """The newest generation that is published, whoever did; None before the first. Collective and blocking.

        Raises:
            StoreError, DataError: on all ranks: the target does not answer, or has something else.
        """
        text = on_rank_0(self._mesh, "looking at what is published", self._named(self._read_newest))
        return Generation.read(text.encode(), self._target.name) if text else None

    def _read_newest(self) -> str:
        text = self._target.newest()
        return "" if text is None else Generation.read(text, self._target.name).to_json().decode()

    def publish(self, step: int, changes: Mapping[str, Changes], network: Mapping[str, Any]) -> Generation:
        """Publishes a generation. Collective and blocking.

        Args:
            step: of training.
            changes: of each table, what this rank has: all its rows where `is_whole`, else those that changed.
            network: its `state_dict()`; that of rank 0 is written.

        Raises:
            StoreError: on all ranks: a rank could not write; readers keep the generation before.
            DataError: on all ranks: a rank's arrays are not what a table takes.
        """
        is_whole, last = self.is_whole, self._last
        self._last = None  # until all has gone well
        before = None if is_whole else last
        number = on_rank_0(self._mesh, "beginning to publish", self._named(lambda: self._begin(before)))
        write = self._named(lambda: self._write_part(number, changes, is_whole=is_whole))
        part = on_all_ranks(self._mesh, "publishing rows", write)
        parts = tuple(gather_objects(self._mesh, dict(part), "publishing rows"))
        generation = partial(
            Generation,
            number=number,
            step=step,
            chain=(number, *(before.chain if before else ())),
            sums=(before.checksum, *before.sums) if before else (),
            parts=parts,
            tables=self._tables,
            run=self._run,
        )
        finish = self._named(lambda: self._finish(generation, network))
        finished = on_rank_0(self._mesh, "publishing the network", finish)
        self._last = Generation.read(finished.encode(), self._target.name)
        return self._last

    def _begin(self, before: Generation | None) -> int:
        """The number of the next generation; on rank 0.

        Args:
            before: what it changes.
        """
        text = self._target.newest()
        newest = None if text is None else Generation.read(text, self._target.name)
        if before is not None and newest != before:
            raise StoreError(
                f"the newest generation of {self._target.name} is not number {before.number}, which this run published "
                "last: something else publishes there, or removed it; the next one will be whole"
            )
        number = 1 if newest is None else newest.number + 1
        for left in self._target.numbers():
            if left > number:
                self._target.remove(left)
        self._target.begin(number)
        reach("publish.begun")
        return number

    def _write_part(self, number: int, changes: Mapping[str, Changes], *, is_whole: bool) -> Part:
        if unknown := changes.keys() - self._tables.keys():
            raise DataError(f"{sorted(unknown)} are not published; the tables are {sorted(self._tables)}")
        writer = self._target.part(number, self._mesh.rank, {name: table.dim for name, table in self._tables.items()})
        try:
            for name, change in changes.items():
                self._write_table(writer, name, change, is_whole=is_whole)
        finally:
            part = writer.close()
        reach("publish.part")
        return part

    def _write_table(self, writer: PartWriter, name: str, change: Changes, *, is_whole: bool) -> None:
        dim = self._tables[name].dim
        for ids, vectors in change.rows:
            if ids.dtype != np.int64 or ids.ndim != 1 or vectors.shape != (len(ids), dim):
                raise DataError(
                    f"table {name!r} takes ids int64 [N] and vectors [N, {dim}], got {ids.dtype} {list(ids.shape)} and "
                    f"{list(vectors.shape)}"
                )
            if len(ids):
                writer.rows(name, ids, np.ascontiguousarray(vectors, np.float32))
            reach("publish.rows")
        if not is_whole and len(change.deleted):
            writer.deleted(name, np.ascontiguousarray(change.deleted, np.int64))

    def _finish(self, make: Callable[..., Generation], network: Mapping[str, Any]) -> str:
        """Makes readers see a generation, and returns it as it is written; on rank 0."""
        file = io.BytesIO()
        torch.save(dict(network), file)
        state = file.getvalue()
        generation = make(network=checksums_of_bytes(state))
        self._target.write_network(generation.number, state)
        reach("publish.network")
        self._target.publish(generation)
        reach("publish.published")
        try:
            self._remove_old(generation.number)
        except RowmeshError as error:
            logger.warning("old generations stay in %s until the next one: %s", self._target.name, error)
        return generation.to_json().decode()

    def _remove_old(self, number: int) -> None:
        numbers = [other for other in self._target.numbers() if other <= number]
        readable = [each for other in numbers if (each := self._readable(other)) is not None]
        needed = {other for each in readable[-self._keep_last :] for other in each.chain}
        for other in numbers:
            if other not in needed:
                self._target.remove(other)
                reach("publish.removed")

    def _readable(self, number: int) -> Generation | None:
        """A generation; None where it is unfinished, or damaged, so that nobody can read it."""
        text = self._target.manifest(number)
        try:
            return None if text is None else Generation.read(text, self._target.name)
        except DataError:
            return None

    def _named(self, action: Callable[[], T]) -> Callable[[], T]:
        """The action, whose errors of files name the target."""

        def run() -> T:
            try:
                return action()
            except OSError as error:
                raise StoreError(f"{self._target.name} failed: {error}") from error

        return run
