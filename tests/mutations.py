"""Faults that the tests must find: each mutation breaks one line of the package, and some test has to fail.

    python -m tests.mutations                 # all of them, a few minutes each on a busy machine
    python -m tests.mutations --only relay    # those whose name contains a word
    python -m tests.mutations --list

The tests are those that run before a change lands: what `make test` runs of the files of a mutation, and where all of
that passes, what `make test-listed` runs of them. Prints one JSON line a mutation, and at the end
{"summary": {"killed": 50, "of": 50, "others": {}}}. A mutation whose line is not in its file any more is an error:
move it along with the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1200
MARKS = ("not slow", "listed")  # what `make test` runs, then what `make test-listed` does
PASSED, FAILED, NO_TESTS = 0, 1, 5  # how pytest ends


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: what goes wrong.
        file: where.
        old, new: the text, which the file has once, and what it becomes.
        tests: what pytest runs.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


PLAIN = "tests/collection/test_collection.py tests/collection/test_equivalence.py"
PLANS = "tests/test_plans.py"
RANKS = "tests/exchange tests/collection/test_collection.py"
REPLICAS = "tests/test_two_dimensional.py"
PIPELINE = "tests/pipeline/test_pipeline.py tests/pipeline/test_mistakes.py tests/ops/test_window.py"
TIERS = "tests/tables tests/pipeline/test_tiers.py"
PAUSE = "tests/pipeline/test_pause.py"
CORES = "tests/mesh/test_ordered_sums.py tests/exchange tests/test_tensor_train_tables.py"
DEVICE = "tests/test_device.py tests/exchange/device tests/pipeline/test_device.py"

GATHER, ROUTE, MERGE = "rowmesh/ops/gather/cpu.py", "rowmesh/ops/route/cpu.py", "rowmesh/ops/merge_update/merging.py"
WINDOW, EXCHANGE = "rowmesh/ops/window/cpu.py", "rowmesh/exchange"
DYNAMIC, CHECKPOINT, SEQUENCE = "rowmesh/tables/dynamic", "rowmesh/checkpoint", "rowmesh/run/sequence"
MERGE_UPDATE, SUMS = "rowmesh/ops/merge_update/cpu.py", "tests/test_sums.py"
PUBLISHER = "rowmesh/publish/publisher.py"

MUTATIONS = [
    Mutation(
        "reply: rows of the wrong slot",
        GATHER,
        "row = load_row(arena + load_u32(slots + 4 * m) * ROW_BYTES, DIM, STORAGE)",
        "row = load_row(arena + load_u32(slots + 4 * max(m - 1, 0)) * ROW_BYTES, DIM, STORAGE)",
        PLAIN,
    ),
    Mutation(
        "reply: one entry of a chain is skipped",
        GATHER,
        "                if rank == own:\n",
        "                if rank == own or entry == 3:\n",
        PLANS,
    ),
    Mutation(
        "route: a row of another owner",
        ROUTE,
        "destination = row + shift & mask",
        "destination = row + shift + 1 & mask",
        PLAIN,
    ),
    Mutation("route: slots of other rows", ROUTE, "owner, base + quotient(x, per_divisor)", "owner, base", PLANS),
    Mutation(
        "route: the last id is not refused",
        ROUTE,
        "if np.uint64(row) >= limit:\n                    return u\n                destination",
        "if np.uint64(row) > limit:\n                    return u\n                destination",
        PLAIN,
    ),
    Mutation(
        "merge: a request is chained to the head",
        MERGE,
        "store_u32(nexts + 4 * load_u32(tails + 4 * m), entry)",
        "store_u32(nexts + 4 * load_u32(heads + 4 * m), entry)",
        PLAIN,
    ),
    Mutation(
        "merge: nodes are not summed apart",
        f"{EXCHANGE}/incoming.py",
        "            sources.end_node()\n",
        "            pass\n",
        PLANS,
    ),
    Mutation(
        "push: gradients of one rank are dropped",
        "rowmesh/ops/merge_update/sources.py",
        "        self._lists.append((slots, offsets.ctypes.data, gradients))\n",
        "        if len(self._lists) != 1:\n            self._lists.append((slots, offsets.ctypes.data, gradients))\n",
        PLAIN,
    ),
    Mutation(
        "one-sided: gradients of a copy are dropped",
        "rowmesh/ops/merge_update/sources.py",
        "for owner in np.flatnonzero(sizes).tolist()]",
        "for owner in np.flatnonzero(sizes).tolist()[1:]]",
        PLANS,
    ),
    Mutation(
        "one-sided: ranks do not wait for updates",
        f"{EXCHANGE}/one_sided.py",
        "self._pushed = None\n        self._barrier.wait()\n",
        "self._pushed = None\n",
        RANKS,
    ),
    Mutation(
        "steps: a rank does not hear that another one refuses",
        f"{EXCHANGE}/handshake.py",
        "if refusal is None and (others := refusing(numbers)):",
        "if refusal is None and (others := refusing(numbers[:0])):",
        "tests/faults/test_steps.py",
    ),
    Mutation(
        "steps: gradients of a step that no rank takes are forgotten",
        "rowmesh/collection/engine.py",
        "            self._withdraw()\n        return refusal\n",
        "            self._withdraw()\n            self.pending.clear()\n        return refusal\n",
        "tests/faults/test_steps.py",
    ),
    Mutation(
        "one-sided: a send buffer that moved is read where it was",
        f"{EXCHANGE}/one_sided.py",
        "if mapped is not None and mapped[0] == generation:",
        "if mapped is not None:",
        RANKS,
    ),
    Mutation(
        "copies: the sums of one member are not applied",
        f"{EXCHANGE}/copies.py",
        "        for sums in everyone:\n",
        "        for sums in everyone[1:]:\n",
        PLANS,
    ),
    Mutation(
        "copies: what is passed on is applied twice",
        f"{EXCHANGE}/copies.py",
        "if member != channel.member:",
        "if True:",
        PLANS,
    ),
    Mutation(
        "two hops: rows of a node begin one later",
        f"{EXCHANGE}/copies.py",
        "into = replies + reply_bounds[node] * exchange.row_bytes",
        "into = replies + max(reply_bounds[node] - 1, 0) * exchange.row_bytes",
        PLANS,
    ),
    Mutation(
        "two hops: forwarding is skipped",
        f"{EXCHANGE}/collective_group.py",
        "            self._copies.pass_on(received, self._within, update)\n",
        "            pass\n",
        PLANS,
    ),
    Mutation(
        "exact replicas: only what this replica summed is applied",
        f"{EXCHANGE}/replica_rows.py",
        "self._update(merged, update)",
        "self._update(self.merge(deltas[:1]), update)",
        REPLICAS,
    ),
    Mutation(
        "exact replicas: sums are added in another order",
        f"{EXCHANGE}/replica_rows.py",
        "return merge([delta.slots for delta in deltas], [delta.values[0] for delta in deltas], self._merger)",
        "deltas = deltas[::-1]; "
        "return merge([delta.slots for delta in deltas], [delta.values[0] for delta in deltas], self._merger)",
        REPLICAS,
    ),
    Mutation(
        "averages: rows stay marked",
        "rowmesh/ops/average/__init__.py",
        "        marks.numpy()[slots.numpy()[begin:end]] = 0\n",
        "",
        REPLICAS,
    ),
    Mutation(
        "averages: moments are not averaged",
        f"{EXCHANGE}/replica_rows.py",
        "        for kind, (table, means) in enumerate(zip(self.tables, out, strict=True)):\n",
        "        for kind, (table, means) in list(enumerate(zip(self.tables, out, strict=True)))[:1]:\n",
        REPLICAS,
    ),
    Mutation(
        "window: a row that is not final is fetched early",
        WINDOW,
        "if load_u32(before + 4 * m) == number - 1:",
        "if load_u32(before + 4 * m) == number - 2:",
        PIPELINE,
    ),
    Mutation(
        "window: a gradient goes before its last micro-batch",
        WINDOW,
        "            push = last\n",
        "            push = mask & -mask\n",
        PIPELINE,
    ),
    Mutation(
        "window: gradients of a phase come twice",
        "rowmesh/ops/window/host.py",
        "into = self._gradients.buffer.address + self.gradients_out.part(phase).start * self._gradient_bytes",
        "into = self._gradients.buffer.address",
        PIPELINE,
    ),
    Mutation(
        "tiers: a failed write counts as done",
        "rowmesh/tables/cache.py",
        "self.notify_freed(self.table.written(cache_slots, failure is None, self.retain))",
        "self.notify_freed(self.table.written(cache_slots, True, self.retain))",
        TIERS,
    ),
    Mutation(
        "tiers: an updated row counts as clean",
        "rowmesh/tables/cached.py",
        "self._cache.unpin(pinned.cache_slots, changed)",
        "self._cache.unpin(pinned.cache_slots, False)",
        TIERS,
    ),
    Mutation(
        "migration: states stay behind",
        f"{EXCHANGE}/migration.py",
        "        target[torch.from_numpy(moves.kept_to)] = source[torch.from_numpy(moves.kept_from)]\n",
        "        if target.shape == new.rows.shape:\n"
        "            target[torch.from_numpy(moves.kept_to)] = source[torch.from_numpy(moves.kept_from)]\n",
        "tests/exchange/test_migration.py tests/test_migrations.py",
    ),
    Mutation(
        "cores: sums leave one rank out",
        "rowmesh/mesh/ordered_sums.py",
        "    for vector in vectors[2:]:\n",
        "    for vector in vectors[3:]:\n",
        CORES,
    ),
    Mutation(
        "device: rows of the wrong request",
        "rowmesh/ops/window/device.py",
        "slots = self._asked_slots[part] if order is None else self._asked_slots.index_select(0, order[part])",
        "slots = self._asked_slots[part]",
        DEVICE,
    ),
    Mutation(
        "device: routes are merged in another order",
        f"{EXCHANGE}/device_lanes.py",
        "return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])",
        "return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank[::-1]])",
        DEVICE,
    ),
    Mutation(
        "device: a final row is stale",
        "rowmesh/ops/window/device.py",
        "by_slot = (places < 0)",
        "by_slot = (places < 1)",
        DEVICE,
    ),
    Mutation(
        "dynamic: ids live a step too long",
        f"{DYNAMIC}/expiry.py",
        "past = max(past, step - rules.ttl_steps)",
        "past = max(past, step - rules.ttl_steps - 1)",
        "tests/tables/dynamic/test_shards.py",
    ),
    Mutation(
        "dynamic: windows of counts begin a step late",
        f"{DYNAMIC}/shards.py",
        "window = step // self.rules.window_steps if",
        "window = max(step - 1, 0) // self.rules.window_steps if",
        "tests/tables/dynamic/test_shards.py",
    ),
    Mutation(
        "dynamic: what is taken back stays counted",
        f"{DYNAMIC}/shards.py",
        "            before.uncount()\n",
        "            pass\n",
        "tests/exchange/resolve/test_undo.py",
    ),
    Mutation(
        "dynamic: a record that was not written yet is not found",
        f"{DYNAMIC}/demoted.py",
        "        for change in reversed(changes):\n",
        "        for change in ():\n",
        "tests/tables/dynamic/test_demoted.py tests/tables/dynamic/test_demoted_stores.py",
    ),
    Mutation(
        "checkpoint: older rows are put over newer ones",
        f"{CHECKPOINT}/chain.py",
        "newer = list(zip(entries[:-1], files[:-1], strict=True))[::-1]",
        "newer = list(zip(entries[:-1], files[:-1], strict=True))",
        "tests/checkpoint/test_chain.py",
    ),
    Mutation(
        "checkpoint: what an increment adds to is removed",
        f"{CHECKPOINT}/series.py",
        "            kept.update(self._parents(step))\n",
        "            pass\n",
        "tests/checkpoint/test_series.py tests/checkpoint/test_chain.py",
    ),
    Mutation(
        "checkpoint: rows that steps change meanwhile are written as they are then",
        f"{CHECKPOINT}/store_snapshot.py",
        "return self._rows.restored(copied, claimed, out)",
        "return copied",
        "tests/checkpoint/test_snapshot.py",
    ),
    Mutation(
        "publish: what a generation changes is removed",
        PUBLISHER,
        "            if other not in needed:\n",
        "            if other != number:\n",
        "tests/publish/test_publisher.py",
    ),
    Mutation(
        "publish: ids that are gone are served",
        PUBLISHER,
        "if not is_whole and len(change.deleted):",
        "if is_whole and len(change.deleted):",
        "tests/publish/test_publisher.py",
    ),
    Mutation(
        "sequences: items of more than 50 events ago count as unseen",
        f"{SEQUENCE}/evaluation.py",
        "spans(data.offsets[:-1][users], data.targets(split)[users])",
        "spans(np.maximum(data.offsets[:-1], data.targets(split) - 50)[users], data.targets(split)[users])",
        "tests/run/sequence/test_evaluation.py",
    ),
    Mutation(
        "sequences: every epoch has the same negatives",
        f"{SEQUENCE}/batches.py",
        "drawn = self._scored.ids(events, number, number // self.num_batches)",
        "drawn = self._scored.ids(events, number, 0)",
        "tests/run/sequence/test_batches.py",
    ),
    Mutation(
        "sequences: every position of a user has the same negatives",
        f"{SEQUENCE}/batches.py",
        "places = _places(events.offsets.numpy()).astype(np.uint64)",
        "places = _places(events.offsets.numpy()).astype(np.uint64) * np.uint64(0)",
        "tests/run/sequence/test_batches.py",
    ),
    Mutation(
        "pause: items that were read are gone",
        "rowmesh/pipeline/stages.py",
        "            yield from read\n",
        "            yield from ()\n",
        PAUSE,
    ),
    Mutation(
        "pause: what was decided ahead stands at the end of data",
        "rowmesh/pipeline/loop.py",
        "min(num_given, self._ends.num_decided)",
        "self._ends.num_decided",
        PAUSE,
    ),
    Mutation(
        "pause: the failure of a loader is forgotten",
        "rowmesh/pipeline/stages.py",
        "            if failure is not None:\n",
        "            if failure is None and failure is not None:\n",
        PAUSE,
    ),
    Mutation(
        "play: tasks begin before the driver enters their turn",
        "rowmesh/pipeline/playing.py",
        "if turn <= entered and",
        "if",
        "tests/pipeline/test_schedule.py",
    ),
    Mutation(
        "schedule: batches are opened as far ahead as they are read",
        "rowmesh/pipeline/schedule.py",
        "half = max(1, depth // 2) if depth",
        "half = depth if depth",
        "tests/pipeline/test_schedule.py",
    ),
    Mutation(
        "clip: gradients of other replicas are squared apart",
        f"{EXCHANGE}/shard_group.py",
        "return sum_of_squares_by_key(self._replicate_group, slots.cpu(), sums.cpu())",
        "return sum_of_squares(sums)",
        "tests/pipeline/test_clipping.py",
    ),
    Mutation(
        "tiers: rows that other replicas change are not noted",
        f"{EXCHANGE}/micro_batch.py",
        "                each.take_others(group, slots)\n",
        "                pass\n",
        "tests/pipeline/test_tiers_of_replicas.py",
    ),
    Mutation(
        "sums: gradients are summed over all ranks at once",
        MERGE_UPDATE,
        "stop = load_i64(ends + 8 * source)",
        "stop = 1 << 40",
        SUMS,
    ),
    Mutation(
        "sums: gradients are not summed node by node",
        MERGE_UPDATE,
        "if source // per_node != node:",
        "if source < node:",
        SUMS,
    ),
    Mutation(
        "sums: ranks in another order",
        f"{EXCHANGE}/bags.py",
        'order = np.argsort(np.array(tables, np.int64), kind="stable")',
        "order = np.lexsort((-np.array(of_message, np.int64), np.array(tables, np.int64)))",
        SUMS,
    ),
    Mutation(
        "sums: a mean is over the ids of the feature",
        f"{EXCHANGE}/bags.py",
        "codes = np.where((lengths",
        "lengths[:] = lengths.max(1, keepdims=True)\n        codes = np.where((lengths",
        SUMS,
    ),
    Mutation(
        "sums: gradients of the step before",
        f"{EXCHANGE}/summing.py",
        "            both[0].second.wait()\n",
        "            pass\n",
        SUMS,
    ),
]


def outcome(mutation: Mutation, folder: Path) -> str:
    """ "killed", "survived", or what went wrong; `folder` has a copy of the repository."""
    path = folder / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        return f"error: {mutation.file} has the line {text.count(mutation.old)} times"
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        for marks in MARKS:
            status = _run(marks, mutation.tests, folder)
            if status not in (PASSED, NO_TESTS):
                return "killed" if status == FAILED else f"error: pytest ended with {status}"
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        path.write_text(text, encoding="utf-8")
    return "survived"


def _run(marks: str, tests: str, folder: Path) -> int:
    """How pytest ends in a copy of the repository."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests.split()]
    # Also the processes that tests start elsewhere import the copy.
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, capture_output=True, env=environment, timeout=TIMEOUT_S).returncode


def main() -> int:
    """Runs the mutations that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a word of the names of those to run")
    parser.add_argument("--list", action="store_true", help="print their names")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    if options.list:
        print(*(mutation.name for mutation in chosen), sep="\n")
        return 0
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="rowmesh-mutations-") as scratch:
        folder = Path(scratch) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", "data/generated", ".hypothesis")
        shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)  # with the kernels that were compiled
        for mutation in chosen:
            began = time.perf_counter()
            results[mutation.name] = outcome(mutation, folder)
            elapsed_s = round(time.perf_counter() - began, 1)
            print(
                json.dumps({"mutation": mutation.name, "outcome": results[mutation.name], "s": elapsed_s}), flush=True
            )
    others = {name: result for name, result in results.items() if result != "killed"}
    print(json.dumps({"summary": {"killed": len(results) - len(others), "of": len(results), "others": others}}))
    return bool(others)


if __name__ == "__main__":
    sys.exit(main())
