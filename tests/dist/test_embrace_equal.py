"""Partitioned tables against DDP(nn.Embedding): the same numbers, whatever the options."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

from commlib import embrace
from tests.dist.harness import run_ranks, same_everywhere

pytestmark = pytest.mark.dist

V, D = 30, 10
PADDING = 26


class Model(nn.Module):
    """A table, or a bag, and a dense layer behind it."""

    def __init__(self, **options):
        super().__init__()
        kind = nn.EmbeddingBag if "mode" in options else nn.Embedding
        self.table = kind(V, D, **options)
        self.linear = nn.Linear(D, 3)

    def forward(self, ids, **arguments):
        return self.linear(self.table(ids, **arguments)).square().mean()


def batches(rank, steps, num_ids=12):
    generator = torch.Generator().manual_seed(31 + rank)
    for _ in range(steps):
        yield torch.randint(V, (2, num_ids // 2), generator=generator)


def pair(seed=3, reference_sparse=False, **options):
    """DDP of a partitioned model, and DDP of the model as it was."""
    torch.manual_seed(seed)
    model = Model(**options)
    reference = copy.deepcopy(model)
    reference.table.sparse = reference_sparse
    embrace.shard(model, timeout_s=30)
    return DDP(model), DDP(reference)


def close_enough(ours, theirs, exact):
    if exact:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)


def compare(ddp, reference, exact):
    table = ddp.module.table.weight.full_tensor()
    assert same_everywhere(table)
    assert same_everywhere(ddp.module.linear.weight)
    close_enough(table, reference.module.table.weight, exact)
    close_enough(ddp.module.linear.weight, reference.module.linear.weight, exact)


# C31


def toy(rank, n, op, sparse, dim):
    model = nn.Sequential(nn.Embedding(8, dim, sparse=sparse), nn.Linear(dim, 1))
    with torch.no_grad():
        model[0].weight.zero_()
    embrace.shard(model, op=op, timeout_s=30)
    optimizer = torch.optim.SGD(model[:1].parameters(), lr=1.0)
    model[0](torch.tensor([2 * rank, 2 * rank + 1])).backward(torch.full((2, dim), 0.5))
    gradient = model[0].local_weight.grad
    assert gradient.is_sparse == sparse and gradient.shape == model[0].local_weight.shape
    if sparse:
        assert gradient.is_coalesced() and gradient.indices().tolist() == [list(range(2 * n))]
    optimizer.step()
    return model[0].weight.full_tensor()


@pytest.mark.parametrize("sparse", [False, True])
def test_c31_zeros(sparse):
    for op, moved in (("mean", -0.25), ("sum", -0.5)):
        expected = torch.zeros(8, 3)
        expected[:4] = moved
        for table in run_ranks(2, toy, op, sparse, 3):
            assert torch.equal(table, expected)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
    "momentum": (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "sparse_adam": (torch.optim.SparseAdam, {"lr": 0.05}),
}


def ten_steps(rank, n):
    """Each optimizer, dense or sparse gradients as it takes them; after 1 and after 10 steps."""
    for name, (kind, options) in OPTIMIZERS.items():
        for sparse in (False, True):
            if (name == "adam" and sparse) or (name == "sparse_adam" and not sparse):
                continue  # torch's own optimizers refuse these
            ddp, reference = pair(sparse=sparse, reference_sparse=sparse)
            steps = []
            for model, table in ((ddp, ddp.module.table), (reference, reference.module.table)):
                tables = kind(table.parameters(), **options)
                rest = torch.optim.SGD(model.module.linear.parameters(), lr=0.5)
                steps.append((model, tables, rest))
            for step, ids in enumerate(batches(rank, 10)):
                for model, tables, rest in steps:
                    model.zero_grad()
                    model(ids).backward()
                    tables.step()
                    rest.step()
                if step in (0, 9):
                    # A sum of two does not depend on the order; sparse gradients have their own.
                    compare(ddp, reference, exact=n <= 2 and not sparse)
            embrace.close(ddp.module)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_c31_equal_to_ddp_after_1_and_10_steps(n):
    run_ranks(n, ten_steps)


# Options


def gradients(rank, n, ids, **arguments):
    """Of the table, both ways, summed up from however many backward passes."""

    def run(options, calls=1):
        ddp, reference = pair(**options)
        for _ in range(calls):
            ddp(ids, **arguments).backward()
            reference(ids, **arguments).backward()
        own = ddp.module.table
        gradient = own.local_weight.grad.to_dense().contiguous()
        ours = own.columns.wrap(gradient).full_tensor()
        torch.testing.assert_close(ours, reference.module.table.weight.grad, rtol=1e-5, atol=1e-7)
        embrace.close(ddp.module)

    return run


def embedding_options(rank, n):
    for ids in batches(rank, 1):
        run = gradients(rank, n, ids)
        ids[1, 2] = PADDING
        run({"padding_idx": PADDING})
        run({"padding_idx": -1, "sparse": True})
        run({"scale_grad_by_freq": True})
        run({"sparse": True}, calls=3)
        run({}, calls=2)
        gradients(rank, n, torch.full((7,), rank))({})  # repeated ids
        gradients(rank, n, torch.tensor(rank))({"sparse": True})  # no dimension at all


def bag_options(rank, n):
    for ids in batches(rank, 1):
        flat = ids.flatten()
        flat[3] = PADDING
        offsets = torch.tensor([0, 1, 1, 6])  # the second bag is empty
        for mode in ("sum", "mean", "max"):
            gradients(rank, n, ids)({"mode": mode})
            gradients(rank, n, flat, offsets=offsets)({"mode": mode, "padding_idx": PADDING})
            gradients(rank, n, flat.int(), offsets=offsets.int())({"mode": mode})
        last = torch.tensor([0, 3, 3, len(flat)])
        gradients(rank, n, flat, offsets=last)(
            {"mode": "mean", "include_last_offset": True, "sparse": True}
        )
        weights = torch.linspace(0.5, 1.5, len(flat))
        gradients(rank, n, flat, offsets=offsets, per_sample_weights=weights)({"mode": "sum"})


def weights_have_gradients(rank, n):
    """per_sample_weights that are trained; mode max with sparse gradients, which torch lacks."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(V, D, mode="sum")
    ours = embrace.ShardedEmbeddingBag.from_embedding(bag)
    ids = next(batches(rank, 1)).flatten()
    found = []
    for table in (bag, ours):
        weights = torch.linspace(0.5, 1.5, len(ids)).requires_grad_()
        out = table(ids, torch.tensor([0, 4]), weights)
        out.square().sum().backward()
        found.append((out, weights.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    sparse_max = embrace.ShardedEmbeddingBag(V, D, mode="max", sparse=True)
    sparse_max(ids, torch.tensor([0, 4])).sum().backward()
    assert sparse_max.local_weight.grad.is_sparse


@pytest.mark.parametrize("body", [embedding_options, bag_options, weights_have_gradients])
def test_options(body):
    run_ranks(3, body)


# C32


def empty(rank, n, who):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "one": nn.Embedding(9, 5, padding_idx=1),
            "two": nn.Embedding(9, 5, sparse=True, dtype=torch.float64),
            "bag": nn.EmbeddingBag(9, 5, mode="mean"),
        }
    )
    before = copy.deepcopy(model)
    embrace.shard(model, timeout_s=30)
    nobody = who == "all" or rank == who
    ids = torch.empty(0, dtype=torch.int64) if nobody else torch.tensor([1, 2, 2])
    out = model["one"](ids)
    wide = model["two"](ids.view(-1, 1).expand(-1, 4))
    bags = model["bag"](ids, torch.tensor([0, 0]))
    k = len(ids)
    for got, shape, dtype in (
        (out, (k, 5), torch.float32),
        (wide, (k, 4, 5), torch.float64),
        (bags, (2, 5), torch.float32),
    ):
        assert (tuple(got.shape), got.dtype, got.device) == (shape, dtype, ids.device)
        assert got.requires_grad
    assert torch.equal(out, before["one"](ids))
    assert torch.equal(bags, before["bag"](ids, torch.tensor([0, 0])))
    (out.sum() + wide.sum() + bags.sum()).backward()
    givers = 0 if who == "all" else n - 1
    for name, per_rank in (("one", [0, 2]), ("two", [4, 8]), ("bag", [1 / 3, 2 / 3])):
        table = model[name]
        gradient = table.local_weight.grad.to_dense()
        expected = torch.zeros_like(gradient)
        for row, value in zip((1, 2), per_rank, strict=True):
            expected[row] = value * givers / n
        torch.testing.assert_close(gradient, expected)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.parametrize("who", [0, 1, "all"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_c32_empty_batches(n, who):
    if isinstance(who, int) and who >= n:
        pytest.skip("no such rank")
    run_ranks(n, empty, who)


# Several tables, several lookups


def twice(rank, n):
    """One table looked up twice in a forward pass, gradients accumulated over two passes."""
    for sparse in (False, True):
        torch.manual_seed(1)
        model = nn.ModuleDict({"t": nn.Embedding(V, D, sparse=sparse), "l": nn.Linear(D, 1)})
        before = copy.deepcopy(model)
        before["t"].sparse = False
        embrace.shard(model, timeout_s=30)
        for ids in batches(rank, 2):
            for own in (model, before):
                hidden = own["t"](ids) + own["t"](ids.flip(0) // 2) * 2
                own["l"](hidden).square().sum().backward()
        gradient = before["t"].weight.grad / n
        torch.distributed.all_reduce(gradient)
        ours = model["t"].local_weight.grad.to_dense().contiguous()
        torch.testing.assert_close(
            model["t"].columns.wrap(ours).full_tensor(), gradient, rtol=1e-5, atol=1e-6
        )
        out = model["t"](torch.arange(3))  # the graph may be used twice
        out.sum().backward(retain_graph=True)
        out.sum().backward()


def together(rank, n):
    """`lookup` gives what the modules give, and the same gradients."""
    torch.manual_seed(2)
    model = nn.ModuleDict(
        {
            "a": nn.Embedding(V, 4, padding_idx=3),
            "b": nn.Embedding(5, 9, sparse=True, dtype=torch.bfloat16),
            "c": nn.EmbeddingBag(V, 7, mode="sum", sparse=True),
            "d": nn.EmbeddingBag(12, 3, mode="max", dtype=torch.float64),
            "frozen": nn.Embedding(V, 6),
        }
    )
    model["frozen"].weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    embrace.shard(model, timeout_s=30)
    embrace.shard(twin, timeout_s=30)
    ids = next(batches(rank, 1))
    offsets = torch.tensor([0, 2, 2])
    asked = {
        "d": {"input": ids % 12},
        "a": ids,
        "b": ids[:, :0] if rank == 0 else ids % 5,
        "frozen": ids,
        "c": (ids.flatten(), offsets, torch.ones(ids.numel())),
    }
    outputs = embrace.lookup({model[name]: given for name, given in asked.items()})
    assert list(outputs) == [model[name] for name in asked]
    total = torch.zeros(())
    for name, given in asked.items():
        if isinstance(given, dict):
            expected = twin[name](**given)
        else:
            expected = twin[name](*(given if isinstance(given, tuple) else (given,)))
        got = outputs[model[name]]
        assert torch.equal(got, expected) and got.dtype == expected.dtype
        assert got.requires_grad == (name != "frozen")
        if name != "frozen":
            expected.square().sum().backward()
            total = total + got.square().sum()
    total.backward()
    for name in ("a", "b", "c", "d"):
        ours, theirs = model[name].local_weight.grad, twin[name].local_weight.grad
        assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert model["frozen"].local_weight.grad is None


def without_gradients(rank, n):
    torch.manual_seed(1)
    table = nn.Embedding(V, D)
    ours = embrace.ShardedEmbedding.from_embedding(table)
    for ids in batches(rank, 1):
        with torch.no_grad():
            out = ours(ids)
            assert not out.requires_grad and torch.equal(out, table(ids))
        with torch.inference_mode():
            assert torch.equal(ours(ids), table(ids))
        ours.eval()
        assert torch.equal(ours(ids), table(ids))
        strange = ids.repeat(1, 3)[:, ::2].t()
        assert torch.equal(ours(strange), table(strange))
        assert torch.equal(ours(ids.int()), table(ids))


def wires(rank, n):
    torch.manual_seed(1)
    for wire, eps in (("bf16", 2**-8), ("fp16", 2**-11)):
        model = nn.Sequential(nn.Embedding(V, D))
        before = copy.deepcopy(model)
        embrace.shard(model, wire=wire, timeout_s=30)
        ids = next(batches(rank, 1))
        out, expected = model[0](ids), before[0](ids)
        assert out.dtype == torch.float32
        assert bool(((out - expected).abs() <= eps * expected.abs()).all())
        dtype = torch.bfloat16 if wire == "bf16" else torch.float16
        assert torch.equal(out, expected.to(dtype).float())
        out.square().sum().backward()
        functional.embedding(ids, before[0].weight).square().sum().backward()
        gradient = before[0].weight.grad
        torch.distributed.all_reduce(gradient)
        own = model[0].columns.own(gradient / n)
        torch.testing.assert_close(model[0].local_weight.grad, own, rtol=4 * eps, atol=8 * eps)


@pytest.mark.parametrize("body", [twice, together, without_gradients, wires])
@pytest.mark.parametrize("n", [1, 3])
def test_lookups(body, n):
    run_ranks(n, body)
