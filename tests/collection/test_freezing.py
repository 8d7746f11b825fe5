"""Frozen tables: looked up, never changed, and nothing of them sent; the others train as if these were constants."""

from dataclasses import dataclass

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, TableSpec, checkpoint
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.pipeline import Pipeline
from rowmesh.tables import TensorTrain, Tiers
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad
from tests.support.triton import kernels_of

ROWS = {"user": 30, "item": 40, "tag": 9}
NAMES = list(ROWS)


def tables(frozen=("item",), rule=None, **options):
    rule = rule or RowWiseAdaGrad(lr=0.1, weight_decay=0.1)
    return [
        TableSpec(
            name=name, num_rows=rows, dim=3, dtype=torch.float64, optimizer=rule, frozen=name in frozen, **options
        )
        for name, rows in ROWS.items()
    ]


def ids_of(step, rank=0, size=1):
    generator = torch.Generator().manual_seed(step)
    return torch.stack([torch.randint(rows, (8,), generator=generator) for rows in ROWS.values()])[:, rank::size]


@dataclass
class Item:
    """What a pipeline reads."""

    sparse: SparseBatch

    def take(self, samples):
        return Item(
            SparseBatch.from_dense(NAMES, torch.stack([self.sparse.ids.view(3, -1)[f][samples] for f in range(3)]))
        )


def weights():
    return torch.linspace(-1, 1, 9, dtype=torch.float64)


def loss_of(embeddings):
    return torch.tanh(embeddings.values @ weights()).square().sum() / 8


class Job:
    """Steps, some of them with a frozen table."""

    def __init__(self, mesh, rule=None, device="cpu", **options):
        how = {name: options.pop(name) for name in ("transport", "replicas", "tiers") if name in options}
        self.mesh = mesh
        self.embeddings = EmbeddingCollection(tables(rule=rule, **options), mesh=mesh, device=device, **how)
        self.optimizer = EmbeddingOptimizer(self.embeddings)

    def batch(self, step):
        return SparseBatch.from_dense(NAMES, ids_of(step, self.mesh.rank, self.mesh.world_size))

    def steps(self, numbers):
        for step in numbers:
            (loss_of(self.embeddings(self.batch(step))) * self.mesh.world_size).backward()
            self.optimizer.step()

    def piped(self, numbers, **options):
        with Pipeline(self.embeddings, **options) as pipeline:
            for window in pipeline.windows([Item(self.batch(step)) for step in numbers]):
                for part in window:
                    (loss_of(part.embeddings) * self.mesh.world_size).backward()
                self.optimizer.step()

    def rows(self):
        self.embeddings.synchronize()
        return {
            (name, row, field): value.clone()
            for name in NAMES
            for piece in self.embeddings.held_rows(name)
            for field, values in {"rows": piece.values, **piece.state}.items()
            for row, value in zip(piece.rows, values, strict=True)
        }


def train(mesh, kind="plain", options=None):
    """Rows at the start, after steps with a frozen table, and after steps with all."""
    job = Job(mesh, **(options or {}))
    found = [job.rows()]
    if kind == "plain":
        job.steps(range(3))
    else:
        job.piped(range(3), verify="device" not in (options or {}), micro_batches=2)
    found.append(job.rows())
    job.embeddings.unfreeze("item")
    job.steps(range(3, 5))
    found.append(job.rows())
    job.embeddings.close()
    return found


def reference():
    """The same with a constant table in plain torch: row-wise AdaGrad with weight decay on the rows of a step."""
    collection = EmbeddingCollection(tables())
    values = {name: collection.local_rows(name)[0].values.clone() for name in NAMES}
    sums = {name: torch.zeros(rows, dtype=torch.float64) for name, rows in ROWS.items()}

    def snapshot():
        found = {(name, row, "rows"): value.clone() for name in NAMES for row, value in enumerate(values[name])}
        return found | {(name, row, "sum"): value.clone() for name in NAMES for row, value in enumerate(sums[name])}

    found = [snapshot()]
    for step in range(5):
        rows = {name: tensor.clone().requires_grad_() for name, tensor in values.items()}
        ids = ids_of(step)
        vectors = torch.cat([rows[name][each] for name, each in zip(NAMES, ids, strict=True)], dim=1)
        (torch.tanh(vectors @ weights()).square().sum() / 8).backward()
        for name, each in zip(NAMES, ids, strict=True):
            if name == "item" and step < 3:
                continue
            touched = each.unique()
            gradient = rows[name].grad
            assert gradient is not None
            g = gradient[touched] + 0.1 * values[name][touched]
            sums[name][touched] += g.square().mean(1)
            values[name][touched] -= 0.1 * g / (sums[name][touched].sqrt() + 1e-8)[:, None]
        if step in (2, 4):
            found.append(snapshot())
    return found


def compare(found):
    start, frozen, after = found
    for mine, theirs in zip((start, frozen, after), reference(), strict=True):
        torch.testing.assert_close(mine, {key: theirs[key] for key in mine}, rtol=1e-10, atol=1e-12)
    assert all(value.equal(frozen[key]) for key, value in start.items() if key[0] == "item")
    assert not all(value.equal(after[key]) for key, value in frozen.items() if key[0] == "item")


@pytest.mark.parametrize("kind", ["plain", "piped"])
@pytest.mark.parametrize("options", [{}, {"storage": "tiered", "tiers": Tiers(fast_rows=30, fast_share=0.5)}], ids=str)
def test_one_rank(kind, options):
    compare(train(Mesh(), kind, options))


