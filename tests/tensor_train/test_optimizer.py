"""The fused update against autograd and torch's optimizers; what is not touched does not change."""

import copy
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh.errors import ConfigurationError
from rowmesh.tables.update_rules import SGD, AdaGrad, Adam, RowWiseAdaGrad
from rowmesh.tensor_train import TensorTrainEmbeddingBag, TensorTrainOptimizer

RULES = {
    "sgd": (SGD(lr=0.1), lambda cores: torch.optim.SGD(cores, lr=0.1)),
    "adagrad": (AdaGrad(lr=0.1, eps=1e-6), lambda cores: torch.optim.Adagrad(cores, lr=0.1, eps=1e-6)),
    "adam": (Adam(lr=0.1, beta1=0.8, eps=1e-6), lambda cores: torch.optim.Adam(cores, 0.1, (0.8, 0.999), 1e-6)),
}
NUM_ROWS, DIM = 101, 12


def make(dtype=torch.float64, **options):
    return TensorTrainEmbeddingBag(NUM_ROWS, DIM, mode="sum", rank=(5, 7), dtype=dtype, seed=2, **options)


def draw_ids(seed, num_rows=NUM_ROWS, shape=(30, 3)):
    return torch.randint(num_rows, shape, generator=torch.Generator().manual_seed(seed))


def train(bag, optimizer, batches):
    for ids in batches:
        optimizer.zero_grad()
        bag(ids).square().sum().mul(0.01).backward()
        optimizer.step()


