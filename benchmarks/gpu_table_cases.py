"""More inputs of `benchmarks.gpu_ops`: whole tables and cores, of which every row or slice is gone over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu_cases import Sizes
from benchmarks.gpu_timing import Case
from rowmesh.ops.initialize.cuda import initialize
from rowmesh.ops.initialize.reference import values
from rowmesh.ops.update_slices.cuda import update_slices
from rowmesh.tables.update_rules import AdaGrad

_ELEMENT_BYTES = 4
_CHECKED_ROWS = 1000
_SLICE_ROWS = 64  # a slice of a core is as large as so many rows
_TOUCHED = 0.5  # the share of slices that a batch reads


def initialize_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """The initial values of a table, beside random numbers of torch, which other ranks could not repeat."""
    how = {"first": 0, "stride": 1, "distribution": "uniform", "a": -0.1, "b": 0.1}
    for dim in sizes.dims:
        rows = torch.empty(sizes.table_rows, dim, device=device)

        def ours(rows: torch.Tensor = rows) -> None:
            initialize(rows, 7, **how)

        def peer(rows: torch.Tensor = rows) -> None:
            rows.uniform_(-0.1, 0.1)

        def check(rows: torch.Tensor = rows, dim: int = dim) -> None:
            initialize(rows, 7, **how)
            some = np.linspace(0, len(rows) - 1, _CHECKED_ROWS, dtype=np.int64)
            expected = torch.from_numpy(values(7, some, dim, "uniform", -0.1, 0.1)).float()
            assert torch.equal(rows[torch.from_numpy(some).to(device)].cpu(), expected), "initialize: other values"

        yield Case(f"initialize dim {dim}", ours, {"uniform_": peer}, rows.nbytes, check, {})


def update_slices_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """AdaGrad of the slices of a core that were read; the peer has no choice but to go over all of them."""
    for dim in sizes.dims:
        shape = max(sizes.distinct // _SLICE_ROWS, 1), _SLICE_ROWS * dim
        touched = (torch.rand(shape[0], device=device) < _TOUCHED).float()
        yield _update_slices_case(dim, torch.randn(shape, device=device) * touched[:, None], touched)


def _update_slices_case(dim: int, gradient: torch.Tensor, touched: torch.Tensor) -> Case:
    core, state, peer_core, peer_state = (torch.zeros_like(gradient) for _ in range(4))
    rule = AdaGrad(lr=0.01, eps=0.1)
    numbers = rule.numbers(0.01, 1.0, 1)

    def ours() -> None:
        update_slices(core, (state,), gradient, touched, rule.name, numbers)

    def peer() -> None:
        peer_state.addcmul_(gradient, gradient)
        peer_core.addcdiv_(gradient, peer_state.sqrt().add_(rule.eps), value=-0.01)

    def check() -> None:
        for tensor in (core, state, peer_core, peer_state):
            tensor.zero_()
        ours()
        peer()
        torch.testing.assert_close(core, peer_core, rtol=1e-5, atol=1e-7, msg="update_slices: differs from torch's")

    # Of each element read: gradient, weight, state; written: the last two.
    moved = int(touched.sum()) * gradient.shape[1] * 5 * _ELEMENT_BYTES + touched.nbytes
    return Case(f"update slices dim {dim}", ours, {"addcmul, addcdiv": peer}, moved, check, {})


CASES = {"initialize": initialize_cases, "update_slices": update_slices_cases}
