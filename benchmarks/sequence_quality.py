"""HR@10 and NDCG@10 of sequence models, leave one out, beside popularity; one rank, full softmax.

    python -m benchmarks.sequence_quality --data ../shared/data/sequences             Amazon Beauty
    python -m benchmarks.sequence_quality --data ../shared/data/movielens_100k        and beside SASRec of plain torch
    python -m benchmarks.sequence_quality --data ../shared/data/sequences --quick     one seed, 3 epochs, SASRec

The items are an `nn.Embedding` and the optimizer is Adam: what is measured is data, encoder, loss and ranking, not the
tables. All items are ranked but those that the user has seen; tied items stand before the target. The epoch that is
best on the validation is tested, and no other looks at the test.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.plain_sasrec import PlainSASRec
from rowmesh.data.events import EventSchema, SequenceLoader, Sequences, prepare_events
from rowmesh.data.events.batch import SequenceBatch
from rowmesh.data.events.sequences import SplitName
from rowmesh.mesh import Mesh
from rowmesh.models.linear_layers import fast_linear
from rowmesh.models.sequence import KINDS, Kind, SequenceEncoder
from rowmesh.models.sequence.losses import full_softmax, score_shape
from rowmesh.run.sequence.ranking import Seen, Standings, rank_targets
from rowmesh.run.sequence.ranking_metrics import Mean, RankingMetrics

DIM, BLOCKS, HEADS = 64, 2, 2
PLAIN = "plain_sasrec"


@dataclass(frozen=True)
class DataSet:
    """A file of events, and how models read it.

    Attributes:
        file: its name.
        schema: its columns.
        length: the most events of a user that a model reads.
        batch_size: users.
        models: those that are trained unless others are named.
    """

    file: str
    schema: EventSchema
    length: int
    batch_size: int
    models: tuple[str, ...]


def _tabbed(*columns: str) -> EventSchema:
    user, item, time = columns
    return EventSchema(user=user, item=item, time=time, delimiter="\t", k_core=5)


BEAUTY = DataSet("beauty_timed.tsv.gz", _tabbed("user_id", "item_id", "timestamp"), 50, 256, KINDS)
MOVIELENS = DataSet(
    "ml-100k.inter.tsv.gz",
    _tabbed("user_id:token", "item_id:token", "timestamp:float"),
    200,
    128,
    (*KINDS, PLAIN),
)


class Recommender(nn.Module):
    """An encoder and the items that it reads and is compared with."""

    def __init__(self, kind: Kind, num_items: int, length: int, dropout: float) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, DIM)
        nn.init.normal_(self.items.weight, std=0.02)
        self.encoder = SequenceEncoder(
            kind, dim=DIM, num_blocks=BLOCKS, num_heads=HEADS, max_length=length, dropout=dropout
        )
        self._fast = fast_linear(self, 1024, score_shapes=[score_shape(DIM)])

    def loss(self, batch: SequenceBatch) -> Tensor:
        """The mean over what is predicted."""
        with self._fast():
            return full_softmax(self._queries(batch), batch.targets, self.items.weight).mean()

    def standings(self, batch: SequenceBatch, history: SequenceBatch) -> Standings:
        """Of each user's target; what the user saw before, whether the model reads it or not, is not ranked."""
        last = batch.offsets[1:] - 1
        seen = Seen(history.offsets, history.items)
        return rank_targets(Mesh(), self._queries(batch)[last], batch.targets[last], self.items.weight, seen=seen)

    def _queries(self, batch: SequenceBatch) -> Tensor:
        return self.encoder(self.items(batch.items), batch.offsets, batch.times, batch.request_times)


class Plain(nn.Module):
    """SASRec of plain torch, which ranks by itself."""

    def __init__(self, num_items: int, length: int, dropout: float) -> None:
        super().__init__()
        self.model = PlainSASRec(num_items, DIM, BLOCKS, HEADS, length, dropout)

    def loss(self, batch: SequenceBatch) -> Tensor:
        """As of `Recommender`."""
        return self.model.loss(batch.items, batch.targets, batch.offsets)

    def standings(self, batch: SequenceBatch, history: SequenceBatch) -> Standings:
        """As of `Recommender`; tied items are counted with those that score higher."""
        seen = list(history.items.split(history.offsets.diff().tolist()))
        ranks = self.model.ranks(batch.items, batch.offsets, batch.targets[batch.offsets[1:] - 1], seen)
        return Standings(ranks - 1, torch.zeros_like(ranks))


