"""Partitioned tables as part of a model: DDP around them, conversion and back, copies, counts."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import commlib
from commlib import embrace
from commlib.errors import CommError
from tests.dist.harness import Died, run_ranks, same_everywhere, threads

pytestmark = pytest.mark.dist


def build(dim=10, sparse=False, seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(12, dim, sparse=sparse),
            "out": nn.Linear(dim, 2),
            "k": nn.Linear(2, 2),
        }
    )
    model.forward = lambda ids: model["k"](model["out"](model["words"](ids))).square().mean()
    return model


def step(ddp, rank):
    ddp(torch.tensor([[rank, 3], [3, 11]])).backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()


# C35


def wrapped(rank, n, dim):
    """Every rank starts from other weights; rank 0's count, for replicas and for shards."""
    first = build(dim, seed=0)
    model = build(dim, seed=rank)
    own_bias = model["out"].bias
    model._ddp_params_and_buffers_to_ignore = ["out.bias"]
    assert embrace.shard(model, timeout_s=30) is model
    assert model._ddp_params_and_buffers_to_ignore == ["out.bias", "words.weight"]
    table = model["words"]
    as_dtensor = distribute_tensor(torch.empty(12, dim), table.exchange.mesh, [Shard(1)])
    assert table.local_weight.shape == as_dtensor.to_local().shape
    assert table.local_weight.shape[1] == table.columns.widths[rank]
    before = table.local_weight.clone()
    assert torch.equal(before, table.columns.own(first["words"].weight))
    ddp = DDP(model)
    assert torch.equal(table.local_weight, before)  # DDP did not touch it
    assert torch.equal(model["out"].weight, first["out"].weight)
    assert torch.equal(own_bias, build(dim, seed=rank)["out"].bias)  # the user's list counts
    assert same_everywhere(model["out"].bias) == (n == 1)
    for _ in range(3):
        step(ddp, rank)
    assert same_everywhere(model["out"].weight) and same_everywhere(table.weight.full_tensor())
    assert table.weight.shape == (12, dim)


@pytest.mark.parametrize("n, dim", [(1, 10), (3, 10), (3, 2), (4, 10)])
def test_c35_ddp_leaves_shards_alone(n, dim):
    run_ranks(n, wrapped, dim)


def inside(rank, n):
    """A sharded model becomes part of a larger one; a model has one from the start."""

    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.stack = nn.Sequential(nn.Identity(), inner)
            self.fresh = embrace.ShardedEmbedding(5, 4, name="fresh")
            self.last = nn.Linear(4, 1)

        def forward(self, ids):
            return self.stack(ids) + self.last(self.fresh(ids % 5)).mean()

    outer = Outer(embrace.shard(build(), timeout_s=30))
    listed = outer._ddp_params_and_buffers_to_ignore
    assert listed == ["stack.1.words.weight", "fresh.weight"]
    before = outer.fresh.local_weight.clone()
    step(DDP(outer), rank)
    assert not torch.equal(outer.fresh.local_weight, before)
    spread = [torch.empty_like(before) for _ in range(n)]
    dist.all_gather(spread, before)
    assert not torch.equal(spread[0], spread[1])  # ranks do not draw the same columns

    outer.fresh = nn.Embedding(5, 4)  # an ordinary one in its place is averaged again
    assert outer._ddp_params_and_buffers_to_ignore == ["stack.1.words.weight"]
    assert "fresh.weight" not in DDP(outer).parameters_to_ignore

    outer._ddp_params_and_buffers_to_ignore = []  # replaced instead of added to
    with pytest.raises(
        ValueError, match=r"overwrite partitioned tables \['stack.1.words.weight'\]"
    ):
        DDP(outer)

    part = nn.Sequential(nn.Identity(), build(seed=1))
    embrace.shard(part[1], timeout_s=30)  # too late for `part` to hear of it
    with pytest.raises(ValueError, match="shard the model that is wrapped"):
        DDP(part)
    whole = nn.Sequential(build(seed=2))
    embrace.shard(whole, timeout_s=30)
    embrace.unshard(whole[0])
    with pytest.raises(ValueError, match="unshard the model that is wrapped"):
        DDP(whole)


def test_ddp_around_a_larger_model():
    run_ranks(2, inside)


def registered(rank, n, dim):
    """The hook of commlib.ddp on the rest of the model."""
    model, twin = build(dim), build(dim)
    embrace.shard(model, timeout_s=30)
    ddp, reference = DDP(model), DDP(twin)
    state = commlib.ddp.register(ddp, timeout_s=30)
    assert not state.tables
    for _ in range(3):
        step(ddp, rank)
        step(reference, rank)
    torch.testing.assert_close(model["words"].weight.full_tensor(), twin["words"].weight)
    torch.testing.assert_close(model["out"].weight, twin["out"].weight)
    state.close()


@pytest.mark.parametrize("dim", [6, 5])
def test_the_ddp_hook_takes_the_rest(dim):
    run_ranks(2, registered, dim)


# Conversion


