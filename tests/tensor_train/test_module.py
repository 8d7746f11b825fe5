"""TensorTrainEmbeddingBag against the dense reconstruction, and against nn.EmbeddingBag on a table at full rank."""

import copy
import inspect
import io
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import rowmesh
from rowmesh.errors import ConfigurationError, IdRangeError
from rowmesh.tensor_train import TensorTrainEmbeddingBag, TensorTrainShape
from tests.support.threads import in_threads

# (rows, dim, row_factors, dim_factors, ranks): tiles, tails, single values, long last factors. Kernels are compiled for
# each, so there are few.
SHAPES = [
    (120, 64, (5, 4, 6), (4, 4, 4), (16, 16)),
    (101, 12, (5, 5, 5), (2, 2, 3), (5, 7)),
    (60, 17, (3, 4, 5), (1, 1, 17), (3, 4)),
    (1, 1, (1, 1, 1), (1, 1, 1), (1, 1)),
    (90, 36, (3, 5, 6), (9, 1, 4), (19, 17)),
]
NUM_ROWS, DIM = 23, 6
FULL = TensorTrainShape.choose(NUM_ROWS, DIM).full_ranks


def make(shape, mode="sum", dtype=torch.float64, **options):
    num_rows, dim, row_factors, dim_factors, ranks = shape
    return TensorTrainEmbeddingBag(
        num_rows,
        dim,
        mode=mode,
        dtype=dtype,
        row_factors=row_factors,
        dim_factors=dim_factors,
        rank=ranks,
        seed=1,
        **options,
    )


def table(dtype=torch.float64):
    return torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def pair(dtype=torch.float64, **options):
    """nn.EmbeddingBag, and ours with the same table."""
    theirs = nn.EmbeddingBag.from_pretrained(table(dtype), freeze=False, **options)
    ours = TensorTrainEmbeddingBag.from_pretrained(table(dtype), freeze=False, rank=FULL, **options)
    return theirs, ours


@st.composite
def jagged(draw, num_rows):
    """Ids with offsets: duplicates, empty bags, a seed for the rest."""
    sizes = draw(st.lists(st.integers(0, 5), max_size=8))
    ids = draw(st.lists(st.integers(0, num_rows - 1), min_size=sum(sizes), max_size=sum(sizes)))
    offsets = torch.tensor([0, *sizes[:-1]] if sizes else [], dtype=torch.int64).cumsum(0)
    return torch.tensor(ids, dtype=torch.int64), offsets


