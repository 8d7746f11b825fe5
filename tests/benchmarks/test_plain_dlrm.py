import torch

from benchmarks.plain_dlrm import PlainDLRM
from rowmesh.models import DLRM


def test_is_the_model_of_rowmesh():
    """The order of the products is that of checkpoints of all versions."""
    torch.manual_seed(0)
    plain = PlainDLRM(13, 26, 16)
    torch.manual_seed(0)
    ours = DLRM(num_dense=13, num_features=26, dim=16)
    assert all(a.equal(b) for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True))
    dense, vectors = torch.randn(4, 13), torch.randn(4, 26, 16)
    torch.testing.assert_close(plain(dense, vectors), ours(dense, vectors))