def assert_equal(bag, other, tolerance):
    for mine, theirs in zip(bag.cores, other.cores, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_equals_autograd_and_torch(rule, dtype, tolerance):
    """On batches that read every slice, where lazy Adam is Adam."""
    bag = make(dtype)
    other = copy.deepcopy(bag)
    batches = [torch.arange(NUM_ROWS).view(-1, 1), draw_ids(0, shape=(300, 1)), draw_ids(1, shape=(300, 1))]
    mine, theirs = RULES[rule]
    train(bag, TensorTrainOptimizer(bag, mine), batches)
    train(other, theirs(other.cores.parameters()), batches)
    assert_equal(bag, other, tolerance)


@settings(max_examples=25)
@given(
    rule=st.sampled_from(["sgd", "adagrad"]), seeds=st.lists(st.integers(0, 99), max_size=4), rows=st.integers(1, 101)
)
def test_few_slices(rule, seeds, rows):
    bag = make()
    other = copy.deepcopy(bag)
    mine, theirs = RULES[rule]
    batches = [draw_ids(seed, rows, (4, 2)) for seed in seeds]
    train(bag, TensorTrainOptimizer(bag, mine), batches)
    train(other, theirs(other.cores.parameters()), batches)
    assert_equal(bag, other, 1e-11)


def test_lazy_adam_is_sparse_adam():
    """torch.optim.SparseAdam adds eps before its bias correction; with an eps of next to nothing they agree."""
    bag = make()
    other = make(sparse=True)
    batches = [draw_ids(seed, shape=(3, 2)) for seed in range(5)]
    train(bag, TensorTrainOptimizer(bag, Adam(lr=0.01, eps=1e-30)), batches)
    train(other, torch.optim.SparseAdam(list(other.cores), lr=0.01, eps=1e-30), batches)
    assert_equal(bag, other, 1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_untouched_slices_and_their_state_stay(rule):
    bag = make()
    optimizer = TensorTrainOptimizer(bag, RULES[rule][0])
    train(bag, optimizer, [draw_ids(0, shape=(300, 1))])
    ids = torch.tensor([[100, 3]])
    touched = [[0, 2], [0, 4], [2, 3]]  # of row factors 3, 5, 7
    before = [[core.detach().clone(), *map(torch.clone, optimizer.state[core].values())] for core in bag.cores]
    train(bag, optimizer, [ids])
    for core, old, slices in zip(bag.cores, before, touched, strict=True):
        for now, then in zip([core, *optimizer.state[core].values()], old, strict=True):
            changed = (now != then).flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert changed == slices


@pytest.mark.parametrize("rule", RULES)
def test_gradients_before_a_step_add_up(rule):
    bag = make()
    other = copy.deepcopy(bag)
    mine, theirs = TensorTrainOptimizer(bag, RULES[rule][0]), RULES[rule][1](other.cores.parameters())
    for module in (bag, other):
        for ids in (draw_ids(0, shape=(200, 1)), draw_ids(1, shape=(200, 1))):
            module(ids).square().sum().backward()
    mine.step()
    theirs.step()
    assert_equal(bag, other, 1e-10)


def test_backward_leaves_grad_alone_and_zero_grad_forgets():
    bag = make()
    optimizer = TensorTrainOptimizer(bag, SGD(lr=0.1))
    before = bag.dense().detach().clone()
    bag(draw_ids(0)).sum().backward()
    assert all(core.grad is None for core in bag.cores)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(bag.dense(), before)


def test_a_loss_that_is_kept_keeps_no_products():
    bag = make()
    optimizer = TensorTrainOptimizer(bag, SGD(lr=0.1))
    losses = []
    for seed in range(3):
        losses.append(bag(draw_ids(seed)).sum())
        losses[-1].backward()
        optimizer.step()
    assert len(bag._workspace.products) == 1  # one buffer, given back every time


def test_weights_and_max_go_through_the_same_update():
    for mode in ("sum", "max"):
        bag = TensorTrainEmbeddingBag(NUM_ROWS, DIM, mode=mode, rank=(5, 7), dtype=torch.float64, seed=2)
        other = copy.deepcopy(bag)
        optimizers = TensorTrainOptimizer(bag, SGD(lr=0.1)), torch.optim.SGD(other.parameters(), lr=0.1)
        for module, optimizer in zip((bag, other), optimizers, strict=True):
            weights = torch.linspace(-1, 1, 90, dtype=torch.float64).view(30, 3).requires_grad_()
            module(draw_ids(0), None, weights if mode == "sum" else None).square().sum().backward()
            assert mode == "max" or weights.grad is not None
            optimizer.step()
        assert_equal(bag, other, 1e-11)


def test_schedules_and_closures():
    bag = make()
    optimizer = TensorTrainOptimizer(bag, SGD(lr=0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)

    def closure():
        loss = bag(draw_ids(0)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    schedule.step()
    before = bag.dense().detach().clone()
    optimizer.step(closure)
    assert torch.equal(bag.dense(), before)  # the learning rate is 0 now


@pytest.mark.parametrize("rule", RULES)
def test_a_saved_optimizer_goes_on(rule):
    bag, batches = make(), [draw_ids(seed) for seed in range(4)]
    optimizer = TensorTrainOptimizer(bag, RULES[rule][0])
    train(bag, optimizer, batches[:2])
    twin = copy.deepcopy(bag)
    resumed = TensorTrainOptimizer(twin, RULES[rule][0])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(bag, optimizer, batches[2:])
    train(twin, resumed, batches[2:])
    assert all(torch.equal(a, b) for a, b in zip(bag.cores, twin.cores, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "twice", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_a_copied_optimizer_trains_the_copy(rule, twice):
    bag, batches = make(), [draw_ids(seed) for seed in range(4)]
    optimizer = TensorTrainOptimizer(bag, RULES[rule][0])
    train(bag, optimizer, batches[:2])
    twin, copied = twice((bag, optimizer))
    before = bag.dense().detach().clone()
    train(twin, copied, batches[2:])
    assert torch.equal(bag.dense(), before)
    train(bag, optimizer, batches[2:])
    assert all(torch.equal(a, b) for a, b in zip(bag.cores, twin.cores, strict=True))


def test_several_bags():
    bags = [make(), make(name="other")]
    others = copy.deepcopy(bags)
    optimizer = TensorTrainOptimizer(bags, SGD(lr=0.1))
    assert [group["name"] for group in optimizer.param_groups] == ["tensor_train", "other"]
    bags[1](draw_ids(0)).sum().backward()  # the first has nothing to do
    optimizer.step()
    assert torch.equal(bags[0].dense(), others[0].dense())
    others[1](draw_ids(0)).sum().backward()
    torch.optim.SGD(others[1].parameters(), lr=0.1).step()
    assert_equal(bags[1], others[1], 1e-12)


def test_a_step_between_forward_and_backward_is_noticed():
    bag = make()
    optimizer = TensorTrainOptimizer(bag, SGD(lr=0.1))
    late = bag(draw_ids(0))
    train(bag, optimizer, [draw_ids(1)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


def test_a_copy_trains_on_its_own():
    bag = make()
    TensorTrainOptimizer(bag, SGD(lr=0.1))
    twin = copy.deepcopy(bag)
    twin(draw_ids(0)).sum().backward()
    assert all(core.grad is not None for core in twin.cores)
    bag.send_gradients_to(None)
    bag(draw_ids(0)).sum().backward()
    assert all(core.grad is not None for core in bag.cores)


def test_frozen_cores_are_refused():
    bag = TensorTrainEmbeddingBag.from_pretrained(torch.zeros(30, 4), rank=2)
    with pytest.raises(ConfigurationError, match=r"has frozen cores.*freeze=False"):
        TensorTrainOptimizer(bag)


def freeze_one(bag, optimizer):
    bag.cores[0].requires_grad_(False)


def become_double(bag, optimizer):
    """Kernels would read and write past states of half the size."""
    bag.double()


def load_another_table(bag, optimizer):
    other = TensorTrainOptimizer(TensorTrainEmbeddingBag(50, DIM, mode="sum", rank=2), AdaGrad())
    optimizer.load_state_dict(other.state_dict())


def load_another_rule(bag, optimizer):
    optimizer.load_state_dict(TensorTrainOptimizer(copy.deepcopy(bag), SGD()).state_dict())


def replace_cores(bag, optimizer):
    bag.load_state_dict(bag.state_dict(), assign=True)


def penalize(bag, optimizer):
    sum(core.square().sum() for core in bag.cores).backward()


def make_another_optimizer(bag, optimizer):
    TensorTrainOptimizer(bag)


def send_elsewhere(bag, optimizer):
    bag.send_gradients_to(None)


@pytest.mark.parametrize(
    "change, message",
    [
        (freeze_one, "frozen cores"),
        (
            become_double,
            r"has a core of .* torch.float64 on cpu, and of the optimizer's state is {'sum': .* torch.float32",
        ),
        (load_another_table, r"has a core of \(3, 2, 5\) .*, and of the optimizer's state is {'sum': '\(2, 2, 2\)"),
        (load_another_rule, "state is {'sum': 'missing'}"),
        (replace_cores, "got other cores since its optimizer was made"),
        (penalize, "gradients in its cores' `grad`, which come from elsewhere than its look-ups"),
        (make_another_optimizer, "sends its gradients elsewhere since"),
        (send_elsewhere, "sends its gradients elsewhere since"),
    ],
)
def test_what_would_be_lost_or_overwritten_is_refused(change, message):
    bag = make(torch.float32)
    optimizer = TensorTrainOptimizer(bag, AdaGrad())
    change(bag, optimizer)
    before = [core.detach().clone() for core in bag.cores]
    bag(draw_ids(0)).sum().backward()
    with pytest.raises(ConfigurationError, match=f"tensor-train table 'tensor_train'.* {message}"):
        optimizer.step()
    assert all(torch.equal(core, old) for core, old in zip(bag.cores, before, strict=True))


def test_gradients_of_zero_are_not_lost():
    bag = make()
    optimizer = TensorTrainOptimizer(bag, SGD(lr=0.1))
    for core in bag.cores:
        core.grad = torch.zeros_like(core)
    bag(draw_ids(0)).sum().backward()
    optimizer.step()


def test_a_frozen_bag_rests():
    bag = make()
    optimizer = TensorTrainOptimizer(bag, SGD(lr=0.1))
    bag.requires_grad_(False)
    before = bag.dense().clone()
    assert not bag(draw_ids(0)).requires_grad
    optimizer.step()
    assert torch.equal(bag.dense(), before)


def test_what_is_no_bag_is_refused():
    with pytest.raises(TypeError, match="takes TensorTrainEmbeddingBags, not Parameter"):
        TensorTrainOptimizer(make().parameters())
    with pytest.raises(ConfigurationError, match="a group for each of its bags"):
        TensorTrainOptimizer(make()).add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def test_state_by_row_is_refused():
    with pytest.raises(ConfigurationError, match=r"row_wise_adagrad keeps state by row.* by sgd, adagrad, adam$"):
        TensorTrainOptimizer(make(), RowWiseAdaGrad())
