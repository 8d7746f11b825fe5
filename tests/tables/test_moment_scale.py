"""Moment scaling: Proposition 1 and Scaling Rule 1 of the 2D paper in numbers, and what c touches in rowmesh.

The gradients of a row in M groups are a signal all share plus noise of their own; every row of a table is a trial.
Expectations are means over the trials, and are compared with a margin of five standard errors. Without groups the
gradient of a row is the mean of the groups' (batches are of equal size).
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rowmesh import EmbeddingCollection
from rowmesh.checkpoint import load, save
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.data import Prepared
from rowmesh.errors import ConfigurationError
from rowmesh.ops.merge_update import Singles
from rowmesh.run.resolve import resolve
from rowmesh.run.tables import table_specs
from rowmesh.sparse import SparseBatch
from rowmesh.tables import DenseArena, TableSpec, fuse
from rowmesh.tables.update_rules import RULES, AdaGrad, Adam, RowWiseAdaGrad
from tests.support.algorithm_1 import Algorithm1

TRIALS, DIM, STEPS = 4000, 8, 6
SCALED = [AdaGrad(lr=0.1), RowWiseAdaGrad(lr=0.1), Adam(lr=0.1)]
BY_NAME = {"argvalues": SCALED, "ids": lambda rule: rule.name}


class Trials:
    """The same gradients under M groups, and without groups.

    Attributes:
        groups, whole: Algorithm 1 with M groups, and with one.
    """

    def __init__(self, rule, num_groups, signal, noise, seed=0):
        start = torch.zeros(TRIALS, DIM, dtype=torch.float64)
        self.groups = Algorithm1(start, rule, num_groups)
        self.whole = Algorithm1(start, replace(rule, moment_scale=1.0), 1)
        self.signal, self.noise = signal, noise
        self.generator = torch.Generator().manual_seed(seed)
        self.all_rows = torch.ones(TRIALS, dtype=torch.bool)

    def gradients(self):
        shape = (TRIALS, DIM)
        draw = [torch.randn(shape, generator=self.generator, dtype=torch.float64) for _ in self.groups.weights]
        return [self.signal + self.noise * each for each in draw]

    def iterate(self):
        """One iteration of both; what the groups' moments were before they were averaged."""
        gradients = self.gradients()
        self.whole.iterate([torch.stack(gradients).mean(0)], [self.all_rows])
        self.groups.update_locally(gradients, [self.all_rows] * len(gradients))
        before = [moments[self.moment].clone() for moments in self.groups.moments]
        self.groups.synchronize()
        return before

    @property
    def moment(self):
        return "v" if "v" in self.groups.rule.state else "sum"

    def second_moments(self):
        """V with groups and without, `[trials]` or `[trials, D]`."""
        return self.groups.moments[0][self.moment], self.whole.moments[0][self.moment]


def by_trial(values):
    return values.reshape(TRIALS, -1).mean(1)


def mean_and_error(values):
    """The mean over the trials, and its standard error."""
    values = by_trial(values)
    return float(values.mean()), float(values.std() / TRIALS**0.5)


@pytest.mark.parametrize("rule", **BY_NAME)
@pytest.mark.parametrize("num_groups", [2, 4])
def test_moments_are_alike_in_all_groups(rule, num_groups):
    """Proposition 1 (i): what a group has before the average is, in expectation, what all have after it."""
    trials = Trials(rule, num_groups, signal=0.5, noise=1.0)
    for _ in range(STEPS):
        before = trials.iterate()
        after, _ = trials.second_moments()
        for of_group in before:
            difference, error = mean_and_error(of_group - after)
            assert 0 < error < 0.01 * float(after.mean())
            assert abs(difference) < 5 * error


@pytest.mark.parametrize("rule", **BY_NAME)
@pytest.mark.parametrize("num_groups", [2, 4])
def test_moments_grow_faster_in_groups(rule, num_groups):
    """Proposition 1 (ii), and by how much: σ² (1 − 1/M) a step, σ² the variance of a group's gradient."""
    trials = Trials(rule, num_groups, signal=0.5, noise=1.0)
    for _ in range(STEPS):
        old = [v.clone() for v in trials.second_moments()]
        trials.iterate()
        in_groups, without = (v - was for v, was in zip(trials.second_moments(), old, strict=True))
        surplus, error = mean_and_error(in_groups - without)
        assert surplus > 5 * error
        if not isinstance(rule, Adam):  # whose increments are of a decaying mean
            assert surplus == pytest.approx(1 - 1 / num_groups, abs=5 * error)


