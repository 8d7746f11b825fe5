"""What readers see of what was published: every target against dictionaries, and whole whatever happens."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rowmesh._support.faults import VARIABLE, arm
from rowmesh.errors import ConfigurationError, DataError, StoreError
from rowmesh.ops.initialize import initialize
from rowmesh.publish import Changes, PublishedReader, PublishedTable, Publisher, open_target
from rowmesh.tables import Constant, Uniform
from rowmesh.tables.initializer import table_key
from tests.support.redis_server import redis_server as redis_server

TABLES = {
    "user": PublishedTable(dim=3, initializer=Constant(value=1), missing="zero"),
    "item/ü": PublishedTable(dim=2, initializer=Constant(value=1), missing="zero"),
}
POINTS = ["begun", "rows", "part", "network", "published", "removed"]
KINDS = ["parquet", "rocksdb", "redis"]
STOPS = [  # the order of steps is the same for all targets
    pytest.param(
        kind, point, marks=[pytest.mark.slow] if kind != "parquet" and point not in ("rows", "removed") else []
    )
    for kind in KINDS
    for point in POINTS
]


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    if request.param == "redis":
        return request.getfixturevalue("redis_server").url
    if request.param == "rocksdb":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    return f"{request.param}:{tmp_path}/published"


class Model:
    """Rows that change at random, and what was changed since the last time."""

    def __init__(self, seed=0):
        self.draw = np.random.default_rng(seed)
        self.rows = {name: {} for name in TABLES}
        self.step = 0

    def train(self):
        """Changes of a step, as a generation that is not whole takes them."""
        self.step += 1
        changes = {}
        for name, about in TABLES.items():
            rows = self.rows[name]
            ids = np.unique(self.draw.integers(-20, 20, 12)) * 2**58
            gone = [i for i in ids.tolist() if i in rows][:3]
            kept = np.array([i for i in ids.tolist() if i not in gone], np.int64)
            vectors = self.draw.standard_normal((len(kept), about.dim)).astype(np.float32)
            for i in gone:
                del rows[i]
            rows |= dict(zip(kept.tolist(), vectors, strict=True))
            half = len(kept) // 2
            chunks = [(kept[:half], vectors[:half]), (kept[half:], vectors[half:])]
            changes[name] = Changes(rows=chunks, deleted=np.array(gone, np.int64))
        return changes

    def whole(self):
        return {
            name: Changes(rows=[(np.array([*rows], np.int64), np.array([*rows.values()]))] if rows else [])
            for name, rows in self.rows.items()
        }

    def publish(self, publisher):
        changes = self.train()
        own = self.whole() if publisher.is_whole else changes
        return publisher.publish(self.step, own, {"step": torch.tensor(self.step)})

    def seen(self):
        """What a reader of this step sees."""
        ids = np.arange(-20, 20) * 2**58
        vectors = {
            name: np.array([self.rows[name].get(i, np.zeros(about.dim, np.float32)) for i in ids.tolist()])
            for name, about in TABLES.items()
        }
        return self.step, {name: vector.tolist() for name, vector in vectors.items()}


def seen(reader):
    ids = np.arange(-20, 20) * 2**58
    step = reader.network()["step"].item()
    assert step == reader.generation.step
    return step, {name: reader.look_up(name, ids).tolist() for name in TABLES}


def test_readers_see_the_newest_generation(url):
    model, target = Model(), open_target(url)
    publisher = Publisher(target, TABLES, keep_last=2, whole_every=3)
    assert [model.publish(publisher).is_whole for _ in range(2)] == [True, False]
    reader = PublishedReader(target)
    assert not reader.refresh()
    kinds = []
    for number in range(3, 9):
        before = seen(reader)
        kinds.append(model.publish(publisher).is_whole)
        assert seen(reader) == before
        assert reader.refresh()
        assert (reader.generation.number, seen(reader)) == (number, model.seen())
    assert kinds == [False, True, False, False, True, False]
    assert target.numbers() == [7, 8]
    reader.close()
    target.close()


@pytest.mark.parametrize("url, point", STOPS, indirect=["url"])
def test_stopped_anywhere_readers_see_a_whole_generation(url, point):
    model, target = Model(), open_target(url)
    publisher = Publisher(target, TABLES, keep_last=1, whole_every=2)
    model.publish(publisher)
    model.publish(publisher)
    before, old = model.seen(), PublishedReader(target)
    with arm(f"publish.{point}=raise"), pytest.raises(RuntimeError, match="injected"):
        model.publish(publisher)
    after = model.seen() if point in ("published", "removed") else before
    assert seen(PublishedReader(target)) == after
    assert publisher.is_whole
    for again in (publisher, Publisher(target, TABLES, keep_last=1)):
        model.publish(again)
        assert seen(PublishedReader(target)) == model.seen()
    assert len(target.numbers()) == 1
    assert old.refresh()
    assert seen(old) == model.seen()
    target.close()


KILLED = """
import sys
from rowmesh.publish import Publisher, open_target
from tests.publish.test_publisher import TABLES, Model
model, publisher = Model(), Publisher(open_target(sys.argv[1]), TABLES)
for _ in range(3):
    model.publish(publisher)
