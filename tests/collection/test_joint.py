import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, TableSpec
from rowmesh.collection.joint_optimizer import JointOptimizer


def test_a_schedule_changes_what_is_used_after_a_state_was_loaded():
    """Loading gives an optimizer new groups."""
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=5, dim=4)])
    dense = torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1)
    sparse = EmbeddingOptimizer(embeddings)
    joint = JointOptimizer(dense, sparse)
    dense.load_state_dict(dense.state_dict())
    sparse.load_state_dict(sparse.state_dict())
    for group in joint.param_groups:
        group["lr"] = 0.025
    assert dense.param_groups[0]["lr"] == sparse.param_groups[0]["lr"] == 0.025
