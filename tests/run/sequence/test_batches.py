"""Negatives of sequence models: drawn anew where they should be, and alike wherever they are drawn."""

import numpy as np
import pytest
import torch

from rowmesh.data.events import SequenceLoader
from rowmesh.run.sequence.batches import Draws, StepLoader
from rowmesh.run.sequence.options import SequenceOptions

NEGATIVES = 8
OWN = SequenceOptions(loss="sampled_softmax", negatives=NEGATIVES, shared_negatives=False)
SHARED = SequenceOptions(loss="sampled_softmax", negatives=NEGATIVES, shared_negatives=True)


def drawn(events, options, num_epochs=2, seed=0, micro_batches=1, **where):
    """By epoch, step and micro-batch: users, ids and how far back each position is."""
    loader = SequenceLoader(events, "train", batch_size=32, max_length=16, **where)
    steps = StepLoader(loader, Draws(options, np.ones(events.num_items, np.int64), seed), micro_batches)
    return [[[(part.events, part.negative_ids) for part in step.parts] for step in steps] for _ in range(num_epochs)]


def by_user(epoch):
    """User and number of events that follow → negatives."""
    found = {}
    for parts in epoch:
        for batch, ids in parts:
            at = 0
            for user, length in zip(batch.users.tolist(), batch.offsets.diff().tolist(), strict=True):
                for place in range(length):
                    found[user, length - place] = tuple(ids[at + place].tolist())
                at += length
    return found


def share_of_equal(one, other):
    """Of the negatives at the same places; by chance 1 of the number of items."""
    return np.mean([a == b for key in one for a, b in zip(one[key], other[key], strict=True)])


def test_epochs_users_and_positions_have_negatives_of_their_own(events):
    first, second = (by_user(epoch) for epoch in drawn(events, OWN))
    assert first.keys() == second.keys()
    by_chance = 3 / events.num_items
    assert share_of_equal(first, second) < by_chance, "of two epochs"
    for name, (users, places) in {"positions": (0, 1), "users": (1, 0)}.items():
        pairs = {key: (key[0] + users, key[1] + places) for key in first}
        one = {key: first[key] for key, other in pairs.items() if other in first}
        assert share_of_equal(one, {key: first[pairs[key]] for key in one}) < by_chance, f"of neighbouring {name}"
    (other_seed,) = drawn(events, OWN, num_epochs=1, seed=1)
    assert share_of_equal(first, by_user(other_seed)) < by_chance, "of two seeds"


@pytest.mark.parametrize("world_size, micro_batches", [(1, 3), (3, 1), (2, 2)])
def test_any_number_of_ranks_and_micro_batches_draws_the_same(events, world_size, micro_batches):
    alone = [by_user(epoch) for epoch in drawn(events, OWN)]
    ranks = [
        [by_user(epoch) for epoch in drawn(events, OWN, micro_batches=micro_batches, rank=rank, world_size=world_size)]
        for rank in range(world_size)
    ]
    for number, epoch in enumerate(alone):
        assert {key: ids for rank in ranks for key, ids in rank[number].items()} == epoch


def test_steps_share_negatives_that_differ_from_step_to_step(events):
    epochs = drawn(events, SHARED, micro_batches=2)
    steps = []
    for parts in (parts for epoch in epochs for parts in epoch):
        assert all(torch.equal(ids, parts[0][1]) for _, ids in parts)
        steps.append(tuple(parts[0][1].tolist()))
    assert len(set(steps)) == len(steps) == 2 * len(epochs[0])
    assert all(len(ids) == NEGATIVES for ids in steps)
