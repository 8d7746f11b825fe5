"""Runs that the memory of a host cannot hold are refused before they take any."""

import dataclasses

import pytest
import torch

from rowmesh._support import memory
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.placement import Plan, TableShape
from rowmesh.run import preflight
from rowmesh.run.commands import run_training
from rowmesh.run.defaults import choose_defaults
from rowmesh.run.network_memory import network_bytes
from rowmesh.run.networks import make_network, network_dtype
from rowmesh.run.preflight import check_memory
from rowmesh.run.resolve import resolve
from rowmesh.run.tables import table_specs
from rowmesh.run.trainer import make_optimizer

SHAPE = TableShape("item", 1000, value_bytes=64, gradient_bytes=64)


def refusal(mesh, plan, hosts, available, averages=False):
    """The warnings of a rank where each has so much memory available, by what limits it."""
    available = [room if isinstance(room, dict) else {"": room} for room in available]
    patch = pytest.MonkeyPatch()
    patch.setattr(memory, "rooms", lambda: available[mesh.rank])
    try:
        check_memory(plan, dataclasses.replace(mesh, hosts=hosts), averages=averages)
    except ConfigurationError as error:
        return str(error)
    finally:
        patch.undo()
    return ""


def test_each_host_must_hold_what_its_ranks_get(ranks):
    """A host has what the rank that measured least says."""
    plan = Plan.cyclic([SHAPE], 4, 2)  # 16,000 bytes a rank
    assert ranks.run(refusal, plan, (0, 0, 1, 1), [32_000] * 4, world_size=4) == [""] * 4
    assert ranks.run(refusal, plan, (0, 0, 0, 0), [64_000] * 4, world_size=4) == [""] * 4
    for hosts, available, named in [
        ((0, 0, 1, 1), [99_000, 99_000, 99_000, 31_999], "(rank 2, 3)"),
        ((0, 0, 0, 0), [63_999, 99_000, 99_000, 99_000], "(rank 0, 1, 2, 3)"),
    ]:
        messages = ranks.run(refusal, plan, hosts, available, world_size=4)
        assert named in messages[0]
        assert messages == [messages[0]] * 4


def test_the_message_says_what_is_there_and_how_many_ranks_it_takes(monkeypatch):
    monkeypatch.setattr(memory, "rooms", lambda: {"": 40_000})
    monkeypatch.setattr(preflight.platform, "node", lambda: "red")
    with pytest.raises(
        ConfigurationError, match=r"host red \(rank 0\) has 40 kB of .* gives its ranks 64 kB"
    ) as refused:
        check_memory(Plan.cyclic([SHAPE], 1), Mesh(), averages=False)
    assert "takes at least 2 ranks with 40 kB each: start more, on more hosts, free memory" in str(refused.value)
    monkeypatch.setattr(memory, "rooms", lambda: {"": 63})
    with pytest.raises(ConfigurationError, match="no number of ranks with 63 B each"):
        check_memory(Plan.cyclic([SHAPE], 1), Mesh(), averages=False)


def test_replicas_count(ranks):
    plan = Plan.cyclic([SHAPE], 2, replicas=2)
    assert ranks.run(refusal, plan, (0, 1), [64_000, 64_000]) == ["", ""]
    messages = ranks.run(refusal, plan, (0, 0), [64_000, 64_000])
    assert all("takes at least 2 ranks with 32 kB each" in message for message in messages)
    assert all("form fewer replica groups" in message for message in messages)
    assert ranks.run(refusal, plan, (0, 1), [65_000, 65_000], True) == ["", ""]  # a mark a row
    assert all(ranks.run(refusal, plan, (0, 1), [64_999, 65_000], True))


