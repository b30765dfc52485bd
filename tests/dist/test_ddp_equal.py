"""DDP with the hook equals DDP without it, whatever DDP is asked to do."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import commlib
from tests.dist.harness import run_ranks, same_everywhere, threads
from tests.dist.models import (
    Bag,
    ByKeyword,
    D,
    Hidden,
    Outside,
    Sometimes,
    Tied,
    V,
    Words,
    batches,
    counts,
    plain_step,
    side_by_side,
)

pytestmark = pytest.mark.dist

EXACT = [None, "dense", "allgather", "union", "balanced", "minimal"]


def every_reducer(rank, n):
    for sparse in (False, True):
        for reducer in EXACT if n < 4 else ("minimal", "balanced"):
            state = side_by_side(rank, n, partial(Words, sparse), reducer)
            ran = counts(state, "words.weight")
            assert len(ran) == 4
            assert reducer is None or set(ran) == {reducer}
            assert all(s.announce for s in state.reducer_states.values())
            state.close()
    assert threads() == []


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_reducer(n):
    run_ranks(n, every_reducer)


def ddp_options(rank, n):
    options = [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0001},
        {"broadcast_buffers": False, "init_sync": True},
    ]
    for option in options:
        for sparse in (False, True):
            side_by_side(rank, n, partial(Words, sparse), ddp_options=option).close()


@pytest.mark.parametrize("n", [2, 3])
def test_ddp_options(n):
    run_ranks(n, ddp_options)


def unused(rank, n, sparse):
    state = side_by_side(
        rank,
        n,
        partial(Sometimes, sparse),
        "minimal",
        ddp_options={"find_unused_parameters": True},
        steps=5,
    )
    assert state.reducer_states["words.weight"].announce
    if not sparse:
        assert state.reducer_states["rare.weight"].announce


@pytest.mark.parametrize("n", [2, 3])
def test_tables_that_only_some_ranks_use(n):
    run_ranks(n, unused, False)


def other_models(rank, n):
    side_by_side(rank, n, Tied).close()
    state = side_by_side(rank, n, Outside, "minimal", steps=5)
    assert not state.reducer_states["words.weight"].announce  # the guard tripped, on every rank
    assert counts(state, "words.weight") == ["minimal"] * 5
    state.close()
    state = side_by_side(rank, n, ByKeyword, "minimal")
    assert state.reducer_states["words.weight"].announce
    state.close()
    # Each rank shrinks the rows that it looks up itself, with DDP alone as well.
    side_by_side(rank, n, partial(Words, max_norm=1.0), exact=False, replicas=False).close()
    side_by_side(rank, n, partial(Words, padding_idx=3)).close()
    side_by_side(rank, n, partial(Words, scale_grad_by_freq=True)).close()


@pytest.mark.parametrize("n", [2, 3])
def test_other_models(n):
    run_ranks(n, other_models)


def bags(rank, n):
    for mode in ("sum", "mean", "max"):
        for sparse in (False, True):
            if mode == "max" and sparse:
                continue
            for last in (False, True):
                side_by_side(rank, n, partial(Bag, mode, sparse, last=last), "minimal").close()
    for sparse in (False, True):
        side_by_side(
            rank, n, partial(Bag, "sum", sparse, weighted=True), "minimal", exact=not sparse
        ).close()
        side_by_side(rank, n, partial(Bag, "mean", sparse, padding_idx=1), "minimal").close()


@pytest.mark.parametrize("n", [2])
def test_embedding_bags(n):
    run_ranks(n, bags)


def accumulate(ddp, ids, step):
    with ddp.no_sync():
        ddp(ids).backward()
        ddp((ids + 1) % V).backward()
    ddp((ids + 2) % V).backward()


def two_forwards(ddp, ids, step):
    (ddp(ids) + ddp((ids + 3) % V)).backward()


def evaluate_between(ddp, ids, step):
    ddp(ids).backward()
    ddp.eval()
    with torch.no_grad():
        ddp(ids)
    if torch.distributed.get_rank() == 0:  # on one rank only, with gradients on
        ddp(ids)
    ddp.train()


def forward_without_backward(ddp, ids, step):
    ddp((ids + 3) % V)
    ddp(ids).backward()


def ways_to_step(rank, n):
    for sparse in (False, True):
        for step_fn in (accumulate, evaluate_between, two_forwards, forward_without_backward):
            state = side_by_side(
                rank,
                n,
                partial(Words, sparse),
                "minimal",
                step_fn=step_fn,
                exact=n <= 2 and not sparse,
            )
            assert state.reducer_states["words.weight"].announce, step_fn
            state.close()
        side_by_side(
            rank, n, partial(Words, sparse), step_fn=accumulate, exact=n <= 2 and not sparse
        ).close()


@pytest.mark.parametrize("n", [2, 3])
def test_ways_to_step(n):
    run_ranks(n, ways_to_step)


class Checkpointed(Words):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, ids):
        start = torch.zeros(1, requires_grad=True)

        def inner(start):
            return (self.words(ids) + start) * 2

        hidden = checkpoint(inner, start, use_reentrant=self.reentrant)
        return self.linear(hidden + self.kinds(ids % 4)).square().mean()


def checkpointing(rank, n):
    for reentrant in (False, True):
        side_by_side(rank, n, partial(Checkpointed, reentrant), "minimal").close()


def test_gradient_checkpointing():
    run_ranks(2, checkpointing)


def uneven(rank, n, sparse):
    torch.manual_seed(5)
    models = [Words(False), Words(sparse)]
    models[1].load_state_dict(models[0].state_dict())
    reference, ddp = DDP(models[0]), DDP(models[1])
    state = commlib.ddp.register(ddp, "minimal", timeout_s=20.0)
    for model in (reference, ddp):
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for ids in batches(rank, 3 + 2 * rank):
                optim.zero_grad()
                plain_step(model, ids, 0)
                optim.step()
    for mine, theirs in zip(ddp.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
        assert same_everywhere(mine)
    assert len(counts(state, "words.weight")) == 3 + 2 * (n - 1)
    state.close()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_join_with_uneven_inputs(n, sparse):
    run_ranks(n, uneven, sparse)


def sparse_adam(rank, n):
    """SparseAdam takes the sparse result as it is; equal to it on the exact mean gradient."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(V, D, sparse=True))
    twin = torch.nn.Parameter(model[0].weight.detach().clone())
    ddp = DDP(model)
    state = commlib.ddp.register(ddp, timeout_s=20.0)
    ours, theirs = torch.optim.SparseAdam(model.parameters()), torch.optim.SparseAdam([twin])
    for step in range(4):
        everyone = [
            torch.randint(0, V, (6,), generator=torch.Generator().manual_seed(10 * step + peer))
            for peer in range(n)
        ]
        ours.zero_grad()
        ddp(everyone[rank]).pow(2).sum().backward()
        ours.step()
        rows = torch.cat(everyone)
        values = 2 * twin.detach()[rows] / n
        twin.grad = torch.sparse_coo_tensor(rows.unsqueeze(0), values, twin.shape)
        theirs.step()
        assert torch.allclose(model[0].weight, twin, atol=1e-6)
        assert same_everywhere(model[0].weight)
    state.close()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sparse_adam(n):
    run_ranks(n, sparse_adam)


