"""README is short, and its Python runs as it stands there, on one rank and on two; so does that of two other pages."""

import re
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import rowmesh
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, TableSpec
from rowmesh.checkpoint import read_manifest
from rowmesh.mesh import Mesh
from rowmesh.tables.shard import LocalRows
from tests.support.ranks import RankPool

ROOT = Path(__file__).parents[1]
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


def code(page: str) -> str:
    """The Python of a page, without the column of the + that docs/loop.md has."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return "\n".join(re.sub(r"^[+ ] ", "", block, flags=re.MULTILINE) for block in blocks)


def samples(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Three batches of one rank."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(3):
        dense, labels = torch.rand(6, 13, generator=generator), torch.rand(6, generator=generator).round()
        ids = torch.stack([torch.randint(ROWS[name], (6,), generator=generator) for name in NAMES])
        batches.append((dense[rank::world_size], ids[:, rank::world_size], labels[rank::world_size]))
    return batches


def run_loop(mesh: Mesh, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, torch.Tensor]], int]:
    """What docs/loop.md trains: the network, this rank's rows by table and number, and the steps."""
    network = Network(seed=mesh.rank)  # ranks may begin with different ones
    scope = {
        "names": NAMES,
        "rows": ROWS,
        "loader": samples(mesh.rank, mesh.world_size),
        "model": network,
        "loss_function": torch.nn.BCEWithLogitsLoss(),
        "dense_optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
    }
    with patch.object(Mesh, "connect", lambda: mesh), chdir(folder):  # the ranks have met before
        exec(code("docs/loop.md"), scope)
    assert scope["step"] == 3
    assert read_manifest(folder / "runs/model").world_size == mesh.world_size
    embeddings = scope["embeddings"]
    rows = {name: by_number(embeddings.local_rows(name)) for name in NAMES}
    embeddings.close()
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}, rows, embeddings.step_count


def run_readme(mesh: Mesh) -> tuple[str, dict[str, dict[int, torch.Tensor]]]:
    """README's program: what it prints, and this rank's rows by table and number."""
    scope: dict[str, Any] = {}
    with patch.object(Mesh, "connect", lambda: mesh), torch.random.fork_rng(), redirect_stdout(StringIO()) as output:
        exec(code("README.md"), scope)
    embeddings = scope["embeddings"]
    rows = {name: by_number(embeddings.local_rows(name)) for name in NAMES}
    embeddings.close()
    return output.getvalue(), rows


def by_number(pieces: list[LocalRows]) -> dict[int, torch.Tensor]:
    return {row: value.clone() for piece in pieces for row, value in zip(piece.rows, piece.values, strict=True)}


def test_readme_fits_its_bounds():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 140
    assert len([line for line in code("README.md").splitlines() if line]) == 12
    links = re.findall(r"^- \[", text.partition("## Where to go")[2], re.MULTILINE)
    assert len(links) == 8


def test_all_pages_are_listed():
    listed = set(re.findall(r"\]\(([\w/]+\.md)\)", (ROOT / "docs/pages.md").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - listed == {"pages.md"}


def test_the_changelog_is_short():
    """Until a version is released, it says what that will have, not how it came about."""
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60


def test_the_program_on_readme_trains_the_same_rows_on_two_ranks(ranks: RankPool):
    printed, expected = run_readme(Mesh())
    assert printed == "100% right\n"
    assert f"prints `{printed.strip()}`" in (ROOT / "README.md").read_text()
    found = ranks.run(run_readme, world_size=2)
    assert [printed for printed, _ in found] == ["100% right\n"] * 2
    for name in NAMES:
        assert [len(rows[name]) for _, rows in found] == [500, 500]
        merged = {row: value for _, rows in found for row, value in rows[name].items()}
        torch.testing.assert_close(dict(sorted(merged.items())), expected[name], rtol=1e-2, atol=1e-3)


def test_the_page_on_loops_runs_on_one_rank(tmp_path: Path):
    network, rows, num_steps = run_loop(Mesh(), tmp_path)
    assert num_steps == 3
    assert [len(rows[name]) for name in NAMES] == [50, 9]
    assert not network["linear.weight"].equal(Network(seed=0).linear.weight)


@pytest.mark.parametrize("world_size", [2])
def test_the_page_on_loops_trains_the_same_model_on_several_ranks(ranks: RankPool, tmp_path: Path, world_size: int):
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    expected_network, expected_rows, _ = run_loop(Mesh(), alone)
    found = ranks.run(run_loop, together, world_size=world_size)
    for network, _, num_steps in found:
        assert num_steps == 3
        assert all(network[name].equal(found[0][0][name]) for name in network), "ranks have different networks"
        torch.testing.assert_close(network, expected_network, rtol=1e-6, atol=1e-7)
    for name in NAMES:
        merged = {row: value for _, rows, _ in found for row, value in rows[name].items()}
        torch.testing.assert_close(dict(sorted(merged.items())), expected_rows[name], rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled:UserWarning")
def test_the_page_on_saving_runs(tmp_path: Path):
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=9, dim=4)])
    model = torch.nn.ModuleDict({"embeddings": embeddings, "network": torch.nn.Linear(4, 1)})
    scope = {
        "rowmesh": rowmesh,
        "model": model,
        "sparse_optimizer": (sparse := EmbeddingOptimizer(embeddings)),
        "dense_optimizer": torch.optim.Adam(model.parameters()),
        "schedule": torch.optim.lr_scheduler.StepLR(sparse, 10),
        "step": 7,
    }
    with chdir(tmp_path):
        exec(code("docs/saving.md"), scope)
    assert scope["step"] == 7
    assert set(model.state_dict()) == {"embeddings.item.weight", "network.weight", "network.bias"}
