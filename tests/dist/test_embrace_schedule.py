"""The 2D schedule changes when bytes travel, and nothing else: the same bits as without it."""

import os
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commlib
from commlib import embrace
from commlib.errors import CommError
from tests.dist.harness import Died, run_ranks, threads

pytestmark = pytest.mark.dist
warnings.filterwarnings("ignore", message="Sparse invariant checks")

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
}
SPARSE = ("sgd", "momentum", "adagrad")


class Model(nn.Module):
    """Two tables with dense work between them, a third one in a bag, an LSTM, attention."""

    def __init__(self, sparse):
        super().__init__()
        self.words = nn.Embedding(60, 8, sparse=sparse, padding_idx=3)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.kinds = nn.Embedding(20, 8, sparse=sparse)
        self.bag = nn.EmbeddingBag(40, 5, mode="sum", sparse=sparse)
        self.head = nn.Linear(21, 4)

    def forward(self, words, bags):
        h = self.lstm(self.words(words))[0]
        h = self.attention(h, h, h, need_weights=False)[0].mean(1)
        kinds = self.kinds(bags[:, 0] % 20)
        return self.head(torch.cat([h, kinds, self.bag(bags)], 1)).pow(2).mean()


def ids_of(batch):
    words, bags = batch
    return {"words": words, "kinds": bags[:, 0] % 20, "bag": bags}


def batches(rank, num_batches, size=6):
    """Skewed ids; the last batch is short."""
    generator = torch.Generator().manual_seed(rank)
    for i in range(num_batches):
        rows = size if i < num_batches - 1 else 2
        words = (torch.rand(rows, 5, generator=generator) ** 2 * 60).long()
        bags = (torch.rand(rows, 3, generator=generator) ** 2 * 40).long()
        yield words, bags


def build(sparse, name):
    torch.manual_seed(0)
    model = embrace.shard(Model(sparse), timeout_s=20.0)
    ddp = DDP(model)
    return model, ddp, OPTIMIZERS[name](ddp.parameters())


def weights(model, optimizer):
    """Everything that a checkpoint holds, as plain tensors."""
    state = {name: full(value) for name, value in model.state_dict().items()}
    for key, entry in optimizer.state_dict()["state"].items():
        state |= {f"{key}.{what}": full(value) for what, value in entry.items()}
    return state


def full(value):
    if hasattr(value, "full_tensor"):
        value = value.to_local()
    value = torch.as_tensor(value)
    return (value.to_dense() if value.is_sparse else value).clone()


def compare(rank, n, loop, sparse, name, options):
    """Runs `loop(ddp, optimizer, batches)` with and without the schedule."""
    results = []
    for scheduled in (False, True):
        model, ddp, optimizer = build(sparse, name)
        state = None if scheduled else commlib.ddp.register(ddp, timeout_s=20.0)

        def given(loader, ddp=ddp, optimizer=optimizer, scheduled=scheduled):
            return embrace.schedule(loader, ddp, optimizer, **options) if scheduled else loader

        seen = loop(rank, ddp, optimizer, given)
        results.append((seen, weights(model, optimizer)))
        if state is not None:
            state.close()
        embrace.close(model)
    (seen, plain), (seen_too, scheduled) = results
    assert len(seen) == len(seen_too)
    for a, b in zip(seen, seen_too, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), (a, b)
    assert plain.keys() == scheduled.keys()
    assert [k for k in plain if not torch.equal(plain[k], scheduled[k])] == []
    return True


def plain_loop(rank, ddp, optimizer, given):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    losses = []
    for words, bags in given(batches(rank, 20)):
        loss = ddp(words, bags)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


CASES = [(True, name) for name in SPARSE] + [(False, name) for name in OPTIMIZERS]


@pytest.mark.parametrize("sparse, name", CASES)
def test_bitwise_equal_after_20_steps(sparse, name):
    """Changing learning rates, a short last batch; ids found in the first iteration, or given."""
    run_ranks(2, compare, plain_loop, sparse, name, {"ids": ids_of})


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("options", [{}, {"ids": ids_of, "block_bytes": 1}, {"overlap": False}])
def test_world_sizes_and_options(n, options):
    run_ranks(n, compare, plain_loop, True, "adagrad", options)


