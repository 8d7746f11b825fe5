"""The loop in README runs as it stands there."""

import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_loop_trains():
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = "\n".join(line[2:] for line in block.splitlines())  # the column of the +
    names, rows = ["user", "item"], {"user": 50, "item": 9}
    linear = torch.nn.Linear(13 + 2 * 64, 1)
    ids = torch.tensor([[3, 40, 3], [8, 8, 0]])
    scope = {
        "names": names,
        "rows": rows,
        "loader": [(torch.rand(3, 13), ids, torch.tensor([0.0, 1.0, 1.0]))] * 3,
        "model": lambda dense, vectors: linear(torch.cat([dense, vectors.flatten(1)], dim=1)).squeeze(1),
        "loss_function": torch.nn.BCEWithLogitsLoss(),
        "dense_optimizer": torch.optim.SGD(linear.parameters(), lr=0.1),
    }
    exec(code, scope)
    assert scope["sparse_optimizer"].collection.step_count == 3
    assert scope["vectors"].shape == (3, 2, 64)
    assert scope["mesh"].world_size == 1
