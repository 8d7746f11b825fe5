"""Mesh: the ranks of a run, as torchrun launched them."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Event
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rowmesh._support.faults import reach
from rowmesh.errors import ConfigurationError, PeerError, RowmeshError
from rowmesh.mesh.cancellation import Cancellation
from rowmesh.mesh.claims import Claims
from rowmesh.mesh.compiling import CompilingRanks
from rowmesh.mesh.failures import Failures
from rowmesh.mesh.grid import Grid
from rowmesh.mesh.groups import abort, backend_name, backend_timeout, extend_timeout
from rowmesh.mesh.interruptible import Stopwatch, run_interruptibly
from rowmesh.mesh.joining import join, meet
from rowmesh.mesh.liveness import LivenessCheck, forget_store, keep_store
from rowmesh.mesh.peers import Peers
from rowmesh.mesh.processes import RankProcesses
from rowmesh.mesh.watchdog import Watchdog

T = TypeVar("T")

_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_LATE_LOOK_S, _BROKEN_LOOK_S = 1.5, 5.0  # to Python's end a rank may take seconds on a busy machine
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks of a run.

    Attributes:
        rank: this process, 0 to world_size − 1.
        world_size: W.
        hosts: the index of the host of every rank; ranks share memory only within a host.
        pids: the process of every rank, on its host.
        timeout_s: how long a rank waits for another, in seconds.
        group: the process group, or None where there is one rank.
        whole: the mesh that this one is a part of, if it is one.
        members: of a part, the numbers of its ranks in the whole, by which messages name them.
        cancellation: when set, waits for the ranks of this mesh or of a part of it end with `PeerError`.

    Example:
        >>> with Mesh.connect() as mesh:
        ...     mesh.rank, mesh.world_size
        (0, 1)
    """

    rank: int = 0
    world_size: int = 1
    hosts: tuple[int, ...] = (0,)
    pids: tuple[int, ...] = field(default_factory=lambda: (os.getpid(),))
    timeout_s: float = 300.0
    group: Any = None
    whole: Mesh | None = field(default=None, repr=False)
    members: tuple[int, ...] = ()
    cancellation: Cancellation = field(default_factory=Cancellation, repr=False)
    # All parts of the whole that were made along with this one.
    _parts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    _ranks_per_node: int | None = field(default=None, repr=False)
    _prefix: str = field(default="", repr=False)  # of uses, whose process groups are then this mesh's own
    _owns_group: bool = field(default=False, repr=False)
    _subgroups: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict, repr=False)
    _claims: Claims = field(default_factory=Claims, repr=False)
    _lost: Event = field(default_factory=Event, repr=False)  # set when a collective failed or was abandoned
    _failures: Failures = field(default_factory=Failures, repr=False)

    @staticmethod
    def connect(timeout_s: float = 300.0) -> Mesh:
        """Joins the run that torchrun's variables describe; without them, a run of one process.

        Every rank must call it; it blocks until all have. Uses an initialised default process group if there is one.

        A rank of a script of your own outlives a torchrun that is killed with SIGKILL, as any program under torchrun
        does; the commands of rowmesh end with it.

        Raises:
            ConfigurationError: some of the variables are set and others are not, or the process group that is there
                cannot move memory of the CPU.
            PeerError: not all ranks came within the timeout, or one died; names it.
        """
        owns_group = False
        reach("mesh.connect")
        if not dist.is_initialized():
            if not _launched():
                return Mesh(timeout_s=timeout_s)
            owns_group = True
            # Its functions take the default group as a default argument. Imported while a group exists (torch.optim
            # does so), they would keep that group and its threads alive until the interpreter is gone, which can
            # abort the process.
            importlib.import_module("torch.distributed.nn.functional")
            # Without an interface gloo resolves the host name, which many containers cannot.
            if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost", "::1"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            join(timeout_s)
        group = dist.group.WORLD
        _check_backend(group)
        identities = meet(group, timeout_s)
        keep_store()
        first_seen = list(dict.fromkeys(host for host, _ in identities))
        mesh = Mesh(
            rank=dist.get_rank(group),
            world_size=dist.get_world_size(group),
            hosts=tuple(first_seen.index(host) for host, _ in identities),
            pids=tuple(pid for _, pid in identities),
            timeout_s=timeout_s,
            group=group,
            _owns_group=owns_group,
        )
        if owns_group:  # a program that never closes it would sometimes abort: gloo's threads outlive the interpreter
            atexit.register(mesh._close_at_exit)
        return mesh

    @property
    def run(self) -> Mesh:
        """All ranks that were launched together, of which this mesh may be a part."""
        return self if self.whole is None else self.whole.run

    @property
    def failures(self) -> Failures:
        """Where waits of the run look whether a step ended half way on another rank."""
        return self.run._failures

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks share a host."""
        return len(set(self.hosts)) == 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks of every host where all have equally many, one host after the other; else all ranks are one node."""
        if self._ranks_per_node is not None:
            return self._ranks_per_node
        size = self.hosts.count(self.hosts[0])
        blocks = tuple(self.hosts[rank // size * size] for rank in range(self.world_size))
        return size if self.hosts == blocks and len(set(self.hosts)) * size == self.world_size else self.world_size

    def subgroup(self, partition: Sequence[Sequence[int]], use: str = "", backend: str | None = None) -> Any:
        """The process group of the part that this rank is in. Collective: every rank names the same parts.

        Groups are made once and kept until the mesh is closed, since each has connections and threads of its own.

        Args:
            partition: the ranks of each part.
            use: groups of the same ranks for different uses are different groups, whose messages cannot cross.
            backend: of torch.distributed; one for each use. By default that of the whole.

        Raises:
            PeerError: a rank did not come within the timeout.
        """
        if self.whole is not None:  # whose ranks all make the groups of all parts
            of_whole = [[ranks[r] for r in part] for ranks in self._parts for part in partition]
            return self.whole.subgroup(of_whole, self._prefix + use, backend)
        mine = None
        for part in map(tuple, partition):  # all ranks make all groups, in the same order
            if (use, part) not in self._subgroups:
                reach("mesh.subgroup")
                self._subgroups[use, part] = self._connect(list(part), backend)
            if self.rank in part:
                mine = self._subgroups[use, part]
        return mine

    def _connect(self, part: list[int], backend: str | None) -> Any:
        limit = timedelta(seconds=self.timeout_s)
        doing = f"connecting ranks {part}"
        group = self.run_interruptibly(lambda: dist.new_group(part, timeout=limit, backend=backend), doing)
        if self._owns_group:
            extend_timeout(group, self.timeout_s)
        return group

    def run_interruptibly(self, call: Callable[[], T], doing: str) -> T:
        """Returns `call()`, which waits for other ranks in code that neither signals nor deaths of ranks interrupt.

        Raises:
            PeerError: a rank died, was stopped for the mesh's timeout, or the call ended in vain; names it.
        """
        watchdog = Watchdog(
            self.processes,
            LivenessCheck(self.run.rank, map(self.name, range(self.world_size)), self.group),
            doing,
            timeout_s=self.timeout_s,
            lost=self.run._lost,
        )
        try:
            result = run_interruptibly(call, watchdog)
        except PeerError:
            watchdog.close()
            raise
        except RuntimeError as error:
            raise self.peer_error(doing, error, watchdog.watch, watchdog.calls) from error
        watchdog.close()
        return result

    @property
    def peers(self) -> Peers:
        """The same ranks where they do something together that may take longer than the timeout; a new value each time.

        In a process group that the program made itself they wait as long as that group does.
        """
        return Peers(self.group, self.run_interruptibly, self.name)

    @property
    def group_timeout(self) -> timedelta:
        """How long collectives of the mesh's process groups wait unless they are aborted."""
        return backend_timeout(self.timeout_s) if self.run._owns_group else timedelta(seconds=self.timeout_s)

    def with_process_group(self, use: str) -> Mesh:
        """The same ranks with a process group of their own. Collective.

        Messages of one thread through it cannot mix with those of another through the group of this mesh.

        Args:
            use: as for `subgroup`.

        Raises:
            PeerError: a rank did not come within the timeout.
        """
        if self.group is None:
            return self
        everyone = tuple(range(self.world_size))
        group = self.subgroup([everyone], use)
        return replace(
            self,
            group=group,
            whole=self,
            members=everyone,
            cancellation=Cancellation(),
            _parts=(everyone,),
            _prefix="",
            _owns_group=False,
        )

    def apart(self, name: str) -> Mesh:
        """The same ranks with process groups of their own, for all uses. Collective.

        Tables of such a mesh can be trained by a pipeline while another one trains tables of this mesh.

        Args:
            name: meshes apart of one name have the same groups, which are kept until the mesh is closed.

        Raises:
            PeerError: a rank did not come within the timeout.

        Example:
            >>> with Mesh.connect() as mesh:
            ...     mesh.apart("items").world_size
            1
        """
        return replace(self.with_process_group(name), _prefix=f"{name}/", _claims=Claims())

    def claim(self, use: str) -> None:
        """Has the groups of a use for one owner, whose threads send through them, until `unclaim`.

        Waits for the threads of an owner that has ended but for them, up to the mesh's timeout.

        Raises:
            RowmeshError: there is an owner already, whose messages would cross those of another.
        """
        if self.world_size > 1 and not self._claims.take(use, self.timeout_s):
            raise RowmeshError(
                f"rank {self.run.rank}: a {use} runs on this mesh already, and messages of two would cross; finish it, "
                "or leave its loop, before the next one begins; where its loop has failed, close it. Collections of "
                "meshes apart, mesh.apart(name), have pipelines side by side"
            )

    def unclaim(self, use: str) -> None:
        """Lets somebody else claim a use."""
        self._claims.release(use)

    def end_claim(self, use: str) -> None:
        """Announces that `unclaim` follows as soon as the owner's threads have ended; the next claim waits for that."""
        self._claims.end(use)

    def part(self, partition: Sequence[Sequence[int]], ranks_per_node: int | None = None) -> Mesh:
        """The part that this rank is in, as a mesh of its own. Collective: every rank names the same parts.

        Args:
            partition: the ranks of each part, ascending.
            ranks_per_node: of every part; by default as its hosts are.

        Raises:
            PeerError: a rank did not come within the timeout.
        """
        if len(partition) == 1:
            return self
        group = self.subgroup(partition) if len(partition[0]) > 1 else None
        mine = tuple(next(part for part in partition if self.rank in part))
        hosts = [self.hosts[rank] for rank in mine]
        first_seen = list(dict.fromkeys(hosts))
        return Mesh(
            rank=mine.index(self.rank),
            world_size=len(mine),
            hosts=tuple(first_seen.index(host) for host in hosts),
            pids=tuple(self.pids[rank] for rank in mine),
            timeout_s=self.timeout_s,
            group=group,
            whole=self,
            members=mine,
            cancellation=self.cancellation,
            _parts=tuple(map(tuple, partition)),
            _ranks_per_node=ranks_per_node,
        )

    def device_mesh(self, grid: Grid) -> DeviceMesh:
        """Torch's view of a grid, with dimensions "replica" and "shard", for code that takes one. Collective.

        Its process groups are its own, beside those that rows travel by.

        Example (on four ranks):
            mesh.device_mesh(Grid(4, replicas=2)).get_local_rank("shard")
        """
        ranks = torch.tensor([list(group) for group in grid.groups], device="cpu")
        return DeviceMesh("cpu", ranks, mesh_dim_names=("replica", "shard"))

    def name(self, rank: int) -> int:
        """The number of a rank in messages: that in the run, also where this is a part of a part."""
        return rank if self.whole is None else self.whole.name(self.members[rank])

    @property
    def liveness(self) -> LivenessCheck:
        """The check of the whole mesh: a rank that waits for a rank that waits for a third names the third."""
        if self.whole is not None:
            return self.whole.liveness
        return LivenessCheck(self.rank, range(self.world_size), self.group)

    @property
    def compiling(self) -> CompilingRanks:
        """Which ranks of the run compile kernels; a new value each time."""
        run = self.run
        return CompilingRanks(run.rank, run.world_size, run.group, self.processes)

    @property
    def processes(self) -> RankProcesses:
        """The processes of all ranks of the run."""
        run = self.run
        return RankProcesses(run.rank, run.hosts, run.pids)

    def dead_ranks(self) -> list[int]:
        """Ranks of the whole on this host whose process is gone (ranks on other hosts cannot be seen)."""
        return self.processes.seen("gone")

    def peer_error(
        self, doing: str, cause: BaseException, watch: Stopwatch | None = None, calls: LivenessCheck | None = None
    ) -> PeerError:
        """The error for a collective that failed, or was waited for in vain.

        It names the ranks that died, else those that did not come to it.

        Args:
            doing: what the collective was for.
            cause: what it failed of.
            watch: how long it was waited for.
            calls: which ranks wait for the same; default: which wait for anything.
        """
        if self.whole is not None:
            return self.whole.peer_error(doing, cause, watch, calls)
        self._lost.set()
        calls, absent = calls or self.liveness, None
        calls.answer()
        is_late = bool(_TIMED_OUT.search(str(cause)))
        # A broken connection is seen before the process is gone, and not by all at once.
        until = time.monotonic() + (_LATE_LOOK_S if is_late else _BROKEN_LOOK_S)
        while True:
            if dead := self.dead_ranks():
                return self.processes.died(dead, doing)
            absent = calls.absent()
            if time.monotonic() >= until:
                break
            time.sleep(0.05)
        if is_late:
            return PeerError(f"rank {self.rank}: {self._waited_in_vain(absent, doing, watch)}")
        return PeerError(f"rank {self.rank}: {self._broken(absent, doing, watch)}: {cause}")

    def abandon_collective(self) -> None:
        """Marks a collective that is still under way as abandoned; closing the mesh aborts it."""
        self.run._lost.set()

    def _waited_in_vain(self, absent: Sequence[int] | None, doing: str, watch: Stopwatch | None) -> str:
        if absent:
            return f"{self.not_come(absent, watch)} while {doing}"
        what = "which ranks are missing is unknown, since the process through which they met is gone"
        if absent is not None:
            what = (
                "all ranks wait, and not for the same: some stopped waiting before, or ranks do not call forward and "
                "step equally often and in the same order"
            )
        waited = "" if watch is None else f" for {watch}"
        return f"waited in vain{waited} while {doing} (the timeout is {self.timeout_s:.0f} s); {what}"

    def _broken(self, absent: Sequence[int] | None, doing: str, watch: Stopwatch | None) -> str:
        after = "" if watch is None else f", after {watch}"
        text = f"a connection between ranks broke while {doing}{after}"
        if absent:
            missing = self.processes.describe(absent)
            return f"{text}; missing: {missing}; the output of the one that ended or stopped says why"
        return f"{text}; a rank ended or stopped waiting, and its own output says why"

    def not_come(self, absent: Sequence[int], watch: Stopwatch | None = None) -> str:
        """Which ranks of the whole others wait for in vain, and what to do about it; a part of a message.

        Args:
            absent: their numbers.
            watch: how long they were waited for.
        """
        if self.whole is not None:
            return self.whole.not_come(absent, watch)
        waited = "" if watch is None else f" (this rank waited {watch})"
        return (
            f"waited in vain for {self.processes.describe(absent)}; every rank must call forward and step equally "
            f"often, and within the timeout of {self.timeout_s:.0f} s{waited}"
        )

    def close(self) -> None:
        """Leaves the process group if `connect` joined it. May be called again."""
        atexit.unregister(self._close_at_exit)
        if self._owns_group and dist.is_initialized():
            if self._lost.is_set():
                for group in (self.group, *self._subgroups.values()):
                    abort(group)
            # gloo's threads take the GIL to release the tensors of the last call. The owner of the last reference to
            # the group (DistributedDataParallel, say) joins those threads, holding the GIL: they must be done by then.
            time.sleep(0.05)
            forget_store()
            object.__setattr__(self, "group", None)  # the last reference ends the group's threads
            dist.destroy_process_group()

    def _close_at_exit(self) -> None:
        self._lost.set()  # an error or a signal may have ended the program while a collective was under way
        self.close()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._lost.set()
        self.close()


def _launched() -> bool:
    present = [name for name in _VARIABLES if name in os.environ]
    if len(present) < len(_VARIABLES) and {"RANK", "WORLD_SIZE"} & set(present):
        missing = sorted(set(_VARIABLES) - set(present))
        raise ConfigurationError(
            f"{', '.join(present)} are set but {', '.join(missing)} are not; launch with torchrun, or unset them"
        )
    return len(present) == len(_VARIABLES)


def _check_backend(group: Any) -> None:
    if (name := backend_name(group)) != "gloo":
        raise ConfigurationError(
            f"the default process group moves CPU tensors with {name}, and rowmesh needs gloo there: start it with "
            'init_process_group("cpu:gloo,cuda:nccl"), or call Mesh.connect before there is a process group'
        )
