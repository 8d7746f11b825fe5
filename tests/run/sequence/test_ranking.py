"""Ranks of targets, and what is made of them, against ten lines of Python and torchmetrics."""

import math

import pytest
import torch

from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.run.sequence.ranking import Seen, Standings, rank_targets
from rowmesh.run.sequence.ranking_metrics import CUTOFFS, RankingMetrics
from rowmesh.run.sequence.sharded_softmax import item_range

USERS, ITEMS = 300, 41


def problem(with_ties=True):
    """Vectors of small whole numbers tie, and their products are exact."""
    generator = torch.Generator().manual_seed(5)
    draw = (
        (lambda *shape: torch.randint(-2, 3, shape, generator=generator).float())
        if with_ties
        else (lambda *shape: torch.randn(shape, generator=generator))
    )
    queries, items = draw(USERS, 3), draw(ITEMS, 3)
    targets = torch.randint(ITEMS, (USERS,), generator=generator)
    lengths = torch.randint(0, 6, (USERS,), generator=generator)
    seen = torch.randint(ITEMS, (int(lengths.sum()),), generator=generator)
    return queries, items, targets, lengths, seen


def reference(queries, items, targets, lengths, seen):
    """(higher, tied) of each user, one score after the other."""
    found, at = [], 0
    for query, target, length in zip(queries, targets.tolist(), lengths.tolist(), strict=True):
        left_out = set(seen[at : at + length].tolist()) - {target}
        at += length
        scores = {item: float(query @ items[item]) for item in range(len(items)) if item not in left_out}
        others = [score for item, score in scores.items() if item != target]
        found.append((sum(s > scores[target] for s in others), sum(s == scores[target] for s in others)))
    return torch.tensor(found).T


def some(mesh, bounds):
    queries, items, targets, lengths, seen = problem()
    low, high = bounds[mesh.rank : mesh.rank + 2]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    own = Seen(offsets[low : high + 1] - offsets[low], seen[offsets[low] : offsets[high]])
    part = item_range(ITEMS, mesh.rank, mesh.world_size)
    standings = rank_targets(mesh, queries[low:high], targets[low:high], items[part.start : part.stop], part.start, own)
    metrics = RankingMetrics()
    metrics.add(standings)
    return torch.stack([standings.higher, standings.tied]), metrics.compute(mesh)


@pytest.mark.parametrize("bounds", [[0, 300], [0, 120, 300], [0, 270, 270, 300]])
def test_standings_are_those_of_a_loop_on_any_number_of_ranks(ranks, bounds):
    world_size = len(bounds) - 1
    found = [some(Mesh(), bounds)] if world_size == 1 else ranks.run(some, bounds, world_size=world_size)
    expected = reference(*problem())
    assert torch.equal(torch.cat([standings for standings, _ in found], 1), expected)
    assert (expected[1] > 0).any()
    for _, metrics in found:
        for name, mean in some(Mesh(), [0, 300])[1].items():
            assert mean.value == pytest.approx(metrics[name].value, rel=1e-12)


@pytest.mark.parametrize("ties, share", [("worst", 1), ("middle", 0.5), ("best", 0)])
def test_metrics_are_those_of_a_loop(ties, share):
    standings = Standings(torch.arange(40) * 7 % 31, torch.arange(40) % 3)
    metrics = RankingMetrics(ties)
    metrics.add(Standings(standings.higher[:13], standings.tied[:13]))
    metrics.add(Standings(standings.higher[13:], standings.tied[13:]))
    found = metrics.compute(Mesh())
    ranks = [1 + h + share * t for h, t in zip(standings.higher.tolist(), standings.tied.tolist(), strict=True)]
    for k in CUTOFFS:
        hits = [float(rank <= k) for rank in ranks]
        gains = [hit / math.log2(1 + rank) for hit, rank in zip(hits, ranks, strict=True)]
        for name, values in (("hr", hits), ("ndcg", gains)):
            mean = found[f"{name}@{k}"]
            assert mean.value == pytest.approx(sum(values) / 40)
            assert mean.error == pytest.approx(torch.tensor(values).double().std().item() / math.sqrt(40))
    assert found["mrr"].value == pytest.approx(sum(1 / rank for rank in ranks) / 40)
    assert found["tied"].value == pytest.approx(26 / 40)


@pytest.mark.parametrize("k", [1, 5, 10])
def test_metrics_are_those_of_torchmetrics(k):
    retrieval = pytest.importorskip("torchmetrics.functional.retrieval")
    queries, items, targets, _, _ = problem(with_ties=False)
    metrics = RankingMetrics()
    metrics.add(rank_targets(Mesh(), queries, targets, items))
    found, scores = metrics.compute(Mesh()), (queries @ items.T).double()
    scores = scores - scores.min() + 1  # torchmetrics counts no target whose score is 0 or less
    relevant = torch.nn.functional.one_hot(targets, ITEMS)
    for name, function in (("hr", retrieval.retrieval_hit_rate), ("ndcg", retrieval.retrieval_normalized_dcg)):
        expected = sum(float(function(s, r, top_k=k)) for s, r in zip(scores, relevant, strict=True)) / USERS
        assert found[f"{name}@{k}"].value == pytest.approx(expected, abs=1e-6)
    expected = sum(float(retrieval.retrieval_reciprocal_rank(s, r)) for s, r in zip(scores, relevant, strict=True))
    assert found["mrr"].value == pytest.approx(expected / USERS, abs=1e-6)


def test_a_model_that_scores_all_items_alike_gets_nothing():
    metrics = RankingMetrics()
    metrics.add(rank_targets(Mesh(), torch.zeros(2, 3), torch.tensor([0, 5]), torch.ones(300, 3)))
    found = metrics.compute(Mesh())
    assert (found["hr@200"].value, found["tied"].value) == (0, 1)


def test_what_is_not_finite_is_refused():
    with pytest.raises(RowmeshError, match="not finite"):
        rank_targets(Mesh(), torch.full((1, 2), math.nan), torch.tensor([0]), torch.ones(3, 2))


def overflowing(mesh, sign):
    """Finite vectors; on the last rank alone a product is not finite, of an item that is no target."""
    items = torch.tensor([[1.0], [2.0], [3.0], [sign * 1e20]])
    part = item_range(4, mesh.rank, mesh.world_size)
    queries = torch.tensor([[1.0], [1e20]])
    with pytest.raises(RowmeshError, match="past the range of their dtype, so items cannot be ranked; lower"):
        rank_targets(mesh, queries, torch.tensor([0, 1]), items[part.start : part.stop], part.start)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_product_that_overflows_ranks_nothing(ranks, world_size, sign):
    if world_size == 1:
        overflowing(Mesh(), sign)
    else:
        ranks.run(overflowing, sign, world_size=world_size)


def test_large_scores_are_ranked():
    items = torch.tensor([[1e38], [3e38], [2e38]])
    standings = rank_targets(Mesh(), torch.ones(3, 1), torch.tensor([0, 1, 2]), items)
    assert standings.higher.tolist() == [2, 0, 1]
