"""ClickTask: labels of samples, predicted from dense and categorical features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rowmesh.data import Prepared
from rowmesh.data.profile import profile_prepared
from rowmesh.mesh.together import summed
from rowmesh.placement.plan import TableShape
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.run.advice import advice
from rowmesh.run.config import chosen
from rowmesh.run.evaluate import evaluate
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.fingerprint import Fingerprint, fingerprint
from rowmesh.run.job import Job
from rowmesh.run.labelled_task import LabelledTask, as_clicks
from rowmesh.run.report import click_data, results, steps_of_splits
from rowmesh.run.splits import check_file, check_split, check_training_splits, training_source, validation_source
from rowmesh.run.stopping import EarlyStopping
from rowmesh.run.targets import is_click, targets_of
from rowmesh.run.task import StepBatch, TrainingLoader


@dataclass(frozen=True, eq=False)
class ClickTask(LabelledTask[Prepared]):
    """The task of every model but those of sequences, on prepared samples."""

    def check(self) -> None:
        """Refuses splits that are not there, and losses that do not fit the labels."""
        check_training_splits(self.config, self.data)
        targets_of(self.config, self.data)

    def profile(
        self, shapes: Sequence[TableShape], request: Request, world_size: int, *, count_batches: bool = False
    ) -> Profile:
        """By the counts of the training split."""
        return profile_prepared(
            self.data,
            shapes,
            batch_size=request.batch_size if count_batches else None,
            shuffle=self.config.data.shuffle,
            seed=self.config.train.seed,
        )

    def fingerprint(self) -> Fingerprint:
        """Digests of vocabularies and dense features; see `rowmesh.run.fingerprint`."""
        return fingerprint(self.data)

    def check_split(self, key: str, split: str) -> str:
        """See `rowmesh.run.splits`; its file is looked at, too."""
        check_file(self.data, check_split(self.data, key, split))
        return split

    @property
    def tested(self) -> str:
        """The split for it, where there is one."""
        return self.config.data.test if self.config.data.test in self.data.splits else ""

    def loader(self, job: Job, *, validates: bool, is_asked: Callable[[], bool]) -> TrainingLoader:
        """The loader of the training split, without the samples that are cut off for validation."""
        return job.loader(
            training_source(self.config, self.data, validates=validates), shuffle=self.config.data.shuffle
        )

    def global_weight(self, job: Job, batch: StepBatch, step: int) -> float:
        """Σ w over the samples of all ranks; collective where samples have weights, else their number."""
        if as_clicks(batch).weights is not None:
            return summed(job.mesh, batch.weight, "summing the sample weights of all ranks")
        batch_size, validates = chosen(self.config.data.batch_size), chosen(self.config.train.eval_every) > 0
        num_samples = training_source(self.config, self.data, validates=validates).samples
        number = step % -(-num_samples // batch_size)
        return float(min(batch_size, num_samples - number * batch_size))

    def evaluate(self, job: Job, split: str, on_batch: Callable[[int], None]) -> Evaluation:
        """Every sample once."""
        return evaluate(job, split, on_batch)

    def validate(self, job: Job) -> Evaluation:
        """On the split for it, or what is cut off the training split."""
        source = validation_source(self.config, self.data)
        assert source is not None, "checked before the run"
        return evaluate(job, source)

    def num_evaluation_batches(self, split: str) -> int:
        """As many as hold all samples."""
        return -(-self.data.splits[split].samples // chosen(self.config.data.batch_size))

    def chosen_by(self, loss: float | None) -> dict[str, float | None]:
        """The loss, by its name."""
        return {"validation_log_loss" if is_click(self.targets) else "validation_loss": loss}

    def describe(self, job: Job) -> list[tuple[str, str]]:
        """Splits, features and how dense ones were transformed."""
        return click_data(job.clicks)

    def describe_steps(self, total_steps: int | None) -> list[tuple[str, str]]:
        """Epochs over the training split."""
        return steps_of_splits(self.config, self.data, total_steps)

    def results(self, split: str, evaluation: Evaluation) -> list[str]:
        """Beside the base rate and what is planted."""
        return results(split, evaluation, self.data.splits[split])

    def optimum(self, split: str) -> dict[str, float] | None:
        """Scores of the true probabilities, where the data were drawn from a model."""
        return self.data.splits[split].optimum

    def advice(self, job: Job, stopping: EarlyStopping, trained_steps: int, evaluation: Evaluation | None) -> list[str]:
        """See `rowmesh.run.advice`."""
        return advice(job, stopping, trained_steps, evaluation)
