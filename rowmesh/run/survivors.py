"""Survivors: when ranks are lost, a replica group that is whole writes a checkpoint, so that no step is lost.

With exact replicas each replica group holds all rows. When a rank dies, the ranks of a group that is still whole meet,
compare which step they stand after, and write a checkpoint of it before they end; the run that is started again goes on
from there. They meet through the store of the launcher, in a process group of their own.

Dynamic tables take back the decisions of batches that were opened after that step. Cores of tensor-train tables are the
same on all ranks.

Where no group can write (a rank died amid an update, so that ranks stand after different steps), the run goes on from
its last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from rowmesh import checkpoint
from rowmesh._support.faults import reach
from rowmesh._support.files.links import link_tree
from rowmesh._support.files.printable import say
from rowmesh._support.json_lines import last_step
from rowmesh._support.random_states import random_states, unseeded
from rowmesh.checkpoint.manifest import MANIFEST
from rowmesh.checkpoint.owned import BEST, remove
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.errors import CheckpointError, PeerError, RowmeshError
from rowmesh.mesh.interruptible import LOOK_S, run_interruptibly
from rowmesh.mesh.joining import CERTAIN_S
from rowmesh.mesh.peers import Peers
from rowmesh.mesh.waiting import gather_objects
from rowmesh.run.checkpoints import Checkpoints
from rowmesh.run.checks import naming_lost_peers
from rowmesh.run.drift import Drift
from rowmesh.run.gradients import saved_buffers
from rowmesh.run.job import Job
from rowmesh.run.requests import Requests
from rowmesh.run.run_folder import RunFolder
from rowmesh.tables.shard import TableShard, Which

MEETING = "meeting after a rank was lost"
_LONGEST_S = 15.0  # torchrun waits 30 before it kills


class Standing(NamedTuple):
    """The position of a rank in the run.

    Attributes:
        step: steps that its network has.
        is_between: whether it is between two steps, and all work after the first, such as a line of the log, is done.
        interval: what has added up for the next line of the log.
        lines: the step of the last line that the log must have by then; 0: none.
    """

    step: int
    is_between: bool
    interval: list[float]
    lines: int


State = Callable[[list[list[float]], list[dict[str, Any]]], dict[str, Any]]


class Survivors:
    """Writes the checkpoint of those that are left. Making one is collective: every rank does.

    Args:
        job: what is trained.
        run: the folder.
        checkpoints: of the run.
        drift: what follows the traffic.
        requests: whose signals are ignored while one is written.
        step: after which the run begins.

    Attributes:
        reason: why they could write nothing; "" where they may.
    """

    def __init__(
        self, job: Job, run: RunFolder, checkpoints: Checkpoints, drift: Drift | None, requests: Requests, step: int
    ) -> None:
        self._job, self._run, self._checkpoints, self._requests = job, run, checkpoints, requests
        self.reason, self._engine = _why_not(job, drift), job.embeddings.engine
        self._members: tuple[int, ...] = ()
        self._looks_at_lost = 0
        if not self.reason:
            grid = job.embeddings.plan.grid(next(iter(job.embeddings.plan.replicas.values())))
            self._members = next(tuple(group) for group in grid.groups if job.mesh.rank in group)
            self._own_state = random_states(job.embeddings.device)
            requests.finds_lost_ranks = True  # they may come to the end of the step
            self._states = gather_objects(job.mesh, self._own_state, "starting the training")
            self._note_steps(step)

    def _note_steps(self, step: int) -> None:
        """Rows may have had steps before the first of the run, and dynamic tables batches."""
        self._steps_before = self._engine.step_count - step
        for each in self._engine.shard_groups.all:
            each.begin_after(self._engine.step_count)
        if (resolver := self._engine.resolver) is not None:
            self._opened_before = resolver.step - step

    @contextmanager
    def saving(self, standing: Callable[[], Standing], state: State) -> Iterator[None]:
        """For the time of a block: where another rank is lost, those that are left write a checkpoint if they can.

        The error goes on. Signals interrupt nothing from then on, for the run ends.

        Args:
            standing: what this rank stands at.
            state: what a checkpoint has beside the rows, given the intervals and random states of all ranks.
        """
        try:
            with naming_lost_peers(self._job.mesh, "training"):
                yield
        except PeerError:
            if not self.reason:
                self._requests.ignore_signals()
                if text := self._outcome(standing(), state):
                    say(text)
            raise

    def _outcome(self, standing: Standing, state: State) -> str:
        """Writes; a line for the user from one rank of a replica group, "" from the others."""
        is_leader = self._job.mesh.rank == self._members[0]
        try:
            text = self._write(standing, state)
        except (OSError, RowmeshError) as error:
            text = str(error)
        except RuntimeError as error:  # of torch.distributed
            text = f"the ranks of this replica group did not meet: {(str(error) or repr(error)).splitlines()[0]}"
        except (AssertionError, LookupError) as error:  # a fault of rowmesh must not hide which rank was lost
            text = f"what batches decided could not be taken back: {error!r}"
        if not text:
            step = standing.step
            text = f"checkpoint after step {step:,} by ranks {list(self._members)}, which are all of a replica group"
            return (
                f"{text}; --resume loses no step, and the next line of metrics has their samples" if is_leader else ""
            )
        return f"no checkpoint by ranks {list(self._members)}: {text}" if is_leader else ""

    def _write(self, standing: Standing, state: State) -> str:
        """Returns why not; "" where one is written."""
        mesh = self._job.mesh
        self._checkpoints.drop()  # it lacks what the lost rank had to write
        reach("survivors.meet")
        peers = self._meet()
        everyone = peers.gather([*standing, self._problem(standing)], MEETING)
        for rank, (_, _, _, _, problem) in zip(self._members, everyone, strict=True):
            if problem:
                return f"rank {rank} {problem}"
        if len({step for step, *_ in everyone}) > 1:
            return f"they stand after steps {', '.join(str(step) for step, *_ in everyone)}"
        self._engine.failure.forgive()  # all ranks of this group have the rows of that step
        intervals = {rank: each[2] for rank, each in zip(self._members, everyone, strict=True)}
        whole = state([intervals.get(rank, [0.0] * 5) for rank in range(mesh.world_size)], self._states)
        # Gradients of the next step may be under way, and its batch, and more, be opened.
        whole["embedding_optimizer"] |= {"step_count": standing.step + self._steps_before}
        if (resolver := self._engine.resolver) is not None:
            resolver.go_back(standing.step + self._opened_before)
        metadata = self._checkpoints.metadata(standing.step)
        with self._claimed(peers, standing.step, whole["progress"]["best_step"] > 0) as place:
            rows = _RowsOfGroup(self._job.embeddings)
            checkpoint.save(place, rows, whole, metadata=metadata, peers=peers)
        return ""

    def _problem(self, standing: Standing) -> str:
        """Why this rank is no part of a checkpoint; "" where it is."""
        if not standing.is_between:
            return "is amid the end of a step"
        resolver = self._engine.resolver
        if self._engine.control.driver is not None or (resolver is not None and resolver.is_opening):
            return "has a thread that still exchanges rows"
        steps = standing.step + self._steps_before
        if not all(each.rows_after(steps) for each in self._engine.shard_groups.all):
            return "is amid an update of rows"
        if unseeded(random_states(self._job.embeddings.device)) != unseeded(self._own_state):
            return "draws random numbers by NumPy or Python, and those of a lost rank are not known"
        if self._members[0] and saved_buffers(self._job.network):
            return "has running means of its own, and a checkpoint has those of rank 0"
        if standing.lines and self._job.mesh.rank == self._members[0] and last_step(self._run.metrics) < standing.lines:
            return f"does not find the line of step {standing.lines:,} in {self._run.metrics.name}"
        return ""

    def _meet(self) -> Peers:
        """The ranks of this replica group, by a process group of their own."""
        if lost := self._lost():
            raise PeerError(f"rank {lost[0]} of them is lost")
        if len(self._members) == 1:
            return Peers(name=self._members.__getitem__)
        limit = timedelta(seconds=min(_LONGEST_S, self._job.config.checkpoint.grace_s))
        members = list(self._members)
        group = run_interruptibly(
            lambda: dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=True), self._look
        )
        assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
        return Peers(group, lambda call, _: run_interruptibly(call, self._look), self._members.__getitem__)

    def _look(self) -> None:
        lost = self._lost()
        self._looks_at_lost = self._looks_at_lost + 1 if lost else 0
        if self._looks_at_lost * LOOK_S >= CERTAIN_S:  # it has not just ended with its part done
            raise PeerError(f"rank {lost[0]} of them is lost")

    def _lost(self) -> list[int]:
        return [rank for rank in self._job.mesh.dead_ranks() if rank in self._members]

    @contextmanager
    def _claimed(self, peers: Peers, step: int, has_best: bool) -> Iterator[Path]:
        """The place of the checkpoint, which one group alone writes: others hold the same rows."""
        series = self._checkpoints.series
        place, claim = series.at(step), series.claim_of(step, self._job.mesh.pids[0] if self._job.mesh.pids else 0)
        problem = ""
        if self._job.mesh.rank == self._members[0]:
            try:
                self._begin(place, claim, has_best)
            except FileExistsError:
                problem = "it is there, or another replica group writes it"
            except OSError as error:
                problem = str(error)
        if problem := peers.gather(problem, MEETING)[0]:
            raise CheckpointError(problem)
        try:
            yield place
        finally:
            if self._job.mesh.rank == self._members[0]:
                claim.unlink(missing_ok=True)

    def _begin(self, place: Path, claim: Path, has_best: bool) -> None:
        place.parent.mkdir(exist_ok=True)
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
        try:
            if (place / MANIFEST).exists():
                raise FileExistsError(str(place))
            remove(place)
            if has_best:
                place.mkdir()
                link_tree(self._run.best, place / BEST)
        except BaseException:
            claim.unlink()
            raise


class _RowsOfGroup:
    """The rows of a replica group, all of which are written by it."""

    def __init__(self, embeddings: EmbeddingCollection) -> None:
        self._embeddings = embeddings

    def synchronize(self) -> None:
        """No-op: exact replicas do not differ."""

    def shards(self, which: Which, /) -> Sequence[TableShard]:
        """The shards that this rank owns in its group, where no other rank knows its ids of dynamic tables."""
        return self._embeddings.shards("group")


def _why_not(job: Job, drift: Drift | None) -> str:
    """Why those that are left could write nothing; "" where they may."""
    config, plan = job.config, job.embeddings.plan
    if job.mesh.world_size == 1 or not config.checkpoint.is_on:
        return "there are no other ranks, or no checkpoints"
    if config.parallel.synchronization != "exact" or set(plan.replicas.values()) in ({1}, set()):
        return "no replica group has all rows"
    if len(set(plan.replicas.values())) > 1:
        return "tables have different numbers of replicas"
    if drift is not None or config.train.device != "cpu":
        return "a plan that changes, or a GPU, has rows of several steps"
    return ""