def accumulating(rank, ddp, optimizer, given):
    """Every second batch steps; half of the first ones add up without a sum over ranks."""
    losses = []
    optimizer.zero_grad()
    for i, (words, bags) in enumerate(given(batches(rank, 17))):
        if i % 4 == 0:
            with ddp.no_sync():
                loss = ddp(words, bags)
                loss.backward()
        else:
            loss = ddp(words, bags)
            loss.backward()
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=i % 3 == 0)
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("sparse, name", [(True, "adagrad"), (True, "momentum"), (False, "adam")])
def test_gradient_accumulation(sparse, name):
    run_ranks(2, compare, accumulating, sparse, name, {"ids": ids_of})


def looking_around(rank, ddp, optimizer, given):
    """Evaluation, state_dict, gradients read and clipped, in the middle of the run."""
    seen = []
    for i, (words, bags) in enumerate(given(batches(rank, 12))):
        ddp(words, bags).backward()
        if i % 3 == 0:
            seen.append(commlib.clip_grad_norm_(ddp.parameters(), 0.05))
        if i % 4 == 1:
            seen += [p.grad.to_dense().clone() for p in ddp.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if i % 4 == 0:
            seen += list(weights(ddp.module, optimizer).values())
        if i % 4 == 2:
            ddp.eval()
            with torch.no_grad():
                seen.append(ddp(words.flip(0) * 59 % 60, bags * 39 % 40))
            ddp.train()
    return seen


@pytest.mark.parametrize("sparse, name", [(True, "adagrad"), (False, "adam")])
def test_evaluation_checkpoints_and_clipping_in_between(sparse, name):
    run_ranks(2, compare, looking_around, sparse, name, {"ids": ids_of})


def scaled(rank, ddp, optimizer, given):
    """A loss that overflows on one rank in one step: nobody steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=4)
    seen = []
    for i, (words, bags) in enumerate(given(batches(rank, 10))):
        loss = ddp(words, bags)
        if i == 4 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
        assert i != 4 or seen[-1] == before / 2
    return seen


@pytest.mark.parametrize("sparse, name", [(True, "sgd"), (False, "adam")])
def test_an_overflow_is_skipped_everywhere(sparse, name):
    run_ranks(2, compare, scaled, sparse, name, {"ids": ids_of})


def early_end(rank, n):
    """Rank 1's loader ends first: all ranks stop there, with the same weights as plain runs."""
    results = []
    for scheduled in (False, True):
        model, ddp, optimizer = build(True, "adagrad")
        loader = batches(rank, 9) if rank != 1 else list(batches(rank, 9))[:6]
        if scheduled:
            loader = embrace.schedule(loader, ddp, optimizer, ids=ids_of)
        else:
            loader = list(loader)[:6]
        count = 0
        for words, bags in loader:
            ddp(words, bags).backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
        results.append((count, weights(model, optimizer)))
        embrace.close(model)
    (count, plain), (count_too, scheduled) = results
    assert count == count_too == 6
    return all(torch.equal(plain[k], scheduled[k]) for k in plain)


def test_a_loader_that_ends_early_on_one_rank():
    assert all(run_ranks(2, early_end))


def left_early(rank, n):
    """`break`, then a loop without the schedule: DDP and the optimizer are as they were."""
    model, ddp, optimizer = build(True, "adagrad")
    step = optimizer.step
    for i, (words, bags) in enumerate(
        embrace.schedule(batches(rank, 9), ddp, optimizer, ids=ids_of)
    ):
        ddp(words, bags).backward()
        optimizer.step()
        optimizer.zero_grad()
        if i == 3:
            break
    assert optimizer.step == step and ddp.require_backward_grad_sync
    plain, plain_ddp, plain_optimizer = build(True, "adagrad")
    for i, (words, bags) in enumerate(batches(rank, 9)):
        if i == 4:
            break
        plain_ddp(words, bags).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    a, b = weights(model, optimizer), weights(plain, plain_optimizer)
    equal = all(torch.equal(a[k], b[k]) for k in a)
    for words, bags in batches(rank, 2):
        ddp(words, bags).backward()
        optimizer.step()
    embrace.close(model)
    embrace.close(plain)
    return equal and not threads()


def test_a_loop_that_is_left():
    assert all(run_ranks(2, left_early))


def forgotten_ids(rank, n):
    _, ddp, optimizer = build(True, "sgd")
    loop = embrace.schedule(
        batches(rank, 4), ddp, optimizer, ids=lambda batch: {"words": batch[0][:, :2]}
    )
    for words, bags in loop:
        ddp(words, bags)


def test_ids_that_were_not_announced_are_refused():
    for end in run_ranks(2, forgotten_ids, may_fail=True):
        assert isinstance(end, Died) and end.kind in ("ValueError", "CommError")
        assert "not among the ids of the batch" in end.text or "rank" in end.text


def bad_ids(rank, n):
    """Rank 1's third batch has an id that its table does not have."""
    _, ddp, optimizer = build(True, "sgd")

    def broken():
        for i, (words, bags) in enumerate(batches(rank, 5)):
            yield (words + 60 * (i == 2 and rank == 1), bags)

    count = 0
    try:
        for words, bags in embrace.schedule(broken(), ddp, optimizer, ids=ids_of):
            ddp(words, bags).backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
    except (IndexError, CommError) as error:
        assert isinstance(error, IndexError) == (rank == 1)
        return count, str(error)
    return count, ""


def test_bad_ids_end_the_loop_everywhere():
    for rank, (count, text) in enumerate(run_ranks(2, bad_ids)):
        assert count == 2
        assert ("outside table 'words'" if rank == 1 else "rank 1 has a batch") in text


def refused(rank, n):
    model, ddp, optimizer = build(True, "sgd")
    texts = []
    for make in (
        lambda: embrace.schedule([], nn.Linear(2, 2), optimizer),
        lambda: embrace.schedule([], ddp, torch.optim.LBFGS(ddp.parameters())),
        lambda: list(embrace.schedule([1], ddp, optimizer, ids=lambda b: {"nobody": b})),
    ):
        with pytest.raises(ValueError) as raised:
            make()
        texts.append(str(raised.value))
    with pytest.raises(TypeError) as raised:
        embrace.schedule([], ddp, optimizer, ids={"words": 0})
    texts.append(str(raised.value))
    embrace.close(model)
    late = Model(True)
    wrapped = DDP(late)
    embrace.shard(late)
    with pytest.raises(ValueError) as raised:
        embrace.schedule([], wrapped, torch.optim.SGD(late.parameters(), lr=0.1))
    texts.append(str(raised.value))
    embrace.close(late)
    return texts


def test_refusals_say_what_to_do():
    for no_table, no_parts, no_name, no_function, too_late in run_ranks(2, refused):
        assert "embrace.shard" in no_table
        assert "LBFGS cannot take a step in parts" in no_parts
        assert "'nobody'" in no_name
        assert "ids is a dict: give a function" in no_function
        assert "call embrace.shard(model) first" in too_late


def without_ddp(rank, n):
    """The model itself instead of DDP: dense gradients are averaged all the same."""
    results = []
    for wrapped in (True, False):
        model, ddp, optimizer = build(True, "adagrad")
        root = ddp if wrapped else model
        for words, bags in embrace.schedule(batches(rank, 6), root, optimizer):
            root(words, bags).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model, optimizer))
        embrace.close(model)
    return all(torch.equal(results[0][k], results[1][k]) for k in results[0])


def test_a_model_without_ddp_is_averaged_too():
    assert all(run_ranks(2, without_ddp))


def resources(rank, n):
    def once():
        model, ddp, optimizer = build(True, "adagrad")
        for words, bags in embrace.schedule(batches(rank, 4), ddp, optimizer):
            ddp(words, bags).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        embrace.close(model)

    once()
    before = len(os.listdir("/proc/self/fd"))
    once()
    return before, len(os.listdir("/proc/self/fd")), threading.active_count(), threads()


def test_nothing_is_left_behind():
    for before, after, _, names in run_ranks(2, resources):
        assert after <= before and names == []
