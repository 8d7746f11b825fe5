"""Checkpoints of a loop of one's own: every so many steps, beside training, increments, and from where it goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import finalize

from rowmesh._support.background_saves import begin_background_save, end_background_save, wait_for_background_saves
from rowmesh._support.files.advice import as_refusal, described
from rowmesh._support.files.places import local_path
from rowmesh._support.json_lines import utc_text
from rowmesh._support.random_states import RANDOM_STATES, random_states, set_random_states
from rowmesh.checkpoint.parts import Parts, has_state
from rowmesh.checkpoint.saving import prepared, read
from rowmesh.checkpoint.series import Series
from rowmesh.checkpoint.write import WRITING
from rowmesh.checkpoint.writer import Rules, Writer
from rowmesh.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from rowmesh.mesh.together import on_rank_0
from rowmesh.mesh.waiting import gather_objects

logger = logging.getLogger("rowmesh")
FINDING = "looking for checkpoints"
_ADVICE = "end it (its `with` block, or close()), or give this one a folder of its own"


class Checkpoints:
    """Writes a model and all that its next step depends on now and then, and takes it up again.

    Collective: every rank makes one, with the same arguments, and calls the same methods after the same steps, with
    nothing of a pipeline under way. All ranks must see the folder. It has a folder a checkpoint, named by its step,
    which `rowmesh checkpoint list | verify | show | compact` and `rowmesh.load` read. From `resume` or the first
    checkpoint until the end of the block, or `close`, no other loop or run may write there.

    Args:
        folder: of the checkpoints, and of nothing else.
        state: name → module, optimizer, schedule, loader, …, as for `rowmesh.save`.
        every_steps: `step` writes one after multiples of it; 0: `write` alone does.
        keep_last: how many of the newest stay.
        keep_every: those after a multiple of so many steps stay besides; 0: none does.
        asynchronous: whether they are written beside training, as `rowmesh.async_save` does; a failure is raised by the
            next call then.
        incremental: after a full one, so many that have only the rows that changed since the one before, and say which
            ids of dynamic tables are gone; 0: all are full.
        copy_bytes: as for `rowmesh.async_save`.

    Attributes:
        last: after which step the newest is; 0: there is none.

    Raises:
        ConfigurationError: as `rowmesh.save`. Names it.

    Example:
        >>> import tempfile
        >>> from rowmesh import Checkpoints, EmbeddingCollection, TableSpec
        >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
        >>> folder = tempfile.TemporaryDirectory()
        >>> for _ in range(2):  # the second goes on from the first
        ...     with Checkpoints(folder.name, {"embeddings": embeddings}, every_steps=2) as checkpoints:
        ...         saved = checkpoints.resume()
        ...         print(checkpoints.last, saved)
        ...         for step in range(checkpoints.last, 5):
        ...             is_written = checkpoints.step(step + 1, {"seen": 8 * (step + 1)})  # after each step
        0 {}
        4 {'seen': 32}
        >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | Path,
        state: Mapping[str, Any],
        *,
        every_steps: int = 0,
        keep_last: int = 2,
        keep_every: int = 0,
        asynchronous: bool = False,
        incremental: int = 0,
        copy_bytes: int | None = None,
    ) -> None:
        counts = (("every_steps", every_steps, 0), ("keep_last", keep_last, 1), ("keep_every", keep_every, 0))
        for name, value, least in (*counts, ("incremental", incremental, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name} is {value!r}; it must be a whole number, {least} or more")
        if plain := [name for name, part in state.items() if not has_state(part)]:
            raise ConfigurationError(f"{plain[0]!r} is a plain value, and changes; give such to step() and write()")
        self._state, self._parts, self._every_steps = dict(state), Parts(state), every_steps
        tables = self._parts.tables
        self._series, self._tried = Series(local_path(folder, "folder")), 0
        rules = Rules(asynchronous, incremental, keep_last, keep_every, copy_bytes)
        self._writer = Writer(self._series, tables, tables.mesh, rules)
        self._may_write, self._device = False, tables.collections[0].device
        self._leave: finalize | None = None  # lets others into the folder; on rank 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Where the loop ended well, one that is being written is waited for; else it is dropped."""
        self._end(is_well=error is None)

    def close(self) -> None:
        """Ends it where there is no `with` block: waits as `wait` does, and others may write to the folder."""
        self._end(is_well=True)

    def _end(self, *, is_well: bool) -> None:
        try:
            if is_well:
                self.wait()
        finally:
            end_background_save(self._parts.tables.collections, self)
            self._writer.close()
            if self._leave is not None:
                self._leave()

    @property
    def last(self) -> int:
        """After which step the newest is; 0: there is none."""
        return self._writer.last

    def resume(self) -> dict[str, Any]:
        """Loads the newest one that is not damaged, if there is any, and removes those after it, which are.

        Rows, modules, optimizers and whatever else has a state dictionary are as they were after step `last`, on any
        number of ranks, under any plan; so are the random numbers of torch, NumPy and Python, by which dropout draws.

        Returns:
            The plain values that were given to `step` or `write`; nothing where there is no checkpoint.

        Raises:
            CheckpointError: on every rank: all are damaged; says how. Or one that is not damaged does not fit what it
                is loaded into, or the system refused to read it, which says nothing of it: none is removed, and some of
                the state may be loaded. Or the folder cannot be written in, or what was written beside steps before
                could not be.
            RowmeshError: on every rank: another loop or run has its checkpoints there.
        """
        mesh, reasons = self._parts.tables.mesh, []
        wait_for_background_saves(self._parts.tables.collections)  # one that is not whole yet would be removed
        self.wait()
        steps = on_rank_0(mesh, FINDING, self._claimed_steps)
        for step in reversed(steps):
            try:
                saved = read(self._series.at(step), self._state)
            except DamagedCheckpointError as error:
                reasons.append(str(error))
                if step != steps[0] and mesh.rank == 0:
                    logger.warning(f"not resumed from step {step:,}: {error}")
                continue
            except CheckpointError as error:
                text = f"cannot go on from {self._series.at(step)}, which is not known to be damaged: {error}"
                raise type(error)(f"{text}. No checkpoint was removed") from error
            states = saved.pop(RANDOM_STATES, None)
            if not states:
                raise CheckpointError(
                    f"cannot go on from {self._series.at(step)}, which no loop wrote: random states are missing; read "
                    "it with rowmesh.load, and give another folder"
                )
            on_rank_0(mesh, FINDING, lambda step=step: self._series.remove_after(step))
            self._writer.last = self._tried = step
            self._may_write = True
            set_random_states(states[mesh.rank % len(states)], self._device)
            return saved
        if reasons:
            raise CheckpointError("; ".join(reasons))
        self._may_write = True
        return {}

    def step(self, step: int, values: Mapping[str, Any] | None = None) -> bool:
        """Writes one, or begins to, where that is due; to be called after every step, whose number is `step`.

        Args:
            step: how many steps were done.
            values: as for `write`.

        Returns:
            Whether one was written, or begun.

        Raises:
            CheckpointError, ConfigurationError: as for `write`.
        """
        every, step = self._every_steps, self._checked(step)
        if not every or step // every <= self._tried // every:
            return False
        self.write(step, values)
        return True

    def write(self, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint now, or begins to. Before, it waits for a checkpoint that is still being written.

        A step that was written last is not written again.

        Args:
            step: after which it is.
            values: plain values that `resume` is to return: of a loader whose batches are read ahead, say,
                `loader.state_after(step)`.

        Raises:
            CheckpointError: on every rank: it cannot be written, or the one before could not. The others are as they
                were, and the next may be written. Also where the folder has checkpoints that nothing was resumed from.
            RowmeshError: on every rank: another loop or run has its checkpoints there.
            ConfigurationError: the step is no whole number, or one before the newest.
        """
        step = self._checked(step)
        self._check_begun()
        tables, values = self._parts.tables, dict(values or {})
        wait_for_background_saves(tables.collections)
        self.wait()
        if both := sorted(set(values) & set(self._state)):
            raise ConfigurationError(f"{both[0]!r} is a value and a part of the state too; give the value another name")
        if step == self.last > 0:
            return
        everyone = gather_objects(tables.mesh, random_states(self._device), WRITING)
        dense = prepared(tables.mesh, lambda: {**self._parts.state("elsewhere"), **values, RANDOM_STATES: everyone})
        self._tried = step
        try:
            self._writer.begin(step, dense, {"steps": step, "written": utc_text()})
        except (OSError, MemoryError) as error:
            raise _failure(step, error) from error
        if self._writer.under_way is not None:
            begin_background_save(tables.collections, self)

    def wait(self) -> None:
        """Waits until the one that is being written is on disk; every rank calls it.

        Raises:
            CheckpointError: on every rank: it cannot be written.
        """
        if (step := self._writer.under_way) is None:
            end_background_save(self._parts.tables.collections, self)
            return
        try:
            self._writer.wait()
        except (OSError, MemoryError) as error:
            raise _failure(step, error) from error
        finally:
            if self._writer.under_way is None:  # else this was interrupted, and it is written still
                end_background_save(self._parts.tables.collections, self)

    def _checked(self, step: int) -> int:
        """A step that can come now."""
        if isinstance(step, bool) or not isinstance(step, Integral):
            raise ConfigurationError(f"the step is {step!r}; it must be a whole number")
        if step < max(self._tried, self.last):
            raise ConfigurationError(
                f"step {step:,} comes after {max(self._tried, self.last):,}, which a checkpoint was of; count steps "
                "over all epochs, and from `last` on where a loop goes on"
            )
        return int(step)

    def _check_begun(self) -> None:
        """Raises where what is in the folder would be taken for this loop's."""
        if self._may_write:
            return
        steps = on_rank_0(self._parts.tables.mesh, FINDING, self._claimed_steps)
        if steps:
            raise CheckpointError(
                f"{self._series.folder} has checkpoints, the newest after step {steps[-1]:,}; call resume() to go on "
                "from it, or give another folder"
            )
        self._may_write = True

    def _claimed_steps(self) -> list[int]:
        """The steps of the checkpoints in the folder, which is this loop's from now on."""
        if self._leave is None or not self._leave.alive:
            with ExitStack() as claim:
                try:
                    claim.enter_context(self._series.held(_ADVICE))
                except OSError as error:
                    raise CheckpointError(f"cannot write in {self._series.folder}: {described(error)}") from error
                self._leave = finalize(self, claim.pop_all().close)  # also where no block ends
        return self._series.steps()


def _failure(step: int, error: OSError | MemoryError) -> CheckpointError:
    reason = described(why) if isinstance(why := as_refusal(error), OSError) else str(why)
    return CheckpointError(f"the checkpoint after step {step:,} cannot be written: {reason}")
