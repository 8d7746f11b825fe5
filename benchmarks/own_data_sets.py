"""Small data sets as newcomers bring them: public ones where they lie, and drawn ones."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.click_sets import CRITEO_FILES
from rowmesh.data import PlantedConfig, Prepared, Schema, Splitter, prepare, synthesize

MOVIELENS = tuple(f"movielens_100k/ml-100k.{kind}.tsv.gz" for kind in ("inter", "user", "item"))
KUAIRAND = "sequences/kuairand27k_likes_kcore15.tsv.gz"
VALIDATION, TEST = 0.15, 0.25
USERS_TAKEN = 3  # one of so many, of MovieLens
Row = dict[str, str]


@dataclass(frozen=True)
class OwnSet:
    """One data set.

    Attributes:
        name: in the results.
        files: that it needs, in the folder of public data.
        make: prepares it: (folder of public data, folder to write in, seed, share of its samples).
    """

    name: str
    files: tuple[str, ...]
    make: Callable[[Path, Path, int, float], Prepared]

    def missing(self, data: Path | None) -> list[str]:
        """Files that are not there."""
        return [name for name in self.files if data is None or not (data / name).is_file()]


def _rows(path: Path) -> Iterator[Row]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            yield {name.split(":")[0]: value for name, value in row.items()}


def _movielens(data: Path, share: float) -> tuple[list[str], list[list[str]]]:
    """Ratings of 4 and 5 are positive; in order of time. Beside ids there are what users and films are."""
    events, users, items = (data / name for name in MOVIELENS)
    user_of = {row["user_id"]: row for row in _rows(users)}
    item_of = {row["item_id"]: row for row in _rows(items)}
    every = round(USERS_TAKEN / share)
    found = [row for row in _rows(events) if int(row["user_id"]) % every == 0]
    found.sort(key=lambda row: float(row["timestamp"]))
    rows = []
    for event in found:
        user, item = user_of[event["user_id"]], item_of[event["item_id"]]
        year = item["release_year"] if item["release_year"].isdigit() else ""
        label = str(int(float(event["rating"]) >= 4))
        facts = [user["gender"], user["occupation"], item["class"].replace(" ", "|"), user["age"], year]
        rows.append([label, event["user_id"], event["item_id"], *facts, event["timestamp"]])
    return ["label", "user", "item", "gender", "occupation", "genres", "age", "year", "time"], rows


_MOVIELENS_SCHEMA = {
    "label": "label",
    "dense": ["age", "year", "time"],
    "categorical": ["user", "item", "gender", "occupation", {"name": "genres", "separator": "|"}],
}


def _users_last(data: Path, folder: Path, seed: int, share: float) -> Prepared:
    """The last ratings of every user are held out."""
    header, rows = _movielens(data, share)
    by_user: dict[str, list[list[str]]] = defaultdict(list)
    for row in rows:
        by_user[row[1]].append(row)
    splits: dict[str, list[list[str]]] = {"train": [], "validation": [], "test": []}
    for own in by_user.values():
        shares = (1 - VALIDATION - TEST, 1 - TEST)
        bounds = [round(len(own) * each) for each in shares]
        for split, part in zip(splits, (own[: bounds[0]], own[bounds[0] : bounds[1]], own[bounds[1] :]), strict=True):
            splits[split] += part
    files = {split: [_write(folder / f"{split}.csv", header, part)] for split, part in splits.items()}
    return prepare(files, folder / "prepared", Schema.parse(_MOVIELENS_SCHEMA))


def _new_users(data: Path, folder: Path, seed: int, share: float) -> Prepared:
    """The last ratings of all are held out: most of their users are in no other split."""
    header, rows = _movielens(data, share)
    splitter = Splitter(validation=VALIDATION, test=TEST)
    return _prepared(folder, header, rows, _MOVIELENS_SCHEMA, splitter)


def _kuairand(data: Path, folder: Path, seed: int, share: float) -> Prepared:
    names = ["label", "user_id", "video_id", "hourmin", "play_time_ms", "duration_ms", "comment_stay_time"]
    rows = [[row[name] for name in names] for row in _rows(data / KUAIRAND)]
    schema = {"label": "label", "dense": names[4:], "categorical": names[1:4]}
    return _prepared(folder, names, rows[: round(share * len(rows))], schema, _random(seed))


def _criteo(data: Path, folder: Path, seed: int, share: float) -> Prepared:
    files = [data / "criteo_kaggle" / name for name in CRITEO_FILES]
    return prepare({"train": files}, folder / "prepared", Schema.load("criteo"), splitter=_random(seed))


def _avazu(data: Path, folder: Path, seed: int, share: float) -> Prepared:
    files = [data / "avazu" / "train.csv.gz"]
    return prepare({"train": files}, folder / "prepared", Schema.load("avazu"), splitter=_random(seed))


def _planted(data: Path, folder: Path, seed: int, share: float) -> Prepared:
    """Criteo's shape in small: 13 dense features, 10 tables, ids of a power law."""
    rows = (20, 50, 100, 200, 400, 600, 800, 1000, 2000, 4000)
    planted = PlantedConfig(seed=seed, num_rows=rows, head=50)
    sizes = {"train": 24_000, "validation": 4_000, "test": 8_000}
    samples = {split: round(share * size) for split, size in sizes.items()}
    synthesize(folder / "drawn", samples, planted)
    files = {split: sorted((folder / "drawn").glob(f"{split}-*.parquet")) for split in samples}
    return prepare(files, folder / "prepared", Schema.load(folder / "drawn" / "schema.toml"))


