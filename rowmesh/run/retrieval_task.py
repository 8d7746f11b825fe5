"""RetrievalTask and RawRetrievalTask: samples with labels, of which each item is told from the others of its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rowmesh.collection.outputs import Embeddings
from rowmesh.data import Prepared
from rowmesh.data.raw import RawData
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import RowsOfAllRanks
from rowmesh.run.click_task import ClickTask
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.graphs import Network
from rowmesh.run.job import Job
from rowmesh.run.labelled_task import Data, LabelledTask, as_clicks
from rowmesh.run.raw_task import RawTask
from rowmesh.run.retrieval import (
    check_rewards,
    evaluate_retrieval,
    problems,
    softmax_total,
    trained_row,
    two_tower,
)
from rowmesh.run.sequence.evaluation import RankingEvaluation, ranking_table
from rowmesh.run.splits import validation_source
from rowmesh.run.stopping import EarlyStopping
from rowmesh.run.task import Computed, StepBatch, TrainingLoader


@dataclass(frozen=True, eq=False)
class _Retrieves(LabelledTask[Data]):
    """The part of a task that the softmax over items changes, wherever samples come from."""

    @property
    def is_relative(self) -> bool:
        """1 − NDCG@10 is compared as it is."""
        return False

    def refuse(self) -> None:
        """Raises ConfigurationError where a key does not go with the softmax."""
        for problem in problems(self.config):
            raise ConfigurationError(f"{problem} with model.options.loss = 'in_batch_softmax'")

    def meet(self, job: Job) -> None:
        """Has the softmax compare with the items of all ranks. Collective."""
        softmax = two_tower(job).softmax
        assert softmax is not None
        softmax.gather = RowsOfAllRanks(job.mesh)

    def check_batch(self, batch: StepBatch, where: str) -> None:
        """Refuses values and labels that cannot be."""
        super().check_batch(batch, where)
        check_rewards(as_clicks(batch), where)

    def compute(
        self, job: Job, batch: StepBatch, embeddings: Embeddings, network: Network | None, samples: slice | None = None
    ) -> Computed:
        """The softmax of a whole batch: there are no micro-batches."""
        return Computed(softmax_total(job, as_clicks(batch), embeddings))

    def describe_loss(self, job: Job) -> str:
        """The loss, and what it compares with."""
        softmax = two_tower(job).softmax
        assert softmax is not None
        corrected = ", corrected for how often they are in one (log Q)" if softmax.frequency is not None else ""
        weight = f" and {self.data.schema.weight!r}" if self.data.schema.weight is not None else ""
        return f"softmax over the items of a batch{corrected}, samples weighted by {self.targets[0].name!r}{weight}"

    def chosen_by(self, loss: float | None) -> dict[str, float | None]:
        """The NDCG@10 of the validation."""
        return {"validation_ndcg@10": None if loss is None else 1.0 - loss}

    def results(self, split: str, evaluation: Evaluation) -> list[str]:
        """How the items that were chosen rank."""
        assert isinstance(evaluation, RankingEvaluation)
        title = (
            f"{split}: {evaluation.users:,} samples with a label above 0, the {evaluation.candidates:,} items of the "
            "split are ranked"
        )
        low, high = evaluation.means["ndcg@10"].interval
        return [
            *ranking_table(title, [trained_row(evaluation)]),
            f"  NDCG@10 within {low:.5f} and {high:.5f} (95 % over samples)",
        ]

    def optimum(self, split: str) -> None:
        """Not known: drawn clicks have true probabilities, not rankings."""

    def advice(self, job: Job, stopping: EarlyStopping, trained_steps: int, evaluation: Evaluation | None) -> list[str]:
        """Where the end came too early."""
        if len(stopping.losses) > 1 and stopping.best_step == max(stopping.losses):
            return ["warning   the last evaluation was the best: more train.epochs may be better"]
        return []


@dataclass(frozen=True, eq=False)
class RetrievalTask(_Retrieves[Prepared], ClickTask):
    """The task of retrieval on prepared samples."""

    def check(self) -> None:
        """As `ClickTask.check`; refuses keys that do not go with the softmax, too."""
        super().check()
        self.refuse()

    def loader(self, job: Job, *, validates: bool, is_asked: Callable[[], bool]) -> TrainingLoader:
        """As `ClickTask.loader`. Collective."""
        self.meet(job)
        return super().loader(job, validates=validates, is_asked=is_asked)

    def evaluate(self, job: Job, split: str, on_batch: Callable[[int], None]) -> Evaluation:
        """Every sample of a split with a label above 0."""
        return evaluate_retrieval(job, split, lambda: job.loader(split), on_batch)

    def validate(self, job: Job) -> Evaluation:
        """On the split for it, or what is cut off the training split."""
        source = validation_source(self.config, self.data)
        assert source is not None, "checked before the run"
        return evaluate_retrieval(job, "validation", lambda: job.loader(source))


@dataclass(frozen=True, eq=False)
class RawRetrievalTask(_Retrieves[RawData], RawTask):
    """The task of retrieval on raw rows."""

    def check(self) -> None:
        """As `RawTask.check`; refuses keys that do not go with the softmax, too."""
        super().check()
        self.refuse()

    def loader(self, job: Job, *, validates: bool, is_asked: Callable[[], bool]) -> TrainingLoader:
        """All rows, once. Collective."""
        self.meet(job)
        return super().loader(job, validates=validates, is_asked=is_asked)

    def evaluate(self, job: Job, split: str, on_batch: Callable[[int], None]) -> Evaluation:
        """Every row of a folder or file with a label above 0."""
        return evaluate_retrieval(job, "test", lambda: self.rows_of(job, split), on_batch)