def subgroups(rank, n):
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    more = torch.distributed.new_group([0, 2, 3])  # ranks in unequal numbers of groups
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    ddp = DDP(model, process_group=groups[rank // 2])
    state = commlib.ddp.register(ddp)
    ddp(torch.full((1, 2), float(rank + 1))).sum().backward()
    want = 1.5 if rank < 2 else 3.5
    assert model[0].weight.grad.tolist() == [[want, want]]
    assert state.num_ranks == 2 and more is not None
    return True


def test_c11_who_divides():
    run_ranks(4, subgroups)


def dense_wires(rank, n):
    for wire, tolerance in (("fp16", 1e-2), ("bf16", 5e-2)):
        state = side_by_side(
            rank, n, Words, register={"dense": wire}, exact=False, tolerance=tolerance
        )
        linear = [r for r in state.stats() if r["reducer"] == wire]
        assert len(linear) >= 4
        elements = 3 * D + 3
        assert sum(r["bytes_sent"] for r in linear) == 4 * elements * 2  # half of fp32, 2 ranks
        state.close()


def test_dense_wire():
    run_ranks(2, dense_wires)


def density(rank, n):
    state = side_by_side(rank, n, Hidden, "minimal", steps=6)
    assert counts(state, "table") == ["minimal"] * 3  # measured for three steps
    assert counts(state, "full") == []
    state.close()
    state = side_by_side(rank, n, Hidden, "minimal", register={"find_sparse": False})
    assert counts(state, "table") == []
    state.close()
    state = side_by_side(rank, n, Hidden, "minimal", register={"tables": ["table"]})
    assert counts(state, "table") == ["minimal"] * 4
    state.close()


def test_tables_found_by_density_and_by_name():
    run_ranks(2, density)
