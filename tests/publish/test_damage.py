"""What disks, memory and servers do to what is published: it reads as it was written, or is refused by name."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from rowmesh.errors import DataError, StoreError
from rowmesh.publish import Changes, PublishedReader, PublishedTable, Publisher, open_target
from rowmesh.publish.generation import Generation
from rowmesh.tables import Constant
from tests.publish.test_publisher import url as url
from tests.support.redis_server import redis_server as redis_server

TABLES = {name: PublishedTable(dim=3, initializer=Constant(value=-1), missing="zero") for name in ("v", "w")}
IDS = np.arange(40, dtype=np.int64)
FLIPS = 12


def rows_of(seed):
    return np.random.default_rng(seed).standard_normal((len(IDS), 3)).astype(np.float32)


def publish(url):
    """A whole generation, and one that changes half of its rows; what readers are to see of both tables."""
    target = open_target(url)
    publisher = Publisher(target, TABLES)
    publisher.publish(1, {"v": Changes(rows=[(IDS, rows_of(1))]), "w": Changes(rows=[(IDS, rows_of(2))])}, {})
    half = IDS[:20]
    changes = {name: Changes(rows=[(half, rows_of(seed)[:20])]) for name, seed in (("v", 3), ("w", 4))}
    publisher.publish(2, changes, {})
    return {
        name: np.concatenate([rows_of(new)[:20], rows_of(old)[20:]]) for name, old, new in (("v", 1, 3), ("w", 2, 4))
    }


def outcome(url, expected):
    """Whether a reader sees what was published, or says that it is damaged; anything else is a failure."""
    target = open_target(url)
    try:
        reader = PublishedReader(target)
        found = {name: reader.look_up(name, IDS) for name in TABLES}
        reader.network()
        reader.close()
    except (DataError, StoreError):
        return "refused"
    finally:
        target.close()
    for name, rows in found.items():
        assert np.array_equal(rows, expected[name]), f"rows of {name} are served that were not published"
    return "right"


def flipped(data, draw):
    changed = bytearray(data)
    changed[draw.integers(len(data))] ^= 1 << draw.integers(8)
    return bytes(changed)


@pytest.mark.parametrize("kind", ["parquet", "rocksdb"])
def test_a_flipped_bit_is_served_from_no_file(tmp_path, kind):
    if kind == "rocksdb":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    url = f"{kind}:{tmp_path}/published"
    expected, draw = publish(url), np.random.default_rng(0)
    assert outcome(url, expected) == "right"
    files = [
        path
        for path in sorted((tmp_path / "published").rglob("*"))
        if path.is_file() and path.stat().st_size and path.name not in ("LOG", "IDENTITY", "rowmesh.json")
    ]
    outcomes = {}
    for path in files:
        whole = path.read_bytes()
        of_file = []
        for _ in range(FLIPS // 4 if kind == "rocksdb" else FLIPS):
            path.write_bytes(flipped(whole, draw))
            of_file.append(outcome(url, expected))
        path.write_bytes(whole)
        outcomes[str(path.relative_to(tmp_path))] = of_file
    unread = ("00000002/manifest.json", "00000001/network.pt", "rocksdict-config.json", ".sst")  # or some bytes of it
    served = {name for name, of_file in outcomes.items() if "right" in of_file}
    assert not {name for name in served if not name.endswith(unread)}
    assert outcome(url, expected) == "right"


@pytest.mark.parametrize("kind", ["parquet", "rocksdb"])
@pytest.mark.parametrize("number", [1, 2])
def test_rows_that_are_missing_or_of_another_table_are_refused(tmp_path, kind, number):
    if kind == "rocksdb":
        pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    url, folder = f"{kind}:{tmp_path}/published", tmp_path / "published"
    expected = publish(url)
    own, kept = folder / f"{number:08d}" / f"v-0.{kind}", tmp_path / "kept"
    own.rename(kept)
    with pytest.raises(DataError, match=rf"v-0\.{kind}.* is missing; publish a whole generation"):
        PublishedReader(open_target(url))
    for other in (folder / f"{number:08d}" / f"w-0.{kind}", folder / f"{3 - number:08d}" / f"v-0.{kind}"):
        (shutil.copytree if other.is_dir() else shutil.copy)(other, own)
        assert outcome(url, expected) == "refused", f"rows of {other} are taken for those of {own}"
        shutil.rmtree(own) if own.is_dir() else own.unlink()
    kept.rename(own)
    assert outcome(url, expected) == "right"


def test_the_file_of_a_cut_network_is_named(tmp_path):
    publish(f"parquet:{tmp_path}/published")
    path = tmp_path / "published" / "00000002" / "network.pt"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"{path} has [\d,]+ bytes where [\d,]+ were written"):
        PublishedReader(open_target(f"parquet:{tmp_path}/published"))


def test_a_file_says_whose_rows_it_has(tmp_path):
    import pyarrow.parquet as pq

    publish(f"parquet:{tmp_path}/published")
    found = pq.read_schema(tmp_path / "published" / "00000002" / "w-0.parquet").metadata[b"rowmesh"]
    assert found == b'{"generation": 2, "table": "w", "part": 0}'


def test_a_generation_in_a_chain_that_is_another_is_refused(tmp_path):
    publish(f"parquet:{tmp_path}/published")
    publish(f"parquet:{tmp_path}/other")
    target = open_target(f"parquet:{tmp_path}/other")
    Publisher(target, TABLES, run="another").publish(3, {}, {})
    text = target.manifest(3)
    assert text is not None
    forged = Generation.read(text, "")
    values = {**vars(forged), "number": 1}
    (tmp_path / "published" / "00000001" / "manifest.json").write_bytes(Generation(**values).to_json())
    with pytest.raises(DataError, match="is not the one that generation 2 changes"):
        PublishedReader(open_target(f"parquet:{tmp_path}/published"))


def test_a_flipped_bit_is_served_from_no_key(redis_server):
    expected, draw = publish(redis_server.url), np.random.default_rng(0)
    assert outcome(redis_server.url, expected) == "right"
    outcomes = {}
    with redis_server.client() as client:
        for key in sorted(client.keys("rowmesh-published:*")):
            if client.type(key) == b"string":
                whole, of_key = client.get(key), []
                for _ in range(FLIPS):
                    client.set(key, flipped(whole, draw))
                    of_key.append(outcome(redis_server.url, expected))
                client.set(key, whole)
            elif client.type(key) == b"hash":
                of_key = []
                for field, whole in list(client.hgetall(key).items())[:FLIPS]:
                    client.hset(key, field, flipped(whole, draw))
                    of_key.append(outcome(redis_server.url, expected))
                    client.hset(key, field, whole)
            else:
                continue
            outcomes[key.decode()] = of_key
    changed = {name: set(found) for name, found in outcomes.items()}
    read_by_no_reader = {"rowmesh-published:2:manifest", "rowmesh-published:1:network"}
    for name, found in changed.items():
        allowed = {"refused", "right"} if ":1:rows" in name else {"refused"}  # half of these rows are changed
        assert name in read_by_no_reader or found <= allowed, name
    assert sum(len(found) for found in outcomes.values()) > 4 * FLIPS


def test_rows_that_a_server_has_lost_or_that_are_another_table_s_are_refused(redis_server):
    expected = publish(redis_server.url)
    with redis_server.client() as client:
        kept = client.hgetall("rowmesh-published:2:rows:v")
        for change in (
            lambda: client.delete("rowmesh-published:2:rows:v"),
            lambda: client.hdel("rowmesh-published:2:rows:v", *list(kept)[:1]),
            lambda: client.copy("rowmesh-published:2:rows:w", "rowmesh-published:2:rows:v", replace=True),
            lambda: client.copy("rowmesh-published:1:rows:v", "rowmesh-published:2:rows:v", replace=True),
        ):
            change()
            assert outcome(redis_server.url, expected) == "refused"
            client.delete("rowmesh-published:2:rows:v")
            client.hset("rowmesh-published:2:rows:v", mapping=kept)
    assert outcome(redis_server.url, expected) == "right"


def test_an_id_that_two_ranks_publish_is_an_error_where_nobody_could_tell_which(redis_server):
    target = open_target(redis_server.url)
    twice = Changes(rows=[(IDS[:3], rows_of(1)[:3]), (IDS[2:4], rows_of(2)[2:4])])
    with pytest.raises(StoreError, match="has 4 rows of table 'v' in generation 1, and 5 were written"):
        Publisher(target, TABLES).publish(1, {"v": twice}, {})
    assert target.newest() is None
    target.close()


def test_what_is_published_in_another_form_is_refused(tmp_path):
    pytest.importorskip("rocksdict", reason="the package rocksdict is not installed")
    publish(f"parquet:{tmp_path}/published")
    other = open_target(f"rocksdb:{tmp_path}/published")
    with pytest.raises(DataError, match=r"has v-0.parquet, and no files \.rocksdb"):
        PublishedReader(other)
    with pytest.raises(StoreError, match="has generations as parquet, not rocksdb"):
        Publisher(other, TABLES).publish(3, {}, {})


def test_old_generations_that_cannot_be_read_do_not_stay(tmp_path):
    folder, target = tmp_path / "published", open_target(f"parquet:{tmp_path}/published")
    publisher = Publisher(target, TABLES, keep_last=1, whole_every=1)
    publisher.publish(1, {}, {})
    (Path(folder) / "00000001" / "manifest.json").write_bytes(b"[" * 100_000)
    publisher.publish(2, {}, {})
    assert target.numbers() == [2]