def main(arguments: list[str] | None = None) -> None:
    """Prints a JSON line for popularity, one a run, and one a model over its seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {BEAUTY.file} or {MOVIELENS.file}")
    parser.add_argument(
        "--models", nargs="+", choices=[*KINDS, PLAIN], help="default: all, plain_sasrec on MovieLens only"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--patience", type=int, default=10, help="epochs without a better validation before the end")
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.seeds, options.epochs = ["sasrec"], 1, 3
    torch.set_num_threads(1)
    found = [each for each in (BEAUTY, MOVIELENS) if (options.data / each.file).exists()]
    if len(found) != 1:
        parser.error(f"--data {options.data}: has not one of {BEAUTY.file} and {MOVIELENS.file}")
    (of,) = found
    spawning = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.processes, spawning, torch.set_num_threads, (1,)) as processes,
    ):
        data = prepare_events([options.data / of.file], Path(folder) / "events", of.schema)
        write({"model": "popularity", **shown(popularity(data))})
        runs = {
            kind: [processes.submit(train, kind, data.folder, of, seed, options) for seed in range(options.seeds)]
            for kind in options.models or of.models
        }
        for kind, of_kind in runs.items():
            found = []
            for run in of_kind:
                line, result = run.result()
                write(line)
                found.append(result)
            write({"model": kind, "seeds": options.seeds, **over_seeds(found)})


def popularity(data: Sequences) -> dict[str, Mean]:
    """The test's scores of a ranking by counts."""
    counts = torch.from_numpy(data.popularity("test"))[:, None].float()
    metrics = RankingMetrics()
    for batch in SequenceLoader(data, "test", batch_size=4096, max_length=int(1e9)):
        targets = batch.targets[batch.targets >= 0]
        queries = torch.ones(len(targets), 1)
        metrics.add(rank_targets(Mesh(), queries, targets, counts, seen=Seen(batch.offsets, batch.items)))
    return metrics.compute(Mesh())


def train(
    kind: str, folder: Path, of: DataSet, seed: int, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Mean]]:
    """The test's scores of the epoch that is best on the validation, and what is printed of them."""
    data = Sequences.open(folder)
    torch.manual_seed(seed)
    model = make_model(kind, data.num_items, of.length, options.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    loader = SequenceLoader(data, "train", batch_size=of.batch_size, max_length=of.length, shuffle=True, seed=seed)
    best, best_epoch, state, began_s = -1.0, 0, {}, time.monotonic()
    for epoch in range(1, options.epochs + 1):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
        found = evaluate(model, data, "validation", of.length)["ndcg@10"].value
        if found > best:
            best, best_epoch, state = found, epoch, copy.deepcopy(model.state_dict())
        elif epoch - best_epoch >= options.patience:
            break
    model.load_state_dict(state)
    result = evaluate(model, data, "test", of.length)
    about = {"model": kind, "seed": seed, "epoch": best_epoch, "validation_ndcg@10": round(best, 5)}
    return {**about, **shown(result), "elapsed_s": round(time.monotonic() - began_s, 1)}, result


def make_model(kind: str, num_items: int, length: int, dropout: float) -> Recommender | Plain:
    """One of rowmesh's, or that of plain torch."""
    if kind == PLAIN:
        return Plain(num_items, length, dropout)
    return Recommender(cast(Kind, kind), num_items, length, dropout)


@torch.no_grad()
def evaluate(model: Recommender | Plain, data: Sequences, split: SplitName, length: int) -> dict[str, Mean]:
    """A split's scores. What a user saw before the events that the model reads is removed too."""
    model.eval()
    metrics = RankingMetrics()
    whole = SequenceLoader(data, split, batch_size=2048, max_length=int(1e9))
    for batch, history in zip(SequenceLoader(data, split, batch_size=2048, max_length=length), whole, strict=True):
        assert torch.equal(batch.users, history.users)
        metrics.add(model.standings(batch, history))
    return metrics.compute(Mesh())


def shown(metrics: dict[str, Mean]) -> dict[str, Any]:
    """What is printed of a run: values, 95 % intervals over users, and the share of ties."""
    lines: dict[str, Any] = {"tied": round(metrics["tied"].value, 5)}
    for name in ("hr@10", "ndcg@10"):
        lines[name] = round(metrics[name].value, 5)
        lines[f"{name}_interval"] = [round(bound, 5) for bound in metrics[name].interval]
    return lines


def over_seeds(runs: list[dict[str, Mean]]) -> dict[str, Any]:
    """Means over seeds, and their standard errors where there are several."""
    lines: dict[str, Any] = {}
    for name in ("hr@10", "ndcg@10"):
        values = torch.tensor([run[name].value for run in runs], dtype=torch.float64)
        lines[name] = round(float(values.mean()), 5)
        if len(runs) > 1:
            lines[f"{name}_error_over_seeds"] = round(float(values.std()) / math.sqrt(len(runs)), 5)
    return lines


def write(line: dict[str, Any]) -> None:
    """Prints a result."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
