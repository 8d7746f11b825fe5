"""Steps: when nothing of a pipeline is under way."""

from types import SimpleNamespace
from typing import Any

from rowmesh.pipeline.recorder import Recorder
from rowmesh.run.config import PipelineConfig
from rowmesh.run.steps import MEASURED_STEPS, WARM_UP_STEPS, PipelinedSteps


class Loops:
    """Stands in for pipelines; notes after how many steps of a trainer a loop begins."""

    reasons, threads = ("for a test",), "of a test"

    def __init__(self, trainer):
        self.trainer, self.begun, self.recorder = trainer, [], Recorder()

    def windows(self, items):
        self.begun.append(self.trainer.step)
        return (SimpleNamespace(item=item) for item in items)


def test_there_are_pauses_while_steps_are_measured_too(monkeypatch):
    trainer = SimpleNamespace(step=0, train_window=lambda window: 0.0)
    loops = Loops(trainer)
    config = PipelineConfig(depth="auto", micro_batches="auto")
    monkeypatch.setattr(PipelinedSteps, "_make", lambda *arguments, **options: loops)
    monkeypatch.setattr(PipelinedSteps, "_chosen", lambda steps, config: (PipelineConfig(depth=1), None))
    job: Any = SimpleNamespace(config=SimpleNamespace(pipeline=config))
    steps = PipelinedSteps(trainer, job, [5], lambda text: None)
    batches: Any = iter(range(100))
    assert [batch for batch, _ in counted(trainer, steps(batches, 32))] == list(range(32))
    pauses, changes = {*range(0, 32, 5)}, {0, WARM_UP_STEPS, WARM_UP_STEPS + MEASURED_STEPS}
    assert loops.begun == sorted(pauses | changes)


def counted(trainer, trained):
    for each in trained:
        trainer.step += 1
        yield each
