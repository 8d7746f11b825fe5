"""Prepared data sets in which ids occur together: every batch shows some of many communities."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmesh.data import Schema, prepare

BATCH = 64


def draw_batches(num_batches, *, num_ids=4000, communities=100, active=2, seed=0):
    """Ids of one-hot samples, `[num_batches, BATCH]`; the communities of ids are the same for all seeds."""
    of_id = np.random.default_rng(99).integers(0, communities, num_ids)
    members = [np.flatnonzero(of_id == community) for community in range(communities)]
    rng = np.random.default_rng(seed)
    batches = np.empty((num_batches, BATCH), np.int64)
    for batch in batches:
        own = np.concatenate([members[community] for community in rng.integers(0, communities, active)])
        popular = np.minimum(rng.zipf(1.5, BATCH // 4), num_ids) - 1
        batch[:] = np.concatenate([rng.choice(own, BATCH - len(popular)), popular])
    return batches


def prepare_batches(folder, batches, *, bags=False, held_out=None):
    """A data set with a column `item` of these ids, one a sample (or a list of four), and an unrelated one, `other`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, values in {"train": batches, "validation": held_out}.items():
        if values is None:
            continue
        flat = values.ravel()
        items = pa.array(flat.reshape(-1, 4).tolist()) if bags else pa.array([f"item{i}" for i in flat])
        rng = np.random.default_rng(len(flat))
        other = pa.array(rng.integers(0, 50, len(items)))
        labels = pa.array(rng.integers(0, 2, len(items)))
        pq.write_table(pa.table({"y": labels, "item": items, "other": other}), folder / f"{split}.parquet")
        files[split] = [folder / f"{split}.parquet"]
    schema = Schema(format="parquet", label="y", categorical=("item", "other"))
    return prepare(files, folder / "prepared", schema, block_samples=16 * BATCH)
