"""What an evaluation of sequence models takes as seen."""

import numpy as np
import pytest

from rowmesh.data.events.planted import PlantedEvents, synthesize_events
from rowmesh.run.sequence.evaluation import seen_by


@pytest.mark.parametrize("split", ["validation", "test"])
def test_all_that_a_user_did_before_is_seen_however_long_ago(tmp_path, split):
    data = synthesize_events(tmp_path / "planted", PlantedEvents(num_users=9, num_items=900, mean_events=90))
    users = np.array([7, 0, 8, 3, 1])
    seen, ends = seen_by(data, users, split), data.targets(split)
    histories = [data.items[data.offsets[user] : ends[user]].tolist() for user in users]
    assert max(map(len, histories)) > 100, "longer than a model reads"
    assert seen.items.tolist() == [item for history in histories for item in history]
    assert seen.offsets.diff().tolist() == list(map(len, histories))
