"""Task: what a run predicts, and how that is computed and judged; the one thing in which kinds of runs differ.

The loop, checkpoints, placement and reports are the same for all of them. `rowmesh.run.tasks` says which task a
configuration asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor, nn

from rowmesh.collection.outputs import Embeddings
from rowmesh.ops.linear import Shape
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.fingerprint import Fingerprint
from rowmesh.run.graphs import Network
from rowmesh.run.job import Job
from rowmesh.run.own_model import OwnModel
from rowmesh.run.placement import PlacedTask
from rowmesh.run.stopping import EarlyStopping
from rowmesh.run.targets import Target
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec


class StepBatch(Protocol):
    """The batch of a step on one rank."""

    @property
    def sparse(self) -> SparseBatch:
        """The ids that are looked up."""
        ...

    @property
    def num_samples(self) -> int:
        """The number of samples, as samples a second count them."""
        ...

    @property
    def weight(self) -> float:
        """The divisor of the mean loss of this rank."""
        ...

    def take(self, samples: Tensor) -> Self:
        """The given samples (int64), in their order."""
        ...


class TrainingLoader(Protocol):
    """Batches of one rank in a reproducible order."""

    @property
    def waited_s(self) -> float:
        """How long iterating has waited for batches."""
        ...

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; None: there is a single epoch, of unknown length."""
        ...

    def __iter__(self) -> Iterator[StepBatch]:
        """The rest of the epoch."""
        ...

    def state_after(self, batches: int) -> dict[str, Any]:
        """The position after so many batches since the first."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        ...


@dataclass(frozen=True, eq=False)
class Computed:
    """The results of a step, or of a micro-batch, on this rank.

    Attributes:
        total: the sum of the losses, each times its weight.
        outputs, labels, weights: of clicks, for metrics of predictions that precede training on the samples.
    """

    total: Tensor
    outputs: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None


class Task(PlacedTask, Protocol):
    """A kind of run. Methods that take a job are collective; the job is of this task.

    Attributes:
        config: of the run, with a value in the place of every auto.
        data: what it reads.
        targets: what is predicted, one for each label; none for sequences.
    """

    @property
    def targets(self) -> tuple[Target, ...]:
        """See `Task`."""
        ...

    @property
    def is_relative(self) -> bool:
        """Whether a validation loss must fall by a share of itself to be better; else by an absolute amount."""
        ...

    def check(self) -> None:
        """Raises ConfigurationError or DataError where the configuration asks for what cannot be."""
        ...

    def make_network(self, tables: Sequence[TableSpec]) -> tuple[nn.Module, OwnModel | None]:
        """The dense network; and with its loss, where it takes vectors by feature."""
        ...

    def network_bytes(self, world_size: int, *, trains: bool) -> int:
        """About what the network takes on each rank."""
        ...

    @property
    def has_times(self) -> bool:
        """Whether batches have the time of their events, in the order of the steps."""
        ...

    @property
    def has_scores(self) -> bool:
        """Whether batches have scores of their ids."""
        ...

    def linear_rows(self) -> int:
        """Rows that linear layers multiply in a step of all ranks."""
        ...

    @property
    def linear_rows_vary(self) -> bool:
        """Whether they are another number in every step."""
        ...

    def score_shapes(self) -> list[Shape]:
        """Shapes of products that are computed as linear layers are, and are no layers of the network."""
        ...

    def fingerprint(self) -> Fingerprint:
        """Digests of what the ids of the data mean."""
        ...

    def check_split(self, key: str, split: str) -> str:
        """The split, which has something to evaluate on; else raises DataError."""
        ...

    @property
    def tested(self) -> str:
        """The split to evaluate at the end, or the place of other rows; "" for nothing."""
        ...

    def loader(self, job: Job, *, validates: bool, is_asked: Callable[[], bool]) -> TrainingLoader:
        """The batches to train on.

        Args:
            job: of the run.
            validates: whether some samples are held out, where there is no split for validation.
            is_asked: whether this rank was asked to end the run, for loaders that wait for rows.
        """
        ...

    def check_batch(self, batch: StepBatch, where: str) -> None:
        """Raises DataError where a batch cannot be trained on."""
        ...

    def global_weight(self, job: Job, batch: StepBatch, step: int) -> float:
        """The divisor of the mean loss of all ranks."""
        ...

    def compute(
        self, job: Job, batch: StepBatch, embeddings: Embeddings, network: Network | None, samples: slice | None = None
    ) -> Computed:
        """Forward: the loss of a batch, or of some of its samples."""
        ...

    def evaluate(self, job: Job, split: str, on_batch: Callable[[int], None]) -> Evaluation:
        """The metrics of a split."""
        ...

    def validate(self, job: Job) -> Evaluation:
        """The metrics of what is validated on."""
        ...

    def num_evaluation_batches(self, split: str) -> int | None:
        """The number of calls of `on_batch` in an evaluation; None: it is not known."""
        ...

    def chosen_by(self, loss: float | None) -> dict[str, float | None]:
        """Metadata of the model about the loss of the best validation."""
        ...

    def describe(self, job: Job) -> list[tuple[str, str]]:
        """Lines on the data."""
        ...

    def describe_steps(self, total_steps: int | None) -> list[tuple[str, str]]:
        """Lines on the steps, at most so many, and on what is not evaluated after them."""
        ...

    def describe_loss(self, job: Job) -> str:
        """The terms of the loss; "" where it is the log-loss."""
        ...

    def results(self, split: str, evaluation: Evaluation) -> list[str]:
        """A table of what training reached, beside what can be."""
        ...

    def optimum(self, split: str) -> Mapping[str, float] | None:
        """Scores of the true model, where the data were drawn from one."""
        ...

    def advice(self, job: Job, stopping: EarlyStopping, trained_steps: int, evaluation: Evaluation | None) -> list[str]:
        """Warnings about what went wrong."""
        ...
