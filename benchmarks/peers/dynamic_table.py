"""Peers of `benchmarks.dynamic_table`, each where this Python has it: prints a JSON line of each.

PEER/bin/python -m benchmarks.peers.dynamic_table NUM_IDS BATCH
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np


def draw(count: int, seed: int) -> np.ndarray:
    """Distinct ids of 64 bits, in no order: an odd multiplier is a bijection."""
    first = np.uint64(seed << 40)
    return ((np.arange(count, dtype=np.uint64) + first) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def probe(
    find: Callable[[np.ndarray], object], ids: np.ndarray, batch: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Nanoseconds of processor time an id, of ids that are known, in another order."""
    known = np.random.default_rng(0).permutation(ids)
    spent = []
    for start in range(0, len(ids) - batch, batch):
        part = known[start : start + batch]
        began = clock()
        find(part)
        spent.append((clock() - began) * 1e9 / batch)
    return {"probe_ns": round(statistics.median(spent), 1), "probe_min_ns": round(min(spent), 1)}


def measure_pandas(ids: np.ndarray, batch: int) -> dict[str, float]:
    """`Index.get_indexer`; its table is built at the first call."""
    import pandas as pd

    began = time.thread_time()
    index = pd.Index(ids)
    index.get_indexer(ids[:1])
    insert = (time.thread_time() - began) * 1e9 / len(ids)
    return {"insert_ns": round(insert, 1), **probe(index.get_indexer, ids, batch)}


def measure_cykhash(ids: np.ndarray, batch: int) -> dict[str, float]:
    """`Int64Set`: whether ids are in it; it knows no slots."""
    import cykhash

    began = time.thread_time()
    known = cykhash.Int64Set_from_buffer(ids)
    insert = (time.thread_time() - began) * 1e9 / len(ids)
    found = np.empty(batch, np.uint8)
    return {"insert_ns": round(insert, 1), **probe(lambda part: cykhash.isin_int64(part, known, found), ids, batch)}


def measure_torchrec(ids: np.ndarray, batch: int) -> dict[str, float]:
    """`MCHManagedCollisionModule` of one thread, LRU: filled, probed, then other ids; it evicts every ten steps."""
    import torch
    from torchrec import JaggedTensor
    from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule

    torch.set_num_threads(1)
    ids = ids & (2**63 - 1)  # it takes ids from zero
    interval = 10
    module = MCHManagedCollisionModule(
        zch_size=len(ids),
        device=torch.device("cpu"),
        eviction_policy=LRU_EvictionPolicy(),
        eviction_interval=interval,
    )

    def feature(part: np.ndarray) -> dict[str, JaggedTensor]:
        return {"f": JaggedTensor(torch.from_numpy(part.copy()), lengths=torch.ones(len(part), dtype=torch.int64))}

    for start in range(0, len(ids), batch * interval):  # in few large steps: only the last ones are timed
        parts = [ids[start + k * batch : start + (k + 1) * batch] for k in range(interval)]
        for part in parts:
            module.profile(feature(part))
    module.train(False)
    numbers = probe(lambda part: module.remap(feature(part)), ids, batch)
    module.train(True)
    new = draw(interval * batch, 3) & (2**63 - 1)
    began = time.thread_time()
    for start in range(0, len(new), batch):
        features = feature(new[start : start + batch])
        module.remap(module.profile(features))
    return {**numbers, "insert_evict_ns": round((time.thread_time() - began) * 1e9 / len(new), 1)}


def measure_tensorflow_recommenders_addons(ids: np.ndarray, batch: int) -> dict[str, float]:
    """A dynamic variable of dim 1 on the CPU, with the least recently seen removed every ten steps.

    Processor time of all threads: TensorFlow computes in threads of its own.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["CUDA_VISIBLE_DEVICES"] = "3", ""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from tensorflow_recommenders_addons import dynamic_embedding

    interval, row = 10, tf.zeros([batch, 1])
    table = dynamic_embedding.get_variable(
        "benchmark", key_dtype=tf.int64, dim=1, devices=["/CPU:0"], init_size=len(ids)
    )
    policy = dynamic_embedding.TimestampRestrictPolicy(table)

    def add(part: np.ndarray) -> None:
        keys = tf.constant(part)
        table.upsert(keys, row)
        policy.apply_update(keys)

    spent = []
    for start in range(0, len(ids), batch):
        began = time.process_time()
        add(ids[start : start + batch])
        spent.append((time.process_time() - began) * 1e9 / batch)
    numbers = probe(lambda part: table.lookup(tf.constant(part)), ids, batch, time.process_time)
    new = draw(interval * batch, 3)
    began = time.process_time()
    for start in range(0, len(new), batch):
        table.lookup(tf.constant(new[start : start + batch]))  # as it must find what is new
        add(new[start : start + batch])
    policy.apply_restriction(len(ids), trigger=len(ids))
    evicted = (time.process_time() - began) * 1e9 / len(new)
    return {"insert_ns": round(statistics.median(spent), 1), **numbers, "insert_evict_ns": round(evicted, 1)}


def main() -> None:
    """Runs all that are here."""
    num_ids, batch = int(sys.argv[1]), int(sys.argv[2])
    peers = {
        "pandas": measure_pandas,
        "cykhash": measure_cykhash,
        "torchrec": measure_torchrec,
        "tensorflow_recommenders_addons": measure_tensorflow_recommenders_addons,
    }
    for name, run in peers.items():
        if find_spec(name) is not None:
            print(json.dumps({"contestant": name, **run(draw(num_ids, 1), batch)}), flush=True)


if __name__ == "__main__":
    main()