def _shop(data: Path, folder: Path, seed: int, share: float) -> Prepared:
    """Purchases of a shop: tastes of 600 users for 900 items, heavy-tailed prices with gaps, ages, and a clock."""
    random, count = np.random.default_rng(seed), round(share * 30_000)
    users, items = random.zipf(1.3, count) % 600, random.zipf(1.2, count) % 900
    tastes, kinds = random.normal(size=(600, 4)), random.normal(size=(900, 4))
    price = random.lognormal(3, 1.5, 900)[items] * random.lognormal(0, 0.2, count)
    age = random.integers(18, 80, 600)[users]
    logit = random.normal(0, 0.7, 600)[users] + random.normal(0, 0.7, 900)[items] - 1.2
    logit += 0.4 * (tastes[users] * kinds[items]).sum(axis=1) - 0.5 * (np.log(price) - 3) - 0.02 * (age - 48)
    labels = random.random(count) < 1 / (1 + np.exp(-logit))
    is_known = random.random(count) > 0.1
    clock = 1_700_000_000 + np.arange(count) * 60
    prices = [f"{price[i]:.2f}" if is_known[i] else "" for i in range(count)]
    columns = (labels.astype(int), users, items, prices, age, clock)
    rows = [[str(value) for value in row] for row in zip(*columns, strict=True)]
    schema = {"label": "bought", "dense": ["price", "age", "time"], "categorical": ["user", "item"]}
    return _prepared(
        folder,
        ["bought", "user", "item", "price", "age", "time"],
        rows,
        schema,
        Splitter(validation=VALIDATION, test=TEST),
    )


def _random(seed: int) -> Splitter:
    return Splitter(validation=VALIDATION, test=TEST, how="random", seed=seed)


def _prepared(
    folder: Path, header: Sequence[str], rows: Iterable[Sequence[str]], schema: Mapping[str, object], splitter: Splitter
) -> Prepared:
    path = _write(folder / "train.csv", header, rows)
    return prepare({"train": [path]}, folder / "prepared", Schema.parse(dict(schema)), splitter=splitter)


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


SETS = (
    OwnSet("movielens, last of each user", MOVIELENS, _users_last),
    OwnSet("movielens, last of all", MOVIELENS, _new_users),
    OwnSet("kuairand", (KUAIRAND,), _kuairand),
    OwnSet("criteo", tuple(f"criteo_kaggle/{name}" for name in CRITEO_FILES), _criteo),
    OwnSet("avazu", ("avazu/train.csv.gz",), _avazu),
    OwnSet("planted", (), _planted),
    OwnSet("shop", (), _shop),
)
