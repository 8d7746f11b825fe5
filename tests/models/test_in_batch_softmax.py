"""Softmax over the items of a batch against a loop, and on several ranks against one."""

import math
import re
from pathlib import Path

import pytest
import torch

from rowmesh.errors import DataError
from rowmesh.mesh import RowsOfAllRanks
from rowmesh.models import InBatchSoftmax, ItemFrequency

W, TEMPERATURE = 6, 0.5


def batch(step, count=9):
    generator = torch.Generator().manual_seed(step)
    u = torch.randn(count, W, generator=generator, dtype=torch.float64)
    v = torch.randn(count, W, generator=generator, dtype=torch.float64)
    return u, v, torch.randint(-4, 4, (count,), generator=generator)


def by_hand(u, v, ids, log_q):
    losses = []
    for i in range(len(u)):
        scores = [
            float(u[i] @ v[j]) / TEMPERATURE - log_q[int(ids[j])] for j in range(len(u)) if j == i or ids[j] != ids[i]
        ]
        own = float(u[i] @ v[i]) / TEMPERATURE - log_q[int(ids[i])]
        losses.append(math.log(sum(map(math.exp, scores))) - own)
    return torch.tensor(losses, dtype=torch.float64)


def test_the_formula():
    u, v, ids = batch(0)
    loss = InBatchSoftmax(TEMPERATURE)
    torch.testing.assert_close(loss(u, v, ids), by_hand(u, v, ids, dict.fromkeys(range(-4, 4), 0.0)))


def test_frequencies_correct_it():
    """Algorithm 2 of the paper, with dictionaries."""
    loss = InBatchSoftmax(TEMPERATURE, ItemFrequency(1 << 16, rate=0.3))
    last, gap = {}, {}
    for step in range(1, 6):
        u, v, ids = batch(step)
        for one in set(ids.tolist()):
            passed = step - last.get(one, 0)
            gap[one] = 0.7 * gap[one] + 0.3 * passed if one in gap else passed
            last[one] = step
        log_q = {one: -math.log(max(each, 1.0)) for one, each in gap.items()}
        torch.testing.assert_close(loss(u, v, ids), by_hand(u, v, ids, log_q))
    loss.eval()
    before = loss.frequency.gap.clone()
    loss(u, v, ids)
    assert torch.equal(before, loss.frequency.gap)


def part_of(mesh, sizes):
    """Losses and gradients of this rank's samples."""
    loss = InBatchSoftmax(TEMPERATURE, ItemFrequency(1 << 16), gather=RowsOfAllRanks(mesh) if mesh else None)
    rank = mesh.rank if mesh else 0
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    found = []
    for step in range(3):
        u, v, ids = (each[mine].clone() for each in batch(step, sum(sizes)))
        u.requires_grad_()
        v.requires_grad_()
        losses = loss(u, v, ids)
        (losses * torch.arange(mine.start, mine.stop)).sum().backward()
        found.append((losses.detach(), u.grad, v.grad))
    return found


def ranks_part(mesh, sizes):
    return part_of(mesh, sizes)


def test_ranks_compare_with_the_items_of_all(ranks):
    sizes = [5, 4]
    whole, parts = part_of(None, [9]), ranks.run(ranks_part, sizes, world_size=2)
    for step, expected in enumerate(whole):
        for number, tensor in enumerate(expected):
            torch.testing.assert_close(torch.cat([part[step][number] for part in parts]), tensor)


def column_by_column(mesh, sizes):
    rows = torch.ones(sizes[mesh.rank], 2, requires_grad=True)
    gathered, _ = RowsOfAllRanks(mesh)(rows)
    grad = torch.arange(2.0 * sum(sizes)).view(sum(sizes), 2)
    gathered.backward(grad if mesh.rank else grad.T.contiguous().T)
    return rows.grad


def test_gradients_that_lie_otherwise_in_memory_are_added_alike(ranks):
    found = torch.cat(ranks.run(column_by_column, [1, 2], world_size=2))
    assert torch.equal(found, 2 * torch.arange(6.0).view(3, 2))


def test_shapes_are_checked():
    u, v, ids = batch(0)
    with pytest.raises(DataError, match=r"takes queries \[B, W\], items \[B, W\] and item_ids \[B\], got \[9, 6\]"):
        InBatchSoftmax()(u, v[:-1], ids)


def test_the_page_runs():
    """The loop of docs/models.md, as it stands there."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    assert torch.isfinite(names["loss"]).all()
    names["mesh"].close()
