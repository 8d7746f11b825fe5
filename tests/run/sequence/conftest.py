"""Small planted events, and a configuration that trains on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rowmesh.data.events import Sequences
from rowmesh.data.events.planted import PlantedEvents, synthesize_events

LINES = """
[run]
folder = "{folder}/run"
[data]
folder = "{data}"
batch_size = 32
[model]
name = "hstu"
[model.options]
max_length = 16
dropout = 0.0
num_heads = 2
[tables]
dim = 8
dtype = "float64"
optimizer = {{ name = "adam", lr = 0.02 }}
[optimizer]
lr = 0.02
[train]
epochs = 2
log_every = 3
linear = "torch"
"""


@pytest.fixture(scope="session")
def events(tmp_path_factory) -> Sequences:
    """97 users, so that the last batch of 32 has one, and one of two ranks none."""
    folder = tmp_path_factory.mktemp("events") / "planted"
    return synthesize_events(folder, PlantedEvents(num_users=97, num_items=200, num_groups=5, mean_events=22))


@pytest.fixture
def sequence_file(events, tmp_path) -> Path:
    path = tmp_path / "hstu.toml"
    path.write_text(LINES.format(folder=tmp_path, data=events.folder))
    return path
