import pytest

from rowmesh._support.faults import arm
from rowmesh.observe.trackers import tensorboard


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_numbers_become_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    board = tensorboard.TensorBoard(tmp_path)
    board.write("train", 3, {"loss": 0.5, "samples": 7})
    board.close()
    assert scalars(tmp_path) == {"train/loss": [(3, 0.5)], "train/samples": [(3, 7.0)]}


def test_events_without_room_are_counted_and_never_there_in_part(tmp_path):
    pytest.importorskip("tensorboard")
    said = []
    board = tensorboard.TensorBoard(tmp_path, said.append)
    board.write("train", 1, {"loss": 0.5})
    with arm("observe.write=ENOSPC"):
        board.write("train", 2, {"loss": 0.25})
    board.write("train", 3, {"loss": 0.125})
    board.close()
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5), (3, 0.125)]}
    assert [text.partition(": ")[2] for text in said][:1] == [
        "No space left on device; training goes on without, until it can be"
    ]
    assert "again; 1 records before are lost" in said[1]


def test_a_run_that_is_resumed_leaves_out_what_came_after(tmp_path, monkeypatch):
    """In files of their own, in the order of their names."""
    pytest.importorskip("tensorboard")
    for moment, steps, resumed_after in ((1000.0, (1, 2, 3), 0), (2000.0, (3, 4), 2)):
        monkeypatch.setattr(tensorboard.time, "time", lambda moment=moment: moment)
        board = tensorboard.TensorBoard(tmp_path, resumed_after=resumed_after)
        for step in steps:
            board.write("train", step, {"loss": moment + step})
        board.close()
    assert scalars(tmp_path) == {"train/loss": [(1, 1001.0), (2, 1002.0), (3, 2003.0), (4, 2004.0)]}
