"""EmbeddingOptimizer behaves like a torch optimizer: groups, schedules, closures, state."""

import io

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.tables import Constant
from rowmesh.tables.update_rules import SGD, Adam

BATCH = SparseBatch.from_bags({"a": [[1]], "b": [[1]]})


def a_collection():
    return EmbeddingCollection(
        [
            TableSpec(name="a", num_rows=3, dim=1, optimizer=SGD(lr=1.0), initializer=Constant()),
            TableSpec(name="b", num_rows=3, dim=1, optimizer=Adam(lr=0.5), initializer=Constant()),
        ]
    )


def steps(embeddings, optimizer, count, schedule=None):
    for _ in range(count):
        optimizer.zero_grad()
        embeddings(BATCH).values.square().add(embeddings(BATCH).values * 3).sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [embeddings.local_rows(name)[0].values.clone() for name in "ab"]


def test_one_parameter_group_a_fused_group():
    optimizer = EmbeddingOptimizer(a_collection())
    assert [(group["name"], group["lr"]) for group in optimizer.param_groups] == [("dim1_sgd", 1.0), ("dim1_adam", 0.5)]
    with pytest.raises(TypeError, match="its collection's rows only"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def test_schedules_change_each_groups_learning_rate():
    embeddings = a_collection()
    optimizer = EmbeddingOptimizer(embeddings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.1**step, lambda step: 1.0])
    moved = []
    for _ in range(3):
        before = embeddings.local_rows("a")[0].values[1].item()
        embeddings(BATCH)["a"].sum().backward()
        optimizer.step()
        schedule.step()
        moved.append(before - embeddings.local_rows("a")[0].values[1].item())
    assert moved == pytest.approx([1.0, 0.1, 0.01], rel=1e-5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3, 0.5])


def test_closure():
    embeddings = a_collection()
    optimizer = EmbeddingOptimizer(embeddings)

    def closure():
        loss = embeddings(BATCH).values.sum() + 4.0
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(optimizer.step(closure)) == 4.0
    assert embeddings.local_rows("a")[0].values[1].item() == -1.0


def test_state_goes_through_a_file():
    """Adam's corrections count steps: a run that stops and goes on is the run that did not stop, to the bit."""
    embeddings = a_collection()
    optimizer = EmbeddingOptimizer(embeddings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps(embeddings, optimizer, 3, schedule)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), schedule.state_dict()), file)
    file.seek(0)
    resumed = a_collection()
    for name in "ab":
        (mine,), (theirs,) = resumed.local_rows(name), embeddings.local_rows(name)
        mine.values.copy_(theirs.values)
        for part in mine.state:
            mine.state[part].copy_(theirs.state[part])
    optimizer_state, schedule_state = torch.load(file)
    new = EmbeddingOptimizer(resumed)
    new_schedule = torch.optim.lr_scheduler.ExponentialLR(new, 0.5)
    new.load_state_dict(optimizer_state)
    new_schedule.load_state_dict(schedule_state)
    assert resumed.step_count == 3
    assert [group["lr"] for group in new.param_groups] == [0.125, 0.0625]
    assert [group["name"] for group in new.param_groups] == ["dim1_sgd", "dim1_adam"]
    expected = steps(embeddings, optimizer, 2, schedule)
    actual = steps(resumed, new, 2, new_schedule)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))
