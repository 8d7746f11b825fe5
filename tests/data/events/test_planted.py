"""Planted events: drawn as the model says, with the best ranking's scores."""

import numpy as np
import pytest
import torch

from rowmesh.cli.data import app
from rowmesh.data.events import Sequences
from rowmesh.data.events.planted import PlantedEvents, _scores, _walk, synthesize_events
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.run.sequence.ranking import Standings
from rowmesh.run.sequence.ranking_metrics import RankingMetrics

SMALL = PlantedEvents(num_users=600, num_items=200, num_groups=5, mean_events=24, seed=3)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return synthesize_events(tmp_path_factory.mktemp("planted") / "data", SMALL)


def events(data):
    return data.items.tolist(), data.offsets.tolist(), data.times.tolist()


def test_what_is_drawn_is_as_said(drawn):
    assert len(drawn.offsets) - 1 == SMALL.num_users
    lengths = np.diff(drawn.offsets)
    assert lengths.min() >= 20
    assert 22 < lengths.mean() < 26
    for first, end in zip(drawn.offsets[:-1], drawn.offsets[1:], strict=True):
        assert len(set(drawn.items[first:end].tolist())) == end - first
        assert (np.diff(drawn.times[first:end]) > 0).all()


def test_equal_seeds_draw_equal_events(drawn, tmp_path):
    assert events(synthesize_events(tmp_path / "same", SMALL)) == events(drawn)
    other = PlantedEvents(num_users=600, num_items=200, num_groups=5, mean_events=24, seed=4)
    assert events(synthesize_events(tmp_path / "other", other)) != events(drawn)


def test_ranks_are_those_of_the_chances():
    random = np.random.default_rng(0)
    groups, weights, lengths = random.integers(3, size=50), random.random((3, 50)), np.array([20, 22, 21])
    items, ranks = _walk(random, weights, groups, lengths)
    for user, length in enumerate(lengths):
        seen = items[user, :length].tolist()
        for column, place in enumerate((length - 2, length - 1)):
            chances = {j: weights[groups[seen[place - 1]], j] for j in range(50) if j not in seen[:place]}
            assert ranks[user, column] == 1 + sum(each > chances[seen[place]] for each in chances.values())


def test_scores_are_those_of_ranking_metrics():
    ranks = np.array([1, 3, 11, 300, 2])
    metrics = RankingMetrics()
    metrics.add(Standings(torch.from_numpy(ranks - 1), torch.zeros(5, dtype=torch.int64)))
    expected = metrics.compute(Mesh())
    for name, value in _scores(ranks).items():
        assert value == pytest.approx(expected[name].value)


def test_the_optimum_is_kept_and_beats_popularity(drawn):
    counts = drawn.popularity("test")
    best = drawn.optimum["test"]
    assert set(drawn.optimum) == {"validation", "test"}
    ends = drawn.offsets[1:] - 1
    hits = 0
    for first, end in zip(drawn.offsets[:-1], ends, strict=True):
        unseen = np.setdiff1d(np.arange(drawn.num_items), drawn.items[first:end])
        target = drawn.items[end]
        hits += int((counts[unseen] > counts[target]).sum() < 10)
    assert best["hr@10"] > hits / (len(drawn.offsets) - 1) + 0.05
    assert best["ndcg@10"] < best["hr@10"] < best["hr@50"]


def test_too_few_items_are_refused():
    with pytest.raises(ConfigurationError, match="100 items are too few for 25 groups of 10 and 60 events"):
        PlantedEvents(num_items=100)


def test_the_command_draws_and_says_what_is_best(tmp_path, capsys):
    arguments = ["synthesize-events", tmp_path / "out", "--users", 40, "--items", 200, "--groups", 4]
    arguments = [str(each) for each in [*arguments, "--mean-events", 22]]
    app(arguments, result_action="return_value")
    printed = capsys.readouterr().out
    data = Sequences.open(tmp_path / "out")
    assert len(data.offsets) - 1 == 40
    assert f"{data.optimum['test']['ndcg@10']:.5f}" in printed
    with pytest.raises(RowmeshError, match="--overwrite"):
        app(arguments, result_action="return_value")
    app([*arguments, "--reuse"], result_action="return_value")
    app([*arguments, "--overwrite"], result_action="return_value")