@pytest.mark.parametrize("rule", **BY_NAME)
def test_moments_grow_alike_without_noise(rule):
    trials = Trials(rule, 4, signal=0.5, noise=0.0)
    for _ in range(STEPS):
        trials.iterate()
        in_groups, without = trials.second_moments()
        torch.testing.assert_close(in_groups, without, rtol=1e-14, atol=0)


def effective_rates(algorithm):
    """η / (√(v / c) + ε) of the paper, of each trial."""
    v = algorithm.moments[0]["v" if "v" in algorithm.rule.state else "sum"]
    if isinstance(algorithm.rule, Adam):
        v = v / (1 - algorithm.rule.beta2**algorithm.iteration)
    return algorithm.rule.lr / ((v / algorithm.c).sqrt() + algorithm.rule.eps)


@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize("rule", **BY_NAME)
def test_m_restores_the_rate_of_noise(rule, num_groups):
    """Scaling Rule 1 at its end: E[v / c] is v's without groups for c = M, and then so are the rates.

    The rates' means differ by how widely v scatters (1/√v is convex), the less the more gradients v has seen.
    """
    trials = Trials(replace(rule, moment_scale=None), num_groups, signal=0.0, noise=1.0)
    for _ in range(40):
        trials.iterate()
    in_groups, without = trials.second_moments()
    difference, error = mean_and_error(in_groups / num_groups - without)
    assert abs(difference) < 5 * error
    scaled, plain = (effective_rates(algorithm).mean() for algorithm in (trials.groups, trials.whole))
    assert float(scaled / plain) == pytest.approx(1.0, abs=0.03)
    trials.groups.c = 1.0
    assert float(effective_rates(trials.groups).mean() / plain) == pytest.approx(num_groups**-0.5, abs=0.03)


def test_noisier_gradients_want_a_larger_scale():
    """Scaling Rule 1: the c that restores E[v] is (s² + σ²) / (s² + σ²/M), from 1 without noise towards M."""
    wanted = []
    for noise in (0.0, 0.5, 1.0, 2.0, 10.0):
        trials = Trials(RowWiseAdaGrad(), 4, signal=1.0, noise=noise)
        for _ in range(STEPS):
            trials.iterate()
        in_groups, without = (float(v.mean()) for v in trials.second_moments())
        wanted.append(in_groups / without)
        assert wanted[-1] == pytest.approx((1 + noise**2) / (1 + noise**2 / 4), rel=0.02)
    assert wanted[0] == 1.0
    assert wanted == sorted(wanted)
    assert 3.5 < wanted[-1] <= 4.1


@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("moment_scale", [None, 1.0, 0.5, 3.0])
def test_arenas_do_what_algorithm_1_does_in_a_group(rule_name, moment_scale):
    """Kernels and arena together against the transcription."""
    options = {} if rule_name == "sgd" else {"moment_scale": moment_scale, "eps": 1e-3}
    rule = RULES[rule_name](lr=0.1, **options)
    (group,) = fuse([TableSpec(name="a", num_rows=30, dim=3, optimizer=rule, dtype=torch.float64)])
    arena = DenseArena(group, 30)
    generator = torch.Generator().manual_seed(0)
    arena.rows.copy_(torch.randn(30, 3, generator=generator, dtype=torch.float64))
    algorithm = Algorithm1(arena.rows.clone(), rule, num_groups=1)
    for step in range(1, 6):
        touched = torch.rand(30, generator=generator) < 0.5
        slots = touched.nonzero()[:, 0].to(torch.int32)
        gradients = torch.randn(30, 3, generator=generator, dtype=torch.float64)
        sent, singles = gradients[touched], Singles()
        singles(slots.data_ptr(), sent.data_ptr(), 3 * 8, len(slots))
        arena.apply(singles, lr=0.2, scaling=0.5, step=step)
        algorithm.iterate([gradients * 0.5], [touched], lr=0.2)
    torch.testing.assert_close(arena.rows, algorithm.weights[0].detach(), rtol=1e-12, atol=1e-12)
    for name in rule.state:
        torch.testing.assert_close(arena.state[name], algorithm.moments[0][name], rtol=1e-12, atol=1e-14)