"""


def test_a_killed_process_leaves_a_whole_generation(tmp_path):
    pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    url = f"rocksdb:{tmp_path}/published"
    environment = os.environ | {VARIABLE: "publish.rows@10=kill"}  # four a generation
    assert (
        subprocess.run([sys.executable, "-c", KILLED, url], env=environment, timeout=60, check=False).returncode == -9
    )
    model, target = Model(), open_target(url)
    model.train()
    model.train()
    assert seen(PublishedReader(target)) == model.seen()
    model.publish(Publisher(target, TABLES))
    assert seen(PublishedReader(target)) == model.seen()


def test_a_removed_generation_is_an_error_or_as_it_was(url):
    model, target = Model(), open_target(url)
    publisher = Publisher(target, TABLES, keep_last=1, whole_every=1)
    model.publish(publisher)
    reader, before = PublishedReader(target), model.seen()
    model.publish(publisher)
    if url.startswith("redis"):
        with pytest.raises(StoreError, match=r"generation 1 of Redis .* was removed; refresh"):
            seen(reader)
    else:
        assert seen(reader) == before
    assert reader.refresh()
    assert seen(reader) == model.seen()
    target.close()


def test_unknown_ids(url):
    table = PublishedTable(dim=4, initializer=Uniform(bound=0.5), seed=3)
    target, none = open_target(url), np.empty(0, np.int64)
    Publisher(target, {"user": table}).publish(1, {"user": Changes()}, {})
    reader = PublishedReader(target)
    expected, ids = torch.empty(1, 4), np.array([-5, 10, 10])
    initialize(expected, table_key(3, "user"), first=10, stride=1, distribution="uniform", a=-0.5, b=0.5)
    assert reader.look_up("user", ids)[1:].tolist() == expected.tolist() * 2
    assert reader.look_up("user", none).shape == (0, 4)
    assert not PublishedReader(target, missing="zero").look_up("user", ids).any()
    with pytest.raises(DataError, match="'user' of generation 1 does not know 2 of the ids, the first is -5"):
        PublishedReader(target, missing="error").look_up("user", ids)
    with pytest.raises(ConfigurationError, match=r"no published table 'item'; there are \['user'\]"):
        reader.look_up("item", ids)
    for others in ([-5, 10, 10], (-5, 10, 10), ids.astype(np.int32), torch.from_numpy(ids)):
        assert reader.look_up("user", others).tolist() == reader.look_up("user", ids).tolist()
    assert reader.look_up("user", []).shape == (0, 4)
    for wrong, got in (
        (ids / 2, r"float64 \[3\]"),
        ([[1], [2]], r"int64 \[2, 1\]"),
        ([[1], [2, 3]], "list"),
        (["7"], "<U1"),
        ([True], "bool"),
        (np.array([2**63], np.uint64), str(2**63)),
        (7, r"int64 \[\]"),
    ):
        with pytest.raises(DataError, match=rf"must be int64 \[N\]: a list or a NumPy array .*, got {got}"):
            reader.look_up("user", wrong)
    target.close()


def test_two_publishers_of_one_place_are_noticed(url):
    target = open_target(url)
    first, second, model = Publisher(target, TABLES), Publisher(target, TABLES), Model()
    model.publish(first)
    model.publish(second)
    with pytest.raises(StoreError, match="is not number 1, which this run published last"):
        model.publish(first)
    model.publish(first)
    assert seen(PublishedReader(target)) == model.seen()
    target.close()


def test_what_is_wrong_is_named(tmp_path):
    target = open_target(f"parquet:{tmp_path}")
    with pytest.raises(StoreError, match=r"nothing is published in folder .* yet"):
        PublishedReader(target)
    publisher = Publisher(target, TABLES)
    with pytest.raises(
        DataError, match=r"'user' takes ids int64 \[N\] and vectors \[N, 3\], got int64 \[1\] and \[1, 2\]"
    ):
        publisher.publish(1, {"user": Changes(rows=[(np.array([1]), np.zeros((1, 2)))])}, {})
    with pytest.raises(DataError, match=r"\['car'\] are not published"):
        publisher.publish(1, {"car": Changes()}, {})
    with pytest.raises(ConfigurationError, match="'x' is nowhere to publish to; there are parquet:FOLDER"):
        open_target("x")
    with pytest.raises(ConfigurationError, match="needs a uniform initializer with a bound"):
        PublishedTable(dim=1, initializer=Uniform())
    with pytest.raises(ConfigurationError, match="keep_last and whole_every"):
        Publisher(target, TABLES, keep_last=0)
    with arm("files.replaced=ENOSPC"), pytest.raises(StoreError, match=r"folder .* failed: .*No space left"):
        publisher.publish(1, {}, {})
    (tmp_path / "newest.json").write_text("{}")
    with pytest.raises(DataError, match="has something that is no generation"):
        PublishedReader(target)


def publish_parts(mesh, url):
    """Each rank has the ids of its own; then rank 1 fails."""
    target = open_target(url)
    publisher = Publisher(target, TABLES, mesh=mesh)

    def changes(value):
        ids = np.arange(4, dtype=np.int64) * mesh.world_size + mesh.rank
        return {"user": Changes(rows=[(ids, np.full((4, 3), value, np.float32))], deleted=ids[:0])}

    first = publisher.publish(1, changes(1.0), {"step": torch.tensor(1)})
    second = publisher.publish(2, {"user": Changes(deleted=np.array([mesh.rank]))}, {"step": torch.tensor(2)})
    with arm("publish.part=EIO" if mesh.rank == 1 else ""), pytest.raises(StoreError, match="Input/output error"):
        publisher.publish(3, changes(3.0), {"step": torch.tensor(3)})
    reader = PublishedReader(target)
    found = reader.look_up("user", np.arange(9))[:, 0].tolist()
    return first.number, second.chain, reader.network()["step"].item(), found


@pytest.mark.parametrize("kind", ["parquet", pytest.param("rocksdb", marks=pytest.mark.slow)])
def test_every_rank_publishes_its_part(ranks, tmp_path, kind):
    if kind == "rocksdb":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    expected = (1, (2, 1), 2, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert ranks.run(publish_parts, f"{kind}:{tmp_path}", world_size=2) == [expected] * 2
