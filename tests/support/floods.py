"""Plain loops under a flood of Ctrl-C, in a process of their own: `python -m tests.support.floods STORAGE`.

A Ctrl-C that came outside the loop would end whatever runs the tests.
"""

import json
import random
import signal
import sys
import threading
import time

import torch

from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, SparseBatch, TableSpec
from rowmesh.tables import Tiers


def flood(body, seconds):
    """Runs `body` again and again while Ctrl-C comes at any moment; returns how often it did."""
    main, count, until_s, random_s = threading.get_ident(), 0, time.monotonic() + seconds, random.Random(0)
    may_press = threading.Event()  # one Ctrl-C each time that the loop below is inside its try

    def press():
        while time.monotonic() < until_s:
            time.sleep(random_s.uniform(0.0005, 0.003))
            if may_press.wait(0.1):
                may_press.clear()
                signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    while True:
        try:
            while time.monotonic() < until_s:
                may_press.set()
                body()
            thread.join()
            return count
        except KeyboardInterrupt:
            count += 1


def main():
    storage = sys.argv[1]
    torch.set_num_threads(1)
    sys.unraisablehook = lambda _: None  # Python drops what finalizers raise
    table = TableSpec(name="item", num_rows=50, dim=4, optimizer=SGD(lr=1.0), storage=storage)
    embeddings = EmbeddingCollection([table], tiers=Tiers(fast_rows=10))
    optimizer = EmbeddingOptimizer(embeddings)
    batch = SparseBatch.from_bags({"item": [[1], [2]]})

    def row():
        with torch.no_grad():
            return embeddings(batch).values.double()

    before = row()

    def body():
        optimizer.zero_grad()
        embeddings(batch).values.sum().backward()
        optimizer.step()

    body()  # kernels are compiled
    count = flood(body, 0.5)
    largest = float((row() - (before - embeddings.step_count)).abs().max())
    print(json.dumps({"interrupts": count, "steps": embeddings.step_count, "difference": largest}))  # noqa: T201
    embeddings.close()


if __name__ == "__main__":
    main()