def trained(rule, num_steps=3):
    """A collection in one process after some steps."""
    collection = EmbeddingCollection([TableSpec(name="item", num_rows=20, dim=3, optimizer=rule)])
    optimizer = EmbeddingOptimizer(collection)
    for step in range(num_steps):
        ids = torch.arange(8) * (step + 1) % 20
        optimizer.zero_grad()
        (collection(SparseBatch(features=("item",), ids=ids, batch_size=8, bag_size=1))["item"] ** 2).mean().backward()
        optimizer.step()
    return collection


def contents(collection):
    (piece,) = collection.local_rows("item")
    return {"values": piece.values, **piece.state}


@pytest.mark.parametrize("rule", **BY_NAME)
def test_a_scale_of_one_is_the_plain_optimizer_to_the_bit(rule):
    plain, one, half = (contents(trained(replace(rule, moment_scale=c))) for c in (None, 1, 0.5))
    assert all(torch.equal(plain[name], one[name]) for name in plain)
    assert not torch.equal(plain["values"], half["values"])


def test_rules_of_different_scales_do_not_fuse():
    scales = {"a": None, "b": 2.0, "c": 1.0, "d": 2}
    tables = [
        TableSpec(name=name, num_rows=9, dim=4, optimizer=RowWiseAdaGrad(moment_scale=c)) for name, c in scales.items()
    ]
    assert [[table.name for table in group.tables] for group in fuse(tables)] == [["a"], ["b", "d"], ["c"]]


@pytest.mark.parametrize("rule", **BY_NAME)
def test_checkpoints_load_under_another_scale(rule, tmp_path):
    """V is kept unscaled, so that what was trained with one c goes on with another."""
    written = trained(rule)
    save(tmp_path, written, {})
    read = trained(replace(rule, moment_scale=0.3), num_steps=0)
    load(tmp_path, read)
    mine, theirs = contents(read), contents(written)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_sgd_has_no_moments_to_scale():
    with pytest.raises(TypeError, match="moment_scale"):
        RULES["sgd"](moment_scale=2.0)


def specs(tmp_path, *overrides):
    """The tables of a run on data with two features."""
    (tmp_path / "run.toml").write_text('[data]\nfolder = "clicks"\n')
    tables = {name: SimpleNamespace(name=name, num_rows=9) for name in ("C1", "C2")}
    names = {"folder": "clicks", "features": tuple(tables), "table_of": lambda feature: feature}
    data = SimpleNamespace(**names, table=tables.__getitem__)
    return table_specs(resolve(tmp_path / "run.toml", list(overrides)).tables, cast(Prepared, data))


def test_configurations_say_the_scale_of_all_tables_or_of_one(tmp_path):
    scales = [spec.optimizer.moment_scale for spec in specs(tmp_path)]
    assert scales == [None, None]
    overrides = ["tables.optimizer.moment_scale=2", "tables.C2.optimizer.moment_scale=0.5"]
    assert [spec.optimizer.moment_scale for spec in specs(tmp_path, *overrides)] == [2.0, 0.5]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["tables.optimizer.moment_scale=0"], "tables.optimizer.moment_scale: should be greater than 0, got 0"),
        (["tables.optimizer.moment_scale=inf"], "tables.optimizer.moment_scale: should be a finite number"),
        (["tables.optimizer.moment_scal=2"], "did you mean 'tables.optimizer.moment_scale'"),
        (["tables.optimizer.moment_scale=1e-40"], "row_wise_adagrad: moment_scale must be above 0 and finite"),
        (["tables.optimizer.name=sgd", "tables.optimizer.moment_scale=2"], "tables.optimizer: sgd has no moment_scale"),
    ],
)
def test_configurations_of_scales_that_cannot_be(tmp_path, overrides, message):
    with pytest.raises(ConfigurationError) as error:
        specs(tmp_path, *overrides)
    assert message in str(error.value)
