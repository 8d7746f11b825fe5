"""Tensor-train rows in Triton against plain torch: rows, gradients, updates, equal ids, ids that are no rows."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.ops.merge_update import reference as rules
from rowmesh.ops.tensor_train import reference
from rowmesh.ops.tensor_train import shape as tiles
from rowmesh.tables.update_rules import RULES
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
cuda = kernels_of("tensor_train")
F32, F64 = torch.float32, torch.float64


class Case:
    """Cores and ids, on a CPU for the reference and on the device."""

    def __init__(self, device, row_factors, dim_factors, ranks, ids, dtype=F64, seed=0):
        (p1, p2, p3), (q1, q2, q3), (r1, r2) = row_factors, dim_factors, ranks
        generator = torch.Generator().manual_seed(seed)
        shapes = (p1, q1, r1), (p2, r1, q2, r2), (p3, q3, r2)
        self.cores = [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]
        self.ids = torch.tensor(ids, dtype=torch.int64)
        self.gradients = torch.randn(len(ids), q1 * q2 * q3, dtype=dtype, generator=generator)
        self.row_factors, self.num_rows, self.device = row_factors, p1 * p2 * p3, device
        self.on_device = [core.clone().to(device) for core in self.cores]

    def arrange(self, **options):
        return cuda.arrange(self.ids.to(self.device), self.row_factors, self.num_rows, **options)

    def expected(self):
        """Rows, and the gradients of the cores."""
        cores = [core.clone().requires_grad_() for core in self.cores]
        rows = reference.rows(cores, self.ids)
        return rows.detach(), torch.autograd.grad(rows, cores, self.gradients)

    def found(self, **options):
        arrangement = self.arrange(**options)
        rows, products = cuda.forward(self.on_device, arrangement)
        gradients = cuda.backward(self.on_device, arrangement, products, self.gradients.to(self.device))
        return rows.cpu(), [gradient.cpu() for gradient in gradients]

    def check(self, **options):
        tolerance = 1e-12 if self.cores[0].dtype == F64 else 5e-6
        (rows, gradients), (expected_rows, expected) = self.found(**options), self.expected()
        for mine, theirs in zip([rows, *gradients], [expected_rows, *expected], strict=True):
            scale = max(float(theirs.abs().max()), 1.0) if theirs.numel() else 1.0
            torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * scale)


@st.composite
def cases(draw):
    factor = st.integers(1, 4)
    row_factors, dim_factors = draw(st.tuples(*[st.integers(1, 5)] * 3)), draw(st.tuples(*[factor] * 3))
    ranks, num_rows = draw(st.tuples(*[st.integers(1, 9)] * 2)), row_factors[0] * row_factors[1] * row_factors[2]
    ids = draw(st.lists(st.integers(0, num_rows - 1), unique=True, max_size=20))
    return row_factors, dim_factors, ranks, ids


@settings(max_examples=12)
@given(case=cases())
def test_equals_the_reference(device, case):
    Case(device, *case).check()


@pytest.mark.parametrize(
    "row_factors, dim_factors, ranks, dtype",
    [
        ((3, 4, 5), (1, 1, 17), (3, 40), F32),  # a prime dimension
        ((4, 3, 2), (5, 4, 2), (33, 70), F32),  # more than one step of every sum, and more than one tile of columns
        ((2, 1, 9), (2, 2, 4), (2, 16), F32),  # one group
    ],
)
def test_shapes_that_fill_several_tiles(device, row_factors, dim_factors, ranks, dtype):
    num_rows = row_factors[0] * row_factors[1] * row_factors[2]
    ids = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).tolist()
    Case(device, row_factors, dim_factors, ranks, ids, dtype).check()


@pytest.mark.parametrize("ids", [[], [7], [3 * i for i in range(8)], [*range(12, 24)], [*range(23, -1, -1)]])
def test_tiles_of_few_prefixes_and_ids(device, ids, monkeypatch):
    """Segments of many tiles and of none, a few at a time: one i₃, one group, all ids, backwards; few programs."""
    for kernels in (cuda, tiles):
        monkeypatch.setattr(kernels, "LINES", 16)
    monkeypatch.setattr(tiles, "_CHUNK_LINES", 8)
    monkeypatch.setattr(cuda, "_GRADIENT_LINES", 16)
    monkeypatch.setattr(cuda, "_SEARCHED", 2)
    monkeypatch.setattr(cuda, "MOST_PROGRAMS", 2)
    Case(device, (4, 2, 3), (2, 2, 2), (3, 5), ids).check()
    Case(device, (2, 4, 3), (8, 1, 2), (3, 5), ids).check()


@pytest.mark.parametrize("shared", [True, False])
def test_equal_ids_may_stay_apart(device, shared):
    ids = [5, 7, 5, 5, 11, 7, 0]
    Case(device, (2, 3, 2), (2, 1, 2), (2, 3), ids).check(shared=shared)


@pytest.mark.parametrize("rule_name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_updates_what_is_touched(device, rule_name, dtype):
    ids = [0, 3, 17, 16, 31, 19]
    case = Case(device, (4, 3, 4), (2, 2, 2), (3, 4), ids, dtype)
    rule = RULES[rule_name](lr=0.1, **({} if rule_name == "sgd" else {"moment_scale": 1.7}))
    states = [[torch.full_like(core, 0.1) for _ in rule.state] for core in case.cores]
    theirs = [[state.clone() for state in of] for of in states]
    states = [tuple(state.to(device) for state in of) for of in states]
    _, gradients = case.expected()
    arrangement = case.arrange()
    _, products = cuda.forward(case.on_device, arrangement)
    cuda.update(
        case.on_device, states, arrangement, products, case.gradients.to(device), rule_name, rule.numbers(0.1, 0.5, 3)
    )
    split = torch.stack([case.ids // 12, case.ids // 4 % 3, case.ids % 4])
    tolerance = 1e-12 if dtype == F64 else 5e-6
    for core, touched, gradient, mine, kept, expected in zip(
        case.cores, split, gradients, case.on_device, states, theirs, strict=True
    ):
        touched = touched.unique()
        state = {name: tensor.view(len(core), -1) for name, tensor in zip(rule.state, expected, strict=True)}
        flat = core.clone().view(len(core), -1)
        rules.update(
            rule_name,
            flat,
            state,
            touched,
            0.5 * gradient.reshape(len(core), -1)[touched],
            0.1,
            *rule.hyperparameters,
            3,
            getattr(rule, "moment_scale", 1.0),
        )
        torch.testing.assert_close(mine.cpu(), flat.view_as(core), rtol=tolerance, atol=tolerance)
        for tensor, other in zip(kept, expected, strict=True):
            torch.testing.assert_close(tensor.cpu(), other, rtol=tolerance, atol=tolerance)
        others = [i for i in range(len(core)) if i not in touched.tolist()]
        assert torch.equal(mine.cpu()[others], core[others])


@pytest.mark.parametrize("wrong", [-1, 23, 2**40, -(2**63)])
def test_ids_that_are_no_rows_have_no_part(device, wrong):
    """23 is padding: a row of the cores, none of the table."""
    right = Case(device, (2, 3, 4), (2, 1, 2), (2, 3), [4, 9, 22])
    right.num_rows = 23
    rows, gradients = right.found()
    beside = Case(device, (2, 3, 4), (2, 1, 2), (2, 3), [4, wrong, 9, 22, wrong])
    beside.num_rows = 23
    beside.gradients = torch.stack([right.gradients[0], right.gradients[0], *right.gradients[1:], right.gradients[0]])
    arrangement = beside.arrange()
    kept = torch.full((5, 4), torch.nan, dtype=F64, device=device)
    found, products = cuda.forward(beside.on_device, arrangement, kept)
    assert torch.equal(found[[0, 2, 3]].cpu(), rows)
    assert found[[1, 4]].isnan().all()
    others = cuda.backward(beside.on_device, arrangement, products, beside.gradients.to(device))
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(others, gradients, strict=True))


def test_far_ids(device):
    """Past 2⁴⁰: keys of 64 bits."""
    ids = [2**41 - 1, 0, 2**40 + 12345, 2**40 + 12346, 2**31]
    case = Case(device, (2**22, 2, 2**18), (1, 1, 2), (1, 1), ids, F32)
    rows, _ = cuda.forward(case.on_device, case.arrange())
    torch.testing.assert_close(rows.cpu(), reference.rows(case.cores, case.ids))


def test_replays_are_equal_to_the_bit(device):
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    case = Case(device, (4, 3, 5), (2, 2, 2), (5, 6), ids, F32)
    for first, second in zip(*(torch.nn.utils.parameters_to_vector(case.found()[1]) for _ in range(2)), strict=True):
        assert first == second


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_other_precisions(device, precision):
    case = Case(device, (4, 3, 5), (2, 2, 2), (5, 6), [*range(0, 60, 7)], F32)
    rows, _ = cuda.forward(case.on_device, case.arrange(), precision=precision)
    torch.testing.assert_close(rows.cpu(), case.expected()[0], rtol=1e-2, atol=5e-2)


def test_gradients_of_equal_ids_are_summed_first(device):
    """With the ops that a step has: distinct ids, their gradients by id, then cores."""
    merging, sums = map(kernels_of, ("merge", "merge_update"))
    case = Case(device, (2, 3, 4), (2, 1, 2), (2, 3), [5, 7, 5, 5, 11, 7, 0], F32)
    distinct, inverse = torch.unique(case.ids, return_inverse=True)
    merged = merging.merge(inverse.to(device))
    summed = sums.sum_merged(merged, case.gradients.to(device), torch.empty_like(case.gradients, device=device))
    arrangement = cuda.arrange(distinct.to(device), case.row_factors, case.num_rows)
    _, products = cuda.forward(case.on_device, arrangement)
    gradients = cuda.backward(case.on_device, arrangement, products, summed[: len(distinct)])
    for mine, theirs in zip(gradients, case.expected()[1], strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)
