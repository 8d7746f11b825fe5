import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.observe import tensorboard


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rowmesh\[tensorboard\]'"):
        tensorboard.require_tensorboard()


def test_numbers_become_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    board = tensorboard.TensorBoard(tmp_path)
    board.write("train", 3, {"loss": 0.5, "auc": None})
    board.close()
    assert list(tmp_path.iterdir())
