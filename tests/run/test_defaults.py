"""Defaults by the number of samples: what a user gave stays, and all else follows from it."""

from dataclasses import replace

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.run.defaults import choose_defaults
from rowmesh.run.resolve import resolve, to_toml, validate


def with_samples(data, train, validation=100):
    """The same data, as if they had other numbers of samples."""
    splits = {"train": replace(data.splits["train"], samples=train)}
    if validation:
        splits["validation"] = replace(data.splits["validation"], samples=validation)
    return replace(data, splits=splits)


def choose(clicks, **sections):
    return choose_defaults(validate({"data": {"folder": "x"}, **sections}, "test"), clicks)


@pytest.mark.parametrize(
    ("samples", "batch_size", "epochs"),
    [(100, 64, 20), (30_000, 128, 20), (100_000, 256, 20), (500_000, 2048, 4), (1_000_000, 4096, 2), (10**9, 4096, 1)],
)
def test_batches_and_epochs_follow_from_the_samples(clicks, samples, batch_size, epochs):
    config, lines = choose(with_samples(clicks, samples))
    assert (config.data.batch_size, config.train.epochs, config.train.patience) == (batch_size, epochs, 4)
    assert config.train.eval_every == max(-(-samples // batch_size) // 2, 1)
    text = "\n".join(lines)
    assert f"data.batch_size={batch_size}: {-(-samples // batch_size):,} steps an epoch of {samples:,} samples" in text
    assert f"train.epochs={epochs}, or until 4 evaluations bring nothing better" in text


def test_rates_follow_from_the_batch(clicks):
    rates = [choose(clicks, data={"folder": "x", "batch_size": size})[0] for size in (64, 256, 2048, 4096)]
    assert [config.optimizer.lr for config in rates] == [0.00035, 0.00071, 0.002, 0.0028]
    assert [config.tables.optimizer.lr for config in rates] == [0.021, 0.03, 0.05, 0.06]


def test_what_is_given_stays(clicks):
    given = {
        "data": {"folder": "x", "batch_size": 7},
        "optimizer": {"lr": 0.5},
        "tables": {"optimizer": {"lr": 0.25}, "C1": {"optimizer": {"name": "sgd"}}, "C2": {"dim": 16}},
        "train": {"epochs": 3},
    }
    config, lines = choose_defaults(validate(given, "test"), clicks)
    assert (config.data.batch_size, config.optimizer.lr, config.tables.optimizer.lr) == (7, 0.5, 0.25)
    assert config.tables.of("C1").optimizer.lr == 0.01  # an optimizer of another name has rates of its own
    assert config.tables.of("C2").optimizer.lr == 0.25
    assert (config.train.epochs, config.train.patience, config.train.eval_every) == (3, 0, 0)
    assert lines == ["chosen    tables.C1.optimizer.lr=0.01: of sgd, for batches of 7"]


def test_steps_are_reached(clicks):
    config, _ = choose(with_samples(clicks, 1000), train={"steps": 100})
    assert (config.train.epochs, config.train.patience, config.data.batch_size) == (7, 0, 64)


def test_the_last_samples_are_for_validation_where_there_is_no_split(clicks):
    config, lines = choose(with_samples(clicks, 20_000, validation=0))
    assert config.data.batch_size == 64  # of 18,000 samples
    assert config.train.eval_every == 141
    assert "the last 2,000 samples of 'train' are for validation (train.validation_fraction=0.1)" in lines[0]
    none, lines = choose(with_samples(clicks, 20_000, validation=0), train={"validation_fraction": 0.0})
    assert (none.train.patience, none.train.epochs, none.train.eval_every) == (0, 1, 0)
    assert lines[0].startswith("chosen    no early stopping: there is no validation split")


def test_what_cannot_go_together_is_refused(clicks):
    with pytest.raises(ConfigurationError, match=r"train\.patience counts evaluations"):
        choose(clicks, train={"patience": 2, "eval_every": 0})
    with pytest.raises(ConfigurationError, match=r"train\.patience needs samples to validate on"):
        choose(with_samples(clicks, 1000, validation=0), train={"patience": 2, "validation_fraction": 0.0})


def test_what_was_chosen_is_read_back_and_chosen_no_more(clicks, tmp_path):
    values = {"data": {"folder": "x"}, "run": {"folder": "y"}, "tables": {"C1": {"optimizer": {"name": "adam"}}}}
    config, _ = choose_defaults(validate(values, "test"), clicks)
    (tmp_path / "config.toml").write_text(to_toml(config))
    again = resolve(tmp_path / "config.toml")
    assert again == config
    assert choose_defaults(again, with_samples(clicks, 10**6)) == (config, [])