@pytest.mark.parametrize(
    "kind, options",
    [
        ("plain", {"transport": "one_sided"}),
        ("plain", {"transport": "collective"}),
        ("plain", {"transport": "collective", "storage": "tiered"}),
        ("plain", {"replicas": 2}),
        ("piped", {"transport": "collective"}),
        ("piped", {"transport": "collective", "storage": "tiered"}),
    ],
    ids=str,
)
def test_two_ranks(ranks, kind, options):
    for found in ranks.run(train, kind, options):
        compare(found)


@pytest.mark.triton
@pytest.mark.parametrize("kind", ["plain", "piped"])
def test_on_a_device(kind):
    kernels_of("merge_update")
    compare(train(Mesh(), kind, {"device": "cuda"}))


@pytest.mark.triton
@pytest.mark.parametrize("kind", ["plain", "piped"])
def test_two_ranks_on_devices(ranks, kind):
    kernels_of("merge_update")
    for found in ranks.run(train, kind, {"device": "cuda"}):
        compare(found)


def count_bytes(mesh, transport):
    """What a step receives, with a table frozen and without."""
    job, found = Job(mesh, transport=transport), []
    for number in range(2):
        before = sum(counters.bytes_received for counters in job.embeddings.counters)
        job.steps([0])
        found.append(sum(counters.bytes_received for counters in job.embeddings.counters) - before)
        if number == 0:
            job.embeddings.unfreeze("item")
    job.embeddings.close()
    return found


@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_gradients_of_frozen_tables_are_not_sent(ranks, transport):
    for frozen, trained in ranks.run(count_bytes, transport):
        assert frozen < trained


def cores_of(mesh):
    options = {"storage": "tensor_train", "tensor_train": TensorTrain(rank=2), "optimizer": AdaGrad(lr=0.1)}
    specs = [TableSpec(name=name, num_rows=100, dim=4, frozen=name == "a", **options) for name in "ab"]
    embeddings = EmbeddingCollection(specs, mesh=mesh)
    before = [[core.clone() for core in embeddings.cores(name).cores] for name in "ab"]
    embeddings(SparseBatch.from_bags({"a": [[1, 2]], "b": [[3]]})).values.square().sum().backward()
    EmbeddingOptimizer(embeddings).step()
    same = [all(map(torch.equal, old, embeddings.cores(name).cores)) for name, old in zip("ab", before, strict=True)]
    embeddings.close()
    return same


def test_cores(ranks):
    assert cores_of(Mesh()) == [True, False]
    assert ranks.run(cores_of) == [[True, False]] * 2


def test_clipping_leaves_frozen_tables_out():
    job = Job(Mesh(), rule=SGD(lr=1.0))
    loss_of(job.embeddings(job.batch(0))).backward()
    norm = job.optimizer.clip_grad_norm_(1e9)
    job.optimizer.zero_grad()
    job.embeddings.unfreeze("item")
    loss_of(job.embeddings(job.batch(0))).backward()
    assert job.optimizer.clip_grad_norm_(1e9) > norm > 0


def test_gradients_of_frozen_rows_need_not_be_finite():
    job, scaler = Job(Mesh()), torch.amp.GradScaler("cpu", init_scale=2.0)
    out = job.embeddings(job.batch(0))
    scaler.scale(out["user"].sum() + out["item"].sum() * torch.inf).backward()
    scaler.step(job.optimizer)
    assert job.embeddings.step_count == 1


def test_state_is_kept_and_saved(tmp_path):
    job = Job(Mesh(), rule=Adam(lr=0.1))
    job.embeddings.unfreeze("item")
    job.steps(range(2))
    job.embeddings.freeze("item")
    job.steps(range(2, 4))
    checkpoint.save(tmp_path / "model", job.embeddings, {})
    other = Job(Mesh(), rule=Adam(lr=0.1))
    checkpoint.load(tmp_path / "model", other.embeddings)
    mine, theirs = job.rows(), other.rows()
    assert all(value.equal(theirs[key]) for key, value in mine.items())
    assert any(value.any() for key, value in mine.items() if key[0] == "item" and key[2] == "v")
    assert job.embeddings.state_dict()["item.weight"].shape == (40, 3)


def test_freezing_and_thawing_a_collection():
    job = Job(Mesh())
    assert job.embeddings.frozen == ("item",)
    job.embeddings.freeze("user", "tag")
    assert not job.embeddings(job.batch(0)).values.requires_grad
    job.embeddings.requires_grad_()
    assert job.embeddings.frozen == ()
    assert EmbeddingCollection(tables(frozen=NAMES)).is_frozen


def test_refusals():
    job = Job(Mesh())
    with pytest.raises(
        ConfigurationError, match=r"tables \['tag'\] are fused with tables to freeze.*TableSpec\(frozen"
    ):
        job.embeddings.freeze("user")
    with pytest.raises(ConfigurationError, match="there is no table 'users' to freeze; known:"):
        job.embeddings.freeze("users")
    job.embeddings.freeze("item")  # as it is
    loss_of(job.embeddings(job.batch(0))).backward()
    with pytest.raises(RowmeshError, match=r"1 batch\(es\) that had their backward and no step; step or zero_grad"):
        job.embeddings.unfreeze("item")
    job.optimizer.zero_grad()
    with Pipeline(job.embeddings) as pipeline:
        for _ in pipeline.windows([Item(job.batch(0))]):
            with pytest.raises(RowmeshError, match="batch 0 of the pipeline is half way"):
                job.embeddings.unfreeze("item")
            break


def freeze_on_one(mesh):
    job = Job(mesh)
    with pytest.raises(
        ConfigurationError, match=r"rank 0 would freeze \['item'\], rank 1 would freeze \['tag', 'user'\]"
    ):
        job.embeddings.freeze(*(["user", "tag"] if mesh.rank else ["item"]))
    job.embeddings.close()


def test_ranks_freeze_alike(ranks):
    ranks.run(freeze_on_one)
