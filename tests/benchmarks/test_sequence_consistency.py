"""FuXi in pipelines and on several ranks is FuXi in a plain loop; with stale rows it is not, and that is reported."""

import argparse
import json
from dataclasses import asdict, replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks import sequence_consistency
from benchmarks.command import Report
from benchmarks.ranks.sequence_consistency import Settings, Training, Way, train
from benchmarks.sequence_consistency import BOTH, CASES, LIKES, PLAIN, DifferenceError, Found, draw
from rowmesh import Mesh
from rowmesh.data.events import prepare_events


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("likes")
    file = sequence_consistency._file(argparse.Namespace(data=None), folder)
    return Settings(
        folder=str(prepare_events([file], folder / "events", LIKES).folder),
        dim=4,
        blocks=1,
        max_length=8,
        negatives=3,
        batch_size=9,
        epochs=1,
        lr=0.05,
        evaluate_every=2,
    )


def on_ranks(ranks, world_size, settings, way, tmp_path):
    file = str(tmp_path / "model.pt")
    answers = ranks.run(train, asdict(settings), asdict(way), file, world_size=world_size)
    assert all(answer == answers[0] for answer in answers)
    return Found(**answers[0], model=torch.load(file))


@pytest.fixture(scope="module")
def plain(settings, tmp_path_factory):
    file = str(tmp_path_factory.mktemp("plain") / "model.pt")
    return Found(**train(Mesh(), asdict(settings), asdict(Way()), file), model=torch.load(file))


def assert_close(mine, theirs):
    torch.testing.assert_close(mine.losses, theirs.losses, rtol=1e-12, atol=0)
    for tensor, other in zip(mine.model, theirs.model, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=1e-12 * float(other.abs().max()))
    for point, other in zip(mine.points, theirs.points, strict=True):
        assert point == pytest.approx(other, abs=1e-12)


def assert_same(mine, theirs):
    assert (mine.losses, mine.points, mine.digest) == (theirs.losses, theirs.points, theirs.digest)


def test_a_pipeline_of_one_micro_batch_is_the_plain_loop(settings, plain):
    assert len(plain.losses) == 4
    assert_same(Found(**train(Mesh(), asdict(settings), asdict(Way(depth=1))), model=[]), plain)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_and_micro_batches_train_the_plain_loops_model(ranks, settings, plain, world_size, tmp_path):
    """The last batch has 5 users: one micro-batch of 4 ranks has one, and some have none."""
    in_turn = on_ranks(ranks, world_size, settings, Way(), tmp_path)
    assert_close(in_turn, plain)
    assert_same(on_ranks(ranks, world_size, settings, Way(depth=1), tmp_path), in_turn)
    assert_same(on_ranks(ranks, world_size, settings, Way(transport="one_sided"), tmp_path), in_turn)
    assert_close(on_ranks(ranks, world_size, settings, BOTH, tmp_path), plain)


def losses_of_stale_rows(settings, steps):
    """The plain loop, where every look-up reads the rows as they were some steps ago."""
    training = Training(Mesh(), settings, Way())
    table, history = training._items.local_rows("item")[0].values, []

    def step(item):
        history.append(table.clone())
        current, old = history[-1], history[max(len(history) - 1 - steps, 0)]
        table.copy_(old)
        count = float(item.events.num_ids)
        training._gradients.zero()
        embeddings = training._items(item.sparse)  # on one rank a copy: what is written below does not change it
        vectors = tuple(embeddings[name].values for name in ("clicked", "following", "negative"))
        loss = training._backward(item, slice(0, item.sparse.batch_size), vectors, count)
        table.copy_(current)
        training._end_step(loss, count)

    for item in training._read():
        step(item)
    return training._losses


@pytest.mark.parametrize("steps", [1, 2])
def test_the_control_is_as_stale_as_it_says(settings, plain, steps):
    stale = train(Mesh(), asdict(settings), asdict(Way(stale=steps)))
    assert stale["losses"][0] == plain.losses[0]
    assert stale["losses"][1] != plain.losses[1]
    torch.testing.assert_close(stale["losses"], losses_of_stale_rows(settings, steps), rtol=1e-12, atol=0)


def test_differences_are_reported(settings, capsys):
    cases = [case for case in CASES if case.name in (PLAIN, "depth 1", "1 step stale")]
    sequence_consistency.compare(Report("x", None), replace(settings, batch_size=16), cases, seeds=2)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seed"] for line in lines if line.get("curve") == PLAIN] == [0, 1]
    depth, stale = (next(line for line in lines if line.get("way") == name) for name in ("depth 1", "1 step stale"))
    assert (depth["is_equal"], depth["loss"], depth["parameters"], depth["hr@10"]) == (True, 0, 0, 0)
    assert stale["loss"] > 1e-4
    (difference,) = (line for line in lines if "difference" in line)
    assert (difference["difference"], difference["loss"]["seeds"]) == ("1 step stale", 2)


@pytest.mark.parametrize(
    "name, loss, hr, what",
    [
        ("depth 1", 1.0 + 1e-15, 0.0, "to the bit"),
        ("4 micro-batches", 1.0 + 1e-8, 0.0, "loss differs"),
        ("4 micro-batches", 1.0, 0.001, "hr@10 differs"),
    ],
)
def test_a_difference_that_is_not_promised_is_an_error(name, loss, hr, what):
    model = [torch.ones(2)]
    plain = Found([1.0], [{"step": 1, "hr@10": 0.0, "ndcg@10": 0.0}], "a", model)
    other = Found([loss], [{"step": 1, "hr@10": hr, "ndcg@10": 0.0}], "a", model)
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(DifferenceError, match=what):
        sequence_consistency._judge(Report("x", None), "float64", case, {(PLAIN, 0): plain, (name, 0): other})


def test_the_chart_has_a_panel_a_metric_and_means_over_seeds(tmp_path):
    lines = [
        {
            "curve": case.name,
            "dtype": dtype,
            "points": [{"step": s, "loss": 3.0 - s + seed, "hr@10": s, "ndcg@10": s} for s in (1, 2)],
        }
        for case in CASES
        for seed in (0, 1)
        for dtype in ("float64", "float32")
    ]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sequence_consistency.main(["--chart", str(tmp_path / "c.svg"), "--lines", str(tmp_path / "lines")])
    root = ElementTree.parse(tmp_path / "c.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    titles = [text.text for text in root.iter(f"{space}text") if text.get("class") == "title"]
    assert titles == ["training loss", "HR@10", "NDCG@10"]
    drawn = [line for line in root.iter(f"{space}polyline") if line.find(f"{space}title") is not None]
    assert len(drawn) == 3 * sum(case.is_drawn for case in CASES)
    assert draw(lines[:4]).count("<title>") == 3
    means = sequence_consistency._mean_points([line["points"] for line in lines[:4:2]], "loss")
    assert np.allclose(means, [(1, 2.5), (2, 1.5)])