@settings(max_examples=60)
@given(st.data())
def test_equals_the_dense_reconstruction(data):
    shape = data.draw(st.sampled_from(SHAPES))
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]))
    padding = data.draw(st.one_of(st.none(), st.integers(0, shape[0] - 1)))
    sparse = mode != "max" and data.draw(st.booleans())
    bag = make(shape, mode, padding_idx=padding, sparse=sparse)
    ids, offsets = data.draw(jagged(shape[0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weights = None
    if mode == "sum" and data.draw(st.booleans()):
        weights = torch.randn(ids.numel(), generator=generator, dtype=torch.float64)
        weights.requires_grad_(data.draw(st.booleans()))
    ours = bag(ids, offsets, weights)
    expected = nn.functional.embedding_bag(
        ids, bag.dense(), offsets, mode=mode, per_sample_weights=weights, padding_idx=padding
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    if not offsets.numel():
        return
    grad = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    wanted = [*bag.cores, *([weights] if weights is not None and weights.requires_grad else [])]
    gradients = torch.autograd.grad(ours, wanted, grad, allow_unused=True)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, wanted, grad), strict=True):
        mine = torch.zeros_like(theirs) if mine is None else mine.to_dense()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_float32(mode):
    bag = make(SHAPES[0], mode, dtype=torch.float32)
    ids = torch.randint(120, (40, 3), generator=torch.Generator().manual_seed(0))
    ours, expected = bag(ids), nn.functional.embedding_bag(ids, bag.dense(), mode=mode)
    torch.testing.assert_close(ours, expected)
    gradients = torch.autograd.grad(ours.square().sum(), list(bag.cores))
    for mine, theirs in zip(gradients, torch.autograd.grad(expected.square().sum(), list(bag.cores)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradcheck(mode):
    bag = make(SHAPES[1], mode)
    ids, offsets = torch.tensor([3, 100, 3, 7, 28, 28]), torch.tensor([0, 2, 2, 3])
    weights = torch.rand(6, dtype=torch.float64).requires_grad_(mode == "sum")

    def function(weights, *cores):
        named = {f"cores.{k}": core for k, core in enumerate(cores)}
        return torch.func.functional_call(bag, named, (ids, offsets, weights if mode == "sum" else None))

    assert torch.autograd.gradcheck(function, (weights, *bag.cores))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 4, -1])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_takes_the_place_of_embedding_bag(mode, padding, include_last_offset):
    theirs, ours = pair(mode=mode, padding_idx=padding, include_last_offset=include_last_offset)
    assert ours.padding_idx == theirs.padding_idx
    jagged_ids, offsets = torch.tensor([4, 22, 4, 4, 1, 0, 22]), torch.tensor([0, 0, 3, 4, 7])
    inputs = [
        (jagged_ids, offsets),
        (jagged_ids.int(), offsets.int()),
        (torch.tensor([[4, 4], [1, 22], [22, 22]]),),
        (torch.zeros(0, 3, dtype=torch.int64),),
        (torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
    ]
    for arguments in inputs:
        torch.testing.assert_close(ours(*arguments), theirs(*arguments), rtol=0, atol=1e-10)
    if mode == "sum":
        weights = torch.randn(7, dtype=torch.float64)
        expected = theirs(jagged_ids, offsets, per_sample_weights=weights)
        torch.testing.assert_close(ours(jagged_ids, offsets, weights), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["__init__", "forward", "from_pretrained"])
def test_takes_the_arguments_of_embedding_bag(method):
    """In their order and with their defaults; its own come after them, by keyword."""
    theirs, ours = (
        [(p.name, p.default, p.kind) for p in inspect.signature(getattr(kind, method)).parameters.values()]
        for kind in (nn.EmbeddingBag, rowmesh.TensorTrainEmbeddingBag)
    )
    assert ours[: len(theirs)] == theirs
    assert {kind for *_, kind in ours[len(theirs) :]} <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


REFUSED = [
    (ValueError, (torch.tensor([1, 2, 3]), torch.tensor([1, 2]))),
    (ValueError, (torch.tensor([1, 2, 3]), torch.tensor([1]))),
    (ValueError, (torch.tensor([1, 2, 3]), torch.tensor([0, 9]))),
    (ValueError, (torch.tensor([1, 2, 3]), torch.tensor([[0]]))),
    (ValueError, (torch.tensor([1, 2, 3]),)),
    (ValueError, (torch.tensor([[1, 2, 3]]), torch.tensor([0]))),
    (ValueError, (torch.tensor([[[1]]]),)),
    (ValueError, (torch.tensor([1, 2]), torch.tensor([0]), torch.ones(3, dtype=torch.float64))),
    (TypeError, (torch.tensor([1.0, 2.0]), torch.tensor([0]))),
    (IdRangeError, (torch.tensor([1, NUM_ROWS]), torch.tensor([0]))),
    (IdRangeError, (torch.tensor([[1, -1]]),)),
]


@pytest.mark.parametrize("error, arguments", REFUSED)
def test_refuses_what_embedding_bag_refuses(error, arguments):
    theirs, ours = pair(mode="sum")
    with pytest.raises((ValueError, RuntimeError)):
        theirs(*arguments)
    with pytest.raises(error):
        ours(*arguments)


def test_offsets_in_disorder_are_refused():
    """torch refuses them in some modes and types only."""
    with pytest.raises(
        ValueError, match=r"offsets must not decrease nor pass the number of ids, 3, got \[0, 2, 1, 3\]"
    ):
        make(SHAPES[1])(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 1]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_past_the_last_offset_belong_to_no_bag(mode):
    bag = make(SHAPES[1], mode, include_last_offset=True)
    ids = torch.tensor([1, 2, 3, 4])
    assert torch.equal(bag(ids, torch.tensor([0, 1, 3])), bag(ids[:3], torch.tensor([0, 1, 3])))


def test_weights_are_for_sums_only():
    for bag in pair(mode="mean"):
        with pytest.raises(NotImplementedError, match="only"):
            bag(torch.tensor([[1]]), None, torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("trained", [False, True])
def test_weights_of_another_dtype(trained):
    bag, ids = make(SHAPES[1], dtype=torch.float32), torch.tensor([[1, 2], [2, 5]])
    weights = torch.tensor([[0.5, 2.0], [1.0, -1.0]], dtype=torch.float64, requires_grad=trained)
    out = bag(ids, None, weights)
    torch.testing.assert_close(out, bag(ids, None, weights.detach().float()))
    out.sum().backward()
    assert not trained or weights.grad.dtype == torch.float64


def test_arguments_on_a_device():
    """Kernels would read their addresses."""
    bag, ids = make(SHAPES[1]), torch.tensor([1, 2])
    for arguments in ((ids.to("meta"), ids), (ids, ids.to("meta")), (ids, ids - 1, torch.ones(2, device="meta"))):
        with pytest.raises(ValueError, match="must be on cpu, where the cores are, got meta"):
            bag(*arguments)


@pytest.mark.parametrize("ids", [[[1, 2]], torch.tensor([[1, 2]]).numpy()])
def test_ids_are_tensors(ids):
    bag = make(SHAPES[1])
    for look_up in (bag, bag.rows):
        with pytest.raises(TypeError, match=f"must be a tensor of int64 or int32, got {type(ids).__name__}"):
            look_up(ids)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU 0")
def test_a_device_by_its_number_is_no_cpu():
    with pytest.raises((RuntimeError, AssertionError)):
        TensorTrainEmbeddingBag(5, 4, device=0)


def test_rows_take_integers():
    with pytest.raises(TypeError, match=r"ids must be int64 or int32, got torch.float32"):
        make(SHAPES[1]).rows(torch.tensor([1.7]))


def test_cores_that_kernels_cannot_read():
    """They read by address: cores of another shape or type would be garbage."""
    ids = torch.tensor([[5]])
    bag = make(SHAPES[1])
    bag.cores[1].data = bag.cores[1].data.float()
    with pytest.raises(ConfigurationError, match=r"all float32 or all float64, got .*float64.*float32.*float64"):
        bag(ids)
    bag = make(SHAPES[1])
    bag.cores = TensorTrainEmbeddingBag(1000, 12, rank=(5, 7), dtype=torch.float64).cores
    with pytest.raises(ConfigurationError, match=r"the cores are \(\(10, 2, 5\).* for 101 rows of 12"):
        bag(ids)
    with pytest.raises(ConfigurationError, match=r"got torch\.float16 on cpu"):
        make(SHAPES[1]).half()(ids)


def test_ids_outside_the_table_are_named():
    bag = make(SHAPES[1])
    with pytest.raises(
        IdRangeError, match=r"2 distinct ids are outside the table, whose ids are 0 to 100: \[101, -3\]"
    ):
        bag(torch.tensor([[5, 101, -3, 101]]))
    assert bag(torch.tensor([[5]])).shape == (1, 12)  # and nothing is broken


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_norm": 1.0}, "max_norm = 1.0"),
        ({"mode": "median"}, "mode must be one of"),
        ({"sparse": True, "mode": "max"}, "do not go together"),
        ({"sparse": True, "scale_grad_by_freq": True}, "do not go together"),
        ({"padding_idx": 101}, "padding_idx must be -101 to 100, got 101"),
        ({"device": "meta"}, r"on the CPU or on a GPU \('cuda'\), got device = meta"),
        ({"dtype": torch.bfloat16}, "dtype must be float32 or float64"),
        ({"rank": 999}, "at most"),
        ({"compression": 1e9}, "no rank meets"),
    ],
)
def test_arguments_that_cannot_work(options, message):
    with pytest.raises(ConfigurationError, match=message):
        TensorTrainEmbeddingBag(101, 12, **options)


def test_rows_that_are_too_long():
    with pytest.raises(ConfigurationError, match="embedding_dim must be 1 to 1024, got 1025"):
        TensorTrainEmbeddingBag(101, 1025)


def test_a_pretrained_table_must_be_one():
    with pytest.raises(ConfigurationError, match=r"embeddings must be \[rows, dim\], got \(5,\)"):
        TensorTrainEmbeddingBag.from_pretrained(torch.zeros(5))


def test_from_pretrained_freezes_unless_told():
    frozen = TensorTrainEmbeddingBag.from_pretrained(table(), rank=FULL)
    assert not any(core.requires_grad for core in frozen.cores)
    assert not frozen(torch.tensor([[1]])).requires_grad
    torch.testing.assert_close(frozen.dense(), table(), rtol=0, atol=1e-12)
    assert TensorTrainEmbeddingBag.from_pretrained(table().float(), rank=2).cores[0].dtype == torch.float32


def test_rows_and_dense_are_the_same_table():
    bag = make(SHAPES[1])
    ids = torch.tensor([[100, 0], [100, 57]])
    torch.testing.assert_close(bag.rows(ids), bag.dense()[ids], rtol=0, atol=1e-12)
    assert bag.rows(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, 12)
    gradients = [torch.autograd.grad(f.square().sum(), list(bag.cores)) for f in (bag.rows(ids), bag.dense()[ids])]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_sparse_gradients_are_of_touched_slices():
    bag = make(SHAPES[1], sparse=True)
    bag(torch.tensor([[100, 3]])).sum().backward()
    assert all(core.grad.is_sparse for core in bag.cores)
    gradients = [core.grad.coalesce() for core in bag.cores]
    assert [gradient.indices().flatten().tolist() for gradient in gradients] == [[0, 4], [0], [0, 3]]


def test_a_saved_module_gives_the_same_rows():
    bag = make(SHAPES[0], dtype=torch.float32)
    file = io.BytesIO()
    torch.save(bag.state_dict(), file)
    file.seek(0)
    other = TensorTrainEmbeddingBag(120, 64, rank=16, row_factors=(5, 4, 6), mode="sum", dtype=torch.float32, seed=9)
    assert not torch.equal(other.dense(), bag.dense())
    other.load_state_dict(torch.load(file))
    ids = torch.arange(120).view(-1, 1)
    assert torch.equal(other(ids), bag(ids))
    for twin in (copy.deepcopy(bag), pickle.loads(pickle.dumps(bag))):
        assert torch.equal(twin(ids), bag(ids))


@pytest.mark.parametrize("module", [lambda bag: bag, nn.Sequential], ids=["alone", "in another"])
def test_a_state_of_other_rows_is_refused_where_cores_have_equal_shapes(module):
    small, large = (TensorTrainEmbeddingBag(rows, 8, rank=2, mode="sum", seed=rows) for rows in (124, 125))
    assert small.shape.core_shapes == large.shape.core_shapes
    state, before = module(small).state_dict(), large.dense()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for saved in (state, torch.load(file)):
        with pytest.raises(
            ConfigurationError,
            match=r"cores' of the state is of a table of 124 rows, and .* has 125; .*num_embe.* = 124",
        ):
            module(large).load_state_dict(saved, strict=False)
    assert torch.equal(large.dense(), before)
    module(large).load_state_dict(dict(state))  # as saved before: the number of rows is unknown
    assert torch.equal(large.dense()[:124], small.dense())


def test_first_values_follow_seed_and_name_or_torch():
    def dense(**options):
        return TensorTrainEmbeddingBag(101, 12, rank=4, **options).dense()

    assert torch.equal(dense(seed=3), dense(seed=3))
    assert not torch.equal(dense(seed=3), dense(seed=3, name="item"))
    torch.manual_seed(0)
    first, second = dense(), dense()
    torch.manual_seed(0)
    assert torch.equal(dense(), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", [3, None])
def test_reset_parameters(seed):
    """What stock models call to start again."""
    torch.manual_seed(0)
    bag = TensorTrainEmbeddingBag(101, 12, rank=4, seed=seed)
    first, cores = bag.dense().detach().clone(), list(bag.cores)
    with torch.no_grad():
        cores[0].zero_()
    bag.reset_parameters()
    assert all(core is kept for core, kept in zip(bag.cores, cores, strict=True))
    assert torch.equal(bag.dense(), first) == (seed is not None)
    assert float(bag.dense().detach().std()) == pytest.approx(1, rel=0.4)


@pytest.mark.parametrize("name", [*nn.EmbeddingBag.__constants__, "embedding_dim"])
def test_has_the_attributes_of_embedding_bag(name):
    theirs, ours = pair(mode="max", padding_idx=-1)
    assert getattr(ours, name) == getattr(theirs, name)


def test_backward_twice_and_look_ups_between():
    """Products are given back after a backward, and made again for a second one; graphs do not share them."""
    bag = make(SHAPES[1])
    first, second = bag(torch.tensor([[5, 6]])), bag(torch.tensor([[7, 6]]))
    one = torch.autograd.grad(first.square().sum(), list(bag.cores), retain_graph=True)
    other = torch.autograd.grad(second.square().sum(), list(bag.cores))
    again = torch.autograd.grad(first.square().sum(), list(bag.cores))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    alone = torch.autograd.grad(bag(torch.tensor([[7, 6]])).square().sum(), list(bag.cores))
    assert all(torch.equal(a, b) for a, b in zip(other, alone, strict=True))


def test_cores_that_change_before_backward_are_noticed():
    bag = make(SHAPES[1])
    out = bag(torch.tensor([[5, 6]]))
    with torch.no_grad():
        bag.cores[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_results_do_not_depend_on_what_came_before():
    """Memory is reused: whatever an earlier, larger look-up left must not show."""
    bag, fresh = make(SHAPES[0], dtype=torch.float32), make(SHAPES[0], dtype=torch.float32)
    bag(torch.arange(120).view(-1, 1)).sum().backward()
    bag.zero_grad()
    ids = torch.tensor([[3, 70], [70, 70]])
    for module in (bag, fresh):
        module(ids).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(bag.cores, fresh.cores, strict=True))


def test_memory_follows_distinct_ids():
    bag = make(SHAPES[0], dtype=torch.float32)
    bag(torch.tensor([[3, 70] * 50_000])).sum().backward()
    floats = sum(buffer.num_bytes for buffer in bag._workspace.products)
    assert floats < 4096  # two products of 1 kB
    assert all(scratch.num_bytes < 1 << 18 for scratch in bag._workspace.scratch.values())


def test_threads_look_up_at_the_same_time():
    bag = make(SHAPES[0], dtype=torch.float32)
    batches = [torch.randint(120, (500, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [bag(batch) for batch in batches]
    wrong = []

    def work(number):
        for _ in range(30):
            if not torch.equal(bag(batches[number]), expected[number]):
                wrong.append(number)

    in_threads(work, 4)
    assert not wrong


def test_does_not_follow_the_defaults():
    with torch.device("meta"):
        bag = make(SHAPES[1], "mean", dtype=torch.float32, padding_idx=3)
        ids = torch.tensor([1, 3, 5], device="cpu")
        out = bag(ids, torch.tensor([0, 2], device="cpu"))
        out.sum().backward()
    assert bag.cores[0].grad.device.type == out.device.type == "cpu"


def test_one_line_in_a_stock_model():
    class Model(nn.Module):
        def __init__(self, bag):
            super().__init__()
            self.bag, self.over = bag, nn.Linear(12, 1)

        def forward(self, ids):
            return self.over(self.bag(ids))

    torch.manual_seed(0)
    model = Model(rowmesh.TensorTrainEmbeddingBag(101, 12, mode="sum", rank=(5, 7)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ids, wanted = torch.randint(101, (64, 2)), torch.randn(64, 1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(ids), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert "times smaller" in repr(model)
