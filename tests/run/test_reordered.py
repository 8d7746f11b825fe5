"""Training on reordered data: the same model up to the bijection, and not taken for one of other data."""

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, TableSpec
from rowmesh.data import Loader, ReorderOptions, reorder
from rowmesh.run.fingerprint import differences, fingerprint
from rowmesh.tables.update_rules import RULES
from tests.support.cooccurrence import BATCH, draw_batches, prepare_batches


@pytest.fixture(scope="module", params=[False, True], ids=["one id", "bags"])
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    prepared = prepare_batches(folder, draw_batches(1600 if request.param else 400), bags=request.param)
    options = ReorderOptions(batch_size=BATCH, max_edges=400_000)
    reordered = reorder(prepared, folder / "out", tables=["item"], options=options)
    assert len(reordered.unordered_rows("item")) > 1000
    return prepared, reordered


def train(data, initial, optimizer):
    """Losses, and the rows of all tables after ten steps from some rows."""
    tables = [TableSpec(name=t.name, num_rows=t.num_rows, dim=4, optimizer=optimizer) for t in data.tables]
    embeddings = EmbeddingCollection(tables)
    for name, rows in initial.items():
        for part in embeddings.local_rows(name):
            part.values.copy_(rows[part.rows])
    update, losses = EmbeddingOptimizer(embeddings), []
    weights = torch.linspace(-1, 1, 8)
    for _, batch in zip(range(10), Loader(data, "train", batch_size=96, shuffle=True, seed=3), strict=False):
        logits = embeddings(batch.sparse).values @ weights
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        update.step()
        losses.append(loss.item())
    trained = {name: torch.empty_like(rows) for name, rows in initial.items()}
    for name, rows in trained.items():
        for part in embeddings.local_rows(name):
            rows[part.rows] = part.values
    return losses, trained


@pytest.mark.parametrize("optimizer", RULES.values(), ids=RULES)
def test_the_same_model_up_to_the_bijection(both, optimizer):
    prepared, reordered = both
    generator = torch.Generator().manual_seed(0)
    initial = {t.name: torch.randn(t.num_rows, 4, generator=generator) for t in prepared.tables}
    rows = {
        t.name: torch.from_numpy(reordered.bijection(t.name).rows(torch.arange(t.num_rows).numpy()))
        for t in prepared.tables
    }
    moved = {name: torch.empty_like(values) for name, values in initial.items()}
    for name, values in initial.items():
        moved[name][rows[name]] = values
    losses, trained = train(prepared, initial, optimizer(lr=0.5))
    losses_after, trained_after = train(reordered, moved, optimizer(lr=0.5))
    assert losses == losses_after
    for name, values in trained.items():
        assert torch.equal(trained_after[name][rows[name]], values)
    assert not torch.equal(trained["item"], initial["item"])


def test_a_model_of_one_is_no_model_of_the_other(both):
    prepared, reordered = both
    assert differences(fingerprint(prepared), fingerprint(reordered)) == ["vocabulary of item"]