def there_and_back(rank, n):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "a": nn.Embedding(9, 5, padding_idx=2, sparse=True, dtype=torch.bfloat16),
            "b": nn.EmbeddingBag(7, 2, mode="max", include_last_offset=True),
            "same": nn.Identity(),
            "l": nn.Linear(3, 3),
        }
    )
    model["same"] = model["a"]  # one module under two names
    model["b"].weight.requires_grad_(False)
    model.eval()
    before = copy.deepcopy(model)
    embrace.shard(model, timeout_s=30)
    assert model["same"] is model["a"] and isinstance(model["a"], embrace.ShardedEmbedding)
    assert not model["a"].training and not model["b"].weight.requires_grad
    assert "columns=" in repr(model["a"]) and model["a"].padding_idx == 2
    open_threads = threads()
    embrace.unshard(model)
    assert model["same"] is model["a"] and type(model["a"]) is nn.Embedding
    assert repr(model) == repr(before)
    assert not model["a"].training and not model["b"].weight.requires_grad
    for name, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert not getattr(model, "_ddp_params_and_buffers_to_ignore", None)
    assert (len(open_threads) > 0) == (n > 1) and not threads()
    with pytest.raises(ValueError, match="has no partitioned table"):
        embrace.unshard(model)

    table = embrace.shard(nn.Embedding(4, 3), timeout_s=30)  # the model is a table
    assert isinstance(table, embrace.ShardedEmbedding)
    assert type(embrace.unshard(table)) is nn.Embedding

    few = nn.ModuleDict({"small": nn.Embedding(2, 2), "big": nn.Embedding(20, 4)})
    embrace.shard(few, min_bytes=100, sparse=True, timeout_s=30)
    assert type(few["small"]) is nn.Embedding and few["big"].sparse
    embrace.close(few)
    with pytest.raises(CommError, match="closed"):
        few["big"](torch.tensor([1]))
    embrace.shard(few, filter=lambda name, module: name == "small", timeout_s=30)
    assert isinstance(few["small"], embrace.ShardedEmbedding)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_there_and_back(n):
    run_ranks(n, there_and_back)


def copies(rank, n):
    model = embrace.shard(build(sparse=True), timeout_s=30)
    twin = copy.deepcopy(model)
    twin.forward = lambda ids: twin["words"](ids).sum()
    assert twin["words"].exchange is model["words"].exchange
    assert twin["words"].local_weight is not model["words"].local_weight
    before = model["words"].local_weight.clone()
    step(DDP(twin), rank)
    assert torch.equal(model["words"].local_weight, before)
    assert not torch.equal(twin["words"].local_weight, before)
    commlib.clip_grad_norm_(twin.parameters(), 1.0)  # the copy's parameter is known as a shard too
    twin.double()
    assert twin["words"](torch.tensor([1])).dtype == torch.float64
    assert "words.weight" in DDP(twin).parameters_to_ignore
    with pytest.raises(TypeError, match=r"cannot be pickled.*unshard"):
        pickle.dumps(model["words"])
    with pytest.raises(AttributeError, match="can only be replaced by"):
        model["words"].weight = nn.Parameter(torch.zeros(12, 11))
    twin["words"].weight.square().sum().full_tensor().backward()  # a DTensor, differentiable
    assert twin["words"].local_weight.grad is not None
    embrace.unshard(twin)
    model["words"](torch.tensor([1]))  # the exchange stays for those who use it


@pytest.mark.parametrize("n", [1, 2])
def test_copies(n):
    run_ranks(n, copies)


# H5: how many collectives


def counted(rank, n):
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Embedding(40, 8, sparse=True) for name in "abc"})
    embrace.shard(model, timeout_s=30)
    lane = model["a"].exchange.rows

    def since(before=[0]):  # noqa: B006
        names = [entry[0] for entry in lane.log()]
        new, before[0] = names[before[0] :], len(names)
        return new

    since()
    ids = torch.tensor([rank, 5])
    model["a"](ids).sum().backward()
    assert since() == ["a@0.ids", "a@0.rows", "a.grads@0"]
    with torch.no_grad():
        model["a"](ids)
    assert since() == ["a@1.ids", "a@1.rows"]
    outputs = embrace.lookup({table: ids for table in model.values()})
    sum(out.sum() for out in outputs.values()).backward()
    assert since() == ["a+2@0.ids", "a+2@0.rows", "a+2.grads@0"]
    assert model["a"].exchange.ids.log() == []


def test_collectives_of_a_lookup():
    run_ranks(3, counted)


# Groups


def two_groups(rank, n):
    """C11's setting: the mean is over the group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    torch.manual_seed(rank // 2)
    table = embrace.shard(nn.Embedding(6, 4), group=group, timeout_s=30)
    table(torch.tensor([1])).backward(torch.full((1, 4), float(rank + 1)))
    expected = 1.5 if rank < 2 else 3.5
    assert bool((table.local_weight.grad[1] == expected).all())
    with pytest.raises(ValueError, match="not in the group"):
        embrace.shard(nn.Embedding(6, 4), group=groups[1 - rank // 2])
    norm = float(commlib.clip_grad_norm_(table.parameters(), 1e9))
    assert norm == pytest.approx(expected * 2)


def test_groups():
    run_ranks(4, two_groups)


def no_group(rank, n):
    dist.destroy_process_group()
    embrace.shard(nn.Embedding(3, 3))


def test_no_process_group():
    (died,) = run_ranks(1, no_group, may_fail=True)
    assert isinstance(died, Died) and died.kind == "ValueError"
    assert "init_process_group" in died.text
