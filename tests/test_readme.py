"""The Python of README runs as it stands there, on one rank and under torchrun's variables on two."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from rowmesh.embeddings import LocalRows
from rowmesh.mesh import Mesh
from tests.support.ranks import RankPool

README = Path(__file__).parents[1] / "README.md"
NAMES, ROWS = ["user", "item"], {"user": 50, "item": 9}


class Network(torch.nn.Module):
    """The dense part of a model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(13 + 2 * 64, 1)

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """`[B]`."""
        return self.linear(torch.cat([dense, vectors.flatten(1)], dim=1)).squeeze(1)


def blocks() -> list[str]:
    """The Python code in README, without the column of the +."""
    found = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return [re.sub(r"^[+ ] ", "", block, flags=re.MULTILINE) for block in found]


def samples(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Three batches of one rank."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(3):
        dense, labels = torch.rand(6, 13, generator=generator), torch.rand(6, generator=generator).round()
        ids = torch.stack([torch.randint(ROWS[name], (6,), generator=generator) for name in NAMES])
        batches.append((dense[rank::world_size], ids[:, rank::world_size], labels[rank::world_size]))
    return batches


def run(mesh: Mesh) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, torch.Tensor]], int]:
    """What README trains: the network, this rank's rows by table and number, and the steps."""
    network = Network(seed=mesh.rank)  # ranks may begin with different ones
    scope = {
        "names": NAMES,
        "rows": ROWS,
        "loader": samples(mesh.rank, mesh.world_size),
        "model": network,
        "loss_function": torch.nn.BCEWithLogitsLoss(),
        "dense_optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
    }
    with patch.object(Mesh, "connect", lambda: mesh):  # the ranks have met before
        exec(blocks()[0], scope)
    embeddings = scope["embeddings"]
    rows = {name: by_number(embeddings.local_rows(name)) for name in NAMES}
    embeddings.close()
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}, rows, embeddings.step_count


def by_number(pieces: list[LocalRows]) -> dict[int, torch.Tensor]:
    return {row: value.clone() for piece in pieces for row, value in zip(piece.rows, piece.values, strict=True)}


def test_the_loop_trains_on_one_rank():
    network, rows, num_steps = run(Mesh())
    assert num_steps == 3
    assert [len(rows[name]) for name in NAMES] == [50, 9]
    assert not network["linear.weight"].equal(Network(seed=0).linear.weight)


@pytest.mark.parametrize("world_size", [2])
def test_the_loop_trains_the_same_model_on_several_ranks(ranks: RankPool, world_size: int):
    expected_network, expected_rows, _ = run(Mesh())
    found = ranks.run(run, world_size=world_size)
    for network, _, num_steps in found:
        assert num_steps == 3
        assert all(network[name].equal(found[0][0][name]) for name in network), "ranks have different networks"
        torch.testing.assert_close(network, expected_network, rtol=1e-6, atol=1e-7)
    for name in NAMES:
        merged = {row: value for _, rows, _ in found for row, value in rows[name].items()}
        torch.testing.assert_close(dict(sorted(merged.items())), expected_rows[name], rtol=1e-6, atol=1e-7)
