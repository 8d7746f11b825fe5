"""Learning rates, and what schedules know of them, go to the tables that had them."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import rowmesh
from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, JointOptimizer, SparseBatch, TableSpec
from rowmesh.checkpoint.sharded_state import ShardedState
from rowmesh.errors import CheckpointError, RowmeshError
from rowmesh.tables import Constant

LRS = {"a": 1.0, "b": 0.01, "c": 0.1}


def made(names="abc", lrs=None):
    """Tables that differ in their learning rates alone: their groups are dim4_sgd, dim4_sgd_2, dim4_sgd_3."""
    lrs = LRS if lrs is None else lrs
    tables = [TableSpec(name=n, num_rows=4, dim=4, optimizer=SGD(lr=lrs[n]), initializer=Constant()) for n in names]
    embeddings = EmbeddingCollection(tables)
    return embeddings, EmbeddingOptimizer(embeddings)


def rates_of(optimizer, key="lr"):
    return {table: group[key] for group in optimizer.param_groups for table in group["tables"]}


def moved(embeddings, optimizer):
    """How far a gradient of 1 moves a row of each table."""
    names = [table.name for table in embeddings.tables]
    before = {name: embeddings.held_rows(name)[0].values[1, 0].item() for name in names}
    embeddings(SparseBatch.from_bags({name: [[1]] for name in names})).values.sum().backward()
    optimizer.step()
    return {name: before[name] - embeddings.held_rows(name)[0].values[1, 0].item() for name in names}


@pytest.mark.parametrize("names", ["abc", "cba", "bca"])
def test_rates_follow_their_tables(names, caplog):
    _, optimizer = made()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    embeddings, other = made(names)
    other.load_state_dict(optimizer.state_dict())
    half = {name: lr / 2 for name, lr in LRS.items()}
    assert rates_of(other) == half
    assert moved(embeddings, other) == pytest.approx(half)
    assert ("the state of a schedule does not" in caplog.text) == (names != "abc")
    names_of = {group["tables"][0]: group["name"] for group in made(names)[1].param_groups}
    assert rates_of(other, "name") == names_of


SCHEDULES = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=20, cycle_momentum=False
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer,
        [group["lr"] for group in optimizer.param_groups],
        [2 * group["lr"] for group in optimizer.param_groups],
        cycle_momentum=False,
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, min_lr=[group["lr"] / 10 for group in optimizer.param_groups], patience=0
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)],
        [3],
    ),
}


def advance(schedule, count):
    for _ in range(count):
        schedule.optimizer.step()
        schedule.step(*[1.0] * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_follow_their_tables(tmp_path, name, joint):
    def parts(names):
        embeddings, optimizer = made(names)
        dense = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=7.0)
        whole = JointOptimizer(dense, optimizer) if joint else optimizer
        schedule = SCHEDULES[name](optimizer)
        return {"tables": embeddings, "optimizer": whole, "schedule": schedule}, optimizer

    state, optimizer = parts("abc")
    advance(state["schedule"], 2)
    rowmesh.save(tmp_path / "model", state)
    other, of_rows = parts("bca")
    rowmesh.load(tmp_path / "model", other)
    assert rates_of(of_rows) == rates_of(optimizer)
    advance(state["schedule"], 5)
    advance(other["schedule"], 5)
    assert rates_of(of_rows) == pytest.approx(rates_of(optimizer))


def test_schedules_of_joint_optimizers_follow_their_tables(tmp_path):
    def parts(names):
        embeddings, optimizer = made(names)
        both = JointOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=7.0), optimizer)
        schedule = lr_scheduler.LambdaLR(both, lambda step: 0.5**step)
        return {"tables": embeddings, "optimizer": both, "schedule": schedule}, optimizer

    state, optimizer = parts("abc")
    rowmesh.save(tmp_path / "model", state)
    other, of_rows = parts("cab")
    rowmesh.load(tmp_path / "model", other)
    advance(other["schedule"], 1)
    assert rates_of(of_rows) == pytest.approx({name: lr / 2 for name, lr in LRS.items()})
    assert other["optimizer"].param_groups[0]["lr"] == 3.5
    assert rates_of(optimizer) == LRS


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_give_rates_to_their_tables(tmp_path):
    from torch.distributed import checkpoint as dcp

    def parts(names):
        embeddings, optimizer = made(names)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"tables": embeddings, "optimizer": optimizer, "schedule": schedule}

    state = parts("abc")
    advance(state["schedule"], 1)
    dcp.save({"training": ShardedState(state)}, checkpoint_id=tmp_path / "model")
    other = parts("cab")
    dcp.load({"training": ShardedState(other)}, checkpoint_id=tmp_path / "model")
    assert rates_of(other["optimizer"]) == {name: lr / 2 for name, lr in LRS.items()}
    advance(other["schedule"], 1)
    assert rates_of(other["optimizer"]) == pytest.approx({name: lr / 4 for name, lr in LRS.items()})


def test_tables_that_are_fused_now_and_were_not():
    _, apart = made("ab")
    embeddings, fused = made("ab", {"a": 1.0, "b": 1.0})
    assert len(fused.param_groups) == 1
    before = embeddings.step_count
    with pytest.raises(CheckpointError, match=r"tables 'a' and 'b' are updated together here.*0\.01"):
        fused.load_state_dict({**apart.state_dict(), "step_count": 7})
    assert embeddings.step_count == before
    for group in apart.param_groups:
        group["lr"] = 0.25
    fused.load_state_dict(apart.state_dict())
    assert rates_of(fused) == {"a": 0.25, "b": 0.25}
    apart.load_state_dict(fused.state_dict())
    assert rates_of(apart) == {"a": 0.25, "b": 0.25}


def changed(state: dict[str, Any], **groups):
    return {**state, "param_groups": [{**group, **groups} for group in state["param_groups"]]}


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda state: made("ab")[1].state_dict(),
            r"of an optimizer of the tables \['a', 'b'\], this one has \['a', 'b',",
        ),
        (
            lambda state: torch.optim.SGD([torch.zeros(2)]).state_dict(),
            r"no state of an EmbeddingOptimizer.*step_count",
        ),
        (lambda state: {**state, "rows": None}, "has no optimizer states of rows"),
        (lambda state: {**state, "rows": {"a.sum": torch.zeros(4)}}, r"lacks nothing and has \['a.sum'\] besides"),
        (
            lambda state: {**state, "param_groups": [{"name": "x", "params": [0], "lr": 1.0}]},
            "has 1 parameter groups, and this optimizer 3",
        ),
        (
            lambda state: {
                **state,
                "param_groups": [{"tables": group["tables"], "params": [0]} for group in state["param_groups"]],
            },
            "group 'dim4_sgd' has no learning rate",
        ),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, said):
    embeddings, optimizer = made()
    moved(embeddings, optimizer)
    state = changed(optimizer.state_dict(), lr=5.0)
    state["step_count"] = 9
    before, groups = embeddings.state_dict(), copy.deepcopy(rates_of(optimizer))
    with pytest.raises(CheckpointError, match=said):
        optimizer.load_state_dict(change(state))
    assert embeddings.step_count == 1
    assert rates_of(optimizer) == groups
    assert all(torch.equal(rows, embeddings.state_dict()[name]) for name, rows in before.items())


def test_a_joint_optimizer_takes_all_states_or_none():
    def both():
        embeddings, optimizer = made()
        dense = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=7.0)
        return embeddings, dense, JointOptimizer(dense, optimizer), optimizer

    _, dense, joint, optimizer = both()
    good = copy.deepcopy(joint.state_dict())
    for group in (*good["optimizers"][0]["param_groups"], *good["optimizers"][1]["param_groups"]):
        group["lr"] = 3.0
    others = {
        "other tables": {"optimizers": [good["optimizers"][0], made("ab")[1].state_dict()]},
        "other rows": {"optimizers": [good["optimizers"][0], {**good["optimizers"][1], "rows": {"x": 1}}]},
        "another network": {"optimizers": [torch.optim.SGD([torch.zeros(2)]).state_dict(), good["optimizers"][1]]},
        "one": {"optimizers": good["optimizers"][:1]},
        "no joint": good["optimizers"][1],
    }
    for kind, state in others.items():
        with pytest.raises((CheckpointError, ValueError)):
            joint.load_state_dict(state)
        assert dense.param_groups[0]["lr"] == 7.0, kind
        assert rates_of(optimizer) == LRS, kind
    joint.load_state_dict(good)
    assert [group["lr"] for group in joint.param_groups] == [3.0] * 4


@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy.copy, pickle.dumps])
def test_an_optimizer_of_rows_is_not_copied(make_copy):
    _, optimizer = made()
    for each in (optimizer, JointOptimizer(optimizer)):
        with pytest.raises(RowmeshError, match=r"optimizer of rows cannot be copied or pickled.*load_state_dict"):
            make_copy(each)
