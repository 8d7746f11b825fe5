"""A plain step is taken by all ranks or by none, wherever it fails; after ranks have agreed on it nothing is undone."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch, save
from rowmesh._support.faults import arm
from rowmesh.errors import ConfigurationError, PeerError, RowmeshError
from rowmesh.mesh import Mesh, SharedBuffer
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.waiting import gather_objects
from rowmesh.ops.memory import Buffer
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.tables import Tiers
from tests.support.ranks import RankPool
from tests.support.shards import shard_of
from tests.support.tables import table

SIZES = (6, 6, 40, 200)  # of the batches of the steps: some need more room than those before


def make(mesh, transport="auto", storage="dense", copied=False, mixed=False, **options):
    """Two groups of tables."""
    tables = [table("a", 60, 4, "adagrad", storage=storage), table("b", 300, 8, "adagrad", storage=storage)]
    if mixed:
        tables[1] = table("b", 300, 8, "adagrad", storage="tensor_train")
    if copied:
        planned = [TablePlan(TableShape.of(each), (RowRange(0, 20, "replicated"), RowRange(20, each.num_rows)))
                   for each in tables]  # fmt: skip
        options["plan"] = Plan(tuple(planned), mesh.world_size, mesh.ranks_per_node)
    if storage == "tiered":
        options["tiers"] = Tiers(fast_rows=60)
    embeddings = EmbeddingCollection(tables, mesh=mesh, transport=transport, **options)
    return embeddings, EmbeddingOptimizer(embeddings)


def batch_of(rank, number, size):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return SparseBatch.from_dense(("a", "b"), torch.randint(60, (2, size), generator=generator))


def numbers_of(embeddings):
    """All rows that this rank has, and their state."""
    embeddings.barrier()
    found = []
    for each in embeddings.tables:
        if each.storage == "tensor_train":
            found += [tensor.clone() for tensor in embeddings.cores(each.name).tensors.values()]
        elif each.storage == "tiered":
            shard = shard_of(embeddings, each.name)
            for _, slots in shard.freeze(None).places:
                rows, state = shard.store.read_rows(torch.tensor(list(slots)).numpy())
                found += [rows, *state.values()]
        else:
            found += [
                tensor.clone()
                for part in embeddings.held_rows(each.name)
                for tensor in (part.values, *part.state.values())
            ]
    return found


def train(mesh, options, around_step, look_ups=1, uneven=False):
    """The rows after some steps, each of which is tried until it is taken; and what was raised meanwhile."""
    torch.set_num_threads(1)
    embeddings, optimizer = make(mesh, **options)
    errors = []
    for number, size in enumerate(SIZES):
        optimizer.zero_grad()
        for part in range(look_ups):
            vectors = embeddings(batch_of(mesh.rank, 10 * number + part, size)).values
            if not (uneven and part and number % 2 and mesh.rank):  # that rank's loss leaves it out
                vectors.square().sum().backward()
        before = embeddings.step_count
        for _ in range(3):
            try:
                with around_step():
                    optimizer.step()
                break
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
                assert embeddings.step_count == before
        assert embeddings.step_count == number + 1
    rows = numbers_of(embeddings)
    embeddings.close()
    return rows, errors


class Shortage:
    """No memory where a buffer is made for the n-th time within a step, on this rank."""

    def __init__(self, number, is_here):
        self.number, self.is_here, self.count, self.is_on = number, is_here, 0, False

    @property
    def came(self):
        return self.count >= self.number

    def __call__(self):
        self.count += self.is_on
        if self.is_on and self.is_here and self.count == self.number:
            raise MemoryError("no memory")

    def around_step(self):
        stack, shortage = ExitStack(), self
        make_private, make_shared = Buffer.__init__, SharedBuffer.create

        def private(buffer, *args, **more):
            shortage()
            make_private(buffer, *args, **more)

        def shared(num_bytes):
            shortage()
            return make_shared(num_bytes)

        stack.enter_context(patch.object(Buffer, "__init__", private))
        stack.enter_context(patch.object(SharedBuffer, "create", shared))
        stack.callback(setattr, self, "is_on", False)
        self.is_on = True
        return stack


def lack_memory_everywhere(mesh, options, who, more):
    """One after the other, every buffer of a step cannot be made; returns how many there were."""
    expected, errors = train(mesh, options, ExitStack, **more)
    assert not errors
    number = 0
    while True:
        number += 1
        shortage = Shortage(number, mesh.rank in who)
        rows, errors = train(mesh, options, shortage.around_step, **more)
        torch.testing.assert_close(rows, expected, rtol=0, atol=0)
        came = [shortage.came and mesh.rank in who, errors]
        everyone = [came] if mesh.group is None else gather_objects(mesh, came, "testing")
        if not any(did for did, _ in everyone):
            return number - 1
        for rank, (did, messages) in enumerate(everyone):
            assert 1 <= len(messages) <= len(who), (number, everyone)  # not all come to it in the same step
            for message in messages:
                assert "was not taken, on no rank: no row has changed, and gradients are kept" in message
                assert "MemoryError: no memory" in message
                assert message.startswith("MemoryError" if did and len(messages) == 1 else ("MemoryError", "PeerError"))
                assert did or any(f"rank {each} cannot take it" in message for each in who), (rank, message)


CASES = {
    "one-sided": ({"transport": "one_sided"}, {}),
    "collective": ({"transport": "collective"}, {}),
    "one-sided, copies": ({"transport": "one_sided", "copied": True}, {}),
    "collective, copies": ({"transport": "collective", "copied": True}, {}),
    "replicas": ({"replicas": 2}, {}),
    "tensor-train beside dense": ({"transport": "one_sided", "mixed": True}, {}),
    "tensor-train, collective": ({"transport": "collective", "storage": "tensor_train"}, {}),
    "tiered": ({"storage": "tiered"}, {}),
    "several look-ups": ({"transport": "collective"}, {"look_ups": 2}),
    "several look-ups, one-sided": ({"transport": "one_sided"}, {"look_ups": 2, "uneven": True}),
    "uneven": ({"transport": "collective"}, {"look_ups": 2, "uneven": True}),
}
QUICK = ("one-sided", "collective", "replicas")


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.parametrize("who", [(1,), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_without_memory_no_rank_takes_a_step_which_may_be_tried_again(ranks, case, who):
    options, more = CASES[case]
    counts = ranks.run(lack_memory_everywhere, options, who, more)
    assert counts[0] > 0 or case in ("collective", "tiered", "tensor-train, collective"), counts


@pytest.mark.parametrize("storage", ["dense", "tensor_train", "tiered"])
def test_and_so_on_a_rank_alone(storage):
    lack_memory_everywhere(Mesh(), {"storage": storage}, (0,), {"look_ups": 2})


def fail_once(point, number, kind=RowmeshError):
    """What raises when a point is reached for the n-th time; "exchange": when a message is sent."""
    count = 0

    def action():
        nonlocal count
        count += 1
        if count == number:
            raise kind(f"injected at {point}")

    if point != "exchange":
        return arm(point=point, action=action)
    post = Channel._started

    def started(*arguments):
        action()
        return post(*arguments)

    return patch.object(Channel, "_started", started)


def refuse_by_a_tier(mesh, number):
    """Pins of a step fail; those of look-ups are not counted."""
    is_armed = mesh.rank == mesh.world_size - 1
    count = 0

    def around_step():
        nonlocal count
        count += 1
        return fail_once("cached.load", number) if is_armed and count == 3 else ExitStack()

    options = {"storage": "tiered"}
    expected, _ = train(mesh, options, ExitStack, look_ups=2)
    rows, errors = train(mesh, options, around_step, look_ups=2)
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)
    return errors


@pytest.mark.parametrize("number", [1, 2])
def test_rows_of_all_tables_are_pinned_before_any_is_updated(ranks, number):
    alone = refuse_by_a_tier(Mesh(), number)
    assert len(alone) == 1
    assert alone[0].startswith("RowmeshError: injected at cached.load")
    here, there = ranks.run(refuse_by_a_tier, number)
    assert len(here) == len(there) == 1
    assert "rank 1 cannot take it: RowmeshError: injected at cached.load" in here[0]


def test_what_could_not_be_written_back_is_raised_before_any_table_is_updated():
    embeddings, optimizer = make(Mesh(), storage="tiered")
    embeddings(batch_of(0, 0, 6)).values.sum().backward()
    before = numbers_of(embeddings)
    second = embeddings.engine.exchanges[1].arena
    second._cache._failure = OSError(28, "No space left on device")
    with pytest.raises(RowmeshError, match=r"writing rows back failed: .*No space left on device"):
        optimizer.step()
    torch.testing.assert_close(numbers_of(embeddings), before, rtol=0, atol=0)
    assert embeddings.step_count == 0
    optimizer.step()
    assert embeddings.step_count == 1
    for was, now in zip(before, numbers_of(embeddings), strict=True):
        assert not torch.equal(was, now)
    embeddings.close()


def step_at_other_rates(mesh, options):
    """The second of three steps is refused for its rates on rank 1, and tried again with the right ones."""
    torch.set_num_threads(1)

    def run(differs):
        embeddings, optimizer = make(mesh, **options)
        for number in range(3):
            optimizer.zero_grad()
            embeddings(batch_of(mesh.rank, number, 20)).values.square().sum().backward()
            if differs and number == 1:
                optimizer.param_groups[0]["lr"] = 0.1 + mesh.rank
                with pytest.raises(ConfigurationError, match="learns in step 2"):
                    optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1
            optimizer.step()
        rows = numbers_of(embeddings)
        embeddings.close()
        return rows

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"transport": "one_sided"}, {"transport": "collective"}, {"replicas": 2}])
def test_a_step_that_was_refused_for_its_rates_is_done_by_the_next_call(ranks, options):
    ranks.run(step_at_other_rates, options)


def drop_a_refused_step(mesh, options):
    """A step is refused, its gradients dropped, and another one taken: rows are those of a loop without the first."""
    torch.set_num_threads(1)

    def run(refuses):
        embeddings, optimizer = make(mesh, **options)
        if refuses:
            embeddings(batch_of(mesh.rank, 9, 20)).values.square().sum().backward()
            with fail_once("engine.push", 1) if mesh.rank == 1 else ExitStack(), pytest.raises(RowmeshError):
                optimizer.step()
        optimizer.zero_grad()
        embeddings(batch_of(mesh.rank, 1, 20)).values.square().sum().backward()
        optimizer.step()
        rows = numbers_of(embeddings)
        embeddings.close()
        return rows

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"replicas": 2}, {"transport": "collective"}])
def test_gradients_of_a_refused_step_do_not_survive_zero_grad(ranks, options):
    ranks.run(drop_a_refused_step, options)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["one_sided", "collective"])
def test_the_word_goes_through_both_meshes(ranks, transport):
    ranks.run(drop_a_refused_step, {"replicas": 2, "transport": transport}, world_size=4)


def fail_after_the_agreement(mesh, transport, point, number):
    """What each use of the tables raises on this rank, when the second step has failed on rank 1."""
    torch.set_num_threads(1)
    options = {"replicas": 2} if transport == "replicas" else {"transport": transport}
    embeddings, optimizer = make(mesh, **options)
    found = []
    for step in range(3):
        try:
            optimizer.zero_grad()
            embeddings(batch_of(mesh.rank, step, 20)).values.sum().backward()
            with fail_once(point, number, MemoryError) if mesh.rank and step == 1 else ExitStack():
                optimizer.step()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    uses = [
        optimizer.step,
        lambda: embeddings(batch_of(mesh.rank, 0, 20)),
        lambda: embeddings.held_rows("a"),
        lambda: embeddings.migrate(embeddings.plan),
        lambda: save("/nowhere", {"embeddings": embeddings}),
        embeddings.synchronize,
        embeddings.barrier,
    ]
    for use in uses[: 4 if mesh.rank else 7]:  # not all together: each has to raise by itself
        with pytest.raises(PeerError, match=r"rank 1 failed in step 2, on which ranks had agreed \(MemoryError"):
            use()
    # Rows of replicas are sent and not waited for: there rank 0 has taken the step, and waits before its next look-up.
    assert embeddings.step_count == (2 if transport == "replicas" and mesh.rank == 0 else 1)
    embeddings.close()
    return found


AFTER = {
    "one-sided": ("one_sided", "one_sided.update", 1),
    "collective": ("collective", "collective.gradients", 1),
    "replicas": ("replicas", "replicas.post", 1),
    "the handshake": ("collective", "exchange", 1),
    "the first gradients": ("collective", "exchange", 2),
    "the second gradients": ("collective", "exchange", 3),
}


@pytest.mark.parametrize(
    "case", [name if name == "one-sided" else pytest.param(name, marks=pytest.mark.slow) for name in AFTER]
)
def test_after_the_agreement_nothing_is_undone_and_all_ranks_raise_from_then_on(case):
    pool = RankPool(world_size=2)
    try:
        other, failed = pool.run(fail_after_the_agreement, *AFTER[case])
    finally:
        pool.close()
    assert failed[0].startswith("MemoryError: injected at")
    assert other[0].startswith("PeerError")
    for message in (*other[1:], *failed[1:]):
        assert "rank 1 failed in step 2, on which ranks had agreed (MemoryError: injected at" in message