def test_ranks_in_control_groups_of_their_own_are_not_added_up(ranks):
    plan = Plan.cyclic([SHAPE], 2)  # 32,000 bytes a rank
    apart = [{"": 99_000, "0:7": 32_000}, {"": 99_000, "0:8": 32_000}]
    assert ranks.run(refusal, plan, (0, 0), apart) == ["", ""]
    for shared, named in [
        ([{"": 99_000, "0:7": 63_999}] * 2, "(rank 0, 1) has 64.0 kB"),
        ([{"": 99_000, "0:7": 31_999}, {"": 99_000}], "(rank 0) has 32.0 kB"),
        ([{"": 63_999, "0:7": 90_000}, {"": 99_000, "0:8": 90_000}], "(rank 0, 1) has 64.0 kB"),
    ]:
        messages = ranks.run(refusal, plan, (0, 0), shared)
        assert named in messages[0]
        assert messages == [messages[0]] * 2


def test_the_network_counts(monkeypatch):
    monkeypatch.setattr(memory, "rooms", lambda: {"": 100_000})
    plan = Plan.cyclic([SHAPE], 1)  # 64,000 bytes
    check_memory(plan, Mesh(), averages=False, network_bytes=36_000)
    with pytest.raises(ConfigurationError, match=r"state and the dense network 36.0 kB .* model.top"):
        check_memory(plan, Mesh(), averages=False, network_bytes=36_001)
    with pytest.raises(ConfigurationError, match=r"the dense network 100 kB .* make model.bottom, model.top"):
        check_memory(plan, Mesh(), ["item"], averages=False, network_bytes=100_001)
    monkeypatch.setattr(memory, "rooms", lambda: {"": 50_000})
    with pytest.raises(ConfigurationError, match="at least 2 ranks with 40 kB each: start more"):
        check_memory(plan, Mesh(), averages=False, network_bytes=10_000)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["data.batch_size=4096", "model.bottom=[64, 32]", "optimizer.name=sgd"],
        ["data.batch_size=8", "model.top=[512]", "optimizer.name=adagrad", "tables.dtype=float64"],
        ["optimizer.name=sgd", "optimizer.momentum=0.9", "model.bottom=[300]"],
    ],
    ids=" ".join,
)
def test_the_network_takes_about_what_is_predicted(config_file, clicks, options):
    """Parameters, gradients and moments to the byte; what the backward pass needs of a batch within a factor of two."""
    config, _ = choose_defaults(resolve(config_file, options), clicks)
    network = make_network(config, clicks).to(network_dtype(table_specs(config.tables, clicks)))
    dtype = next(network.parameters()).dtype
    samples, optimizer = config.data.batch_size, make_optimizer(config.optimizer, network)
    vectors = torch.zeros(samples, network.num_features, network.dim, dtype=dtype, requires_grad=True)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(torch.zeros(samples, clicks.num_dense, dtype=dtype), vectors).sum().backward()
    optimizer.step()
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    states = [state for each in optimizer.state.values() for state in each.values() if getattr(state, "ndim", 0)]
    exact = sum(2 * parameter.nbytes for parameter in network.parameters()) + sum(state.nbytes for state in states)
    batch = sum(num_bytes for address, num_bytes in kept.items() if address not in own)
    predicted = network_bytes(config, clicks, 1, trains=True) - exact
    assert 0.9 * batch <= predicted <= 2 * batch


def test_evaluation_takes_less(config_file, clicks):
    config = resolve(config_file)
    assert network_bytes(config, clicks, 2, trains=False) < network_bytes(config, clicks, 2, trains=True) / 2


def test_a_network_that_does_not_fit_is_refused(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "rooms", lambda: {"": 1_000_000})
    with pytest.raises(ConfigurationError, match=r"the dense network .* make model.bottom, model.top"):
        run_training(resolve(config_file, ["model.top=[1000]", "model.bottom=[1000]"]))
    assert not (tmp_path / "run").exists()


def test_a_run_is_refused_and_leaves_nothing(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "rooms", lambda: {"": 1000})
    with pytest.raises(ConfigurationError, match="1 kB of memory available"):
        run_training(resolve(config_file))
    assert not (tmp_path / "run").exists()
