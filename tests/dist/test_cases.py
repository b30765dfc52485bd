"""Public failures that must not happen here, on real processes; the numbers are the cases'."""

import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commlib
from commlib.collectives.usage import Usage
from commlib.reducers import REDUCERS, S2, Context, Minimal, ReducerState
from commlib.reducers.gradient import DenseGradient, RowsGradient
from commlib.rows import SparseRows
from commlib.schedule import open_lane
from tests.dist.harness import Died, bits, issued, run_ranks, same_everywhere
from tests.dist.models import D, V, Words, batches, counts, train
from tests.twins import as_matrix, dense_mean, index_of, random_rows, reduce_local

pytestmark = pytest.mark.dist

EVERY = ["dense", "allgather", "union", "balanced", "minimal", "auto", "sketch"]


# On the transport alone: the same protocols as in the unit tests, over Gloo.


def over_gloo(rank, n, cases):
    lane = open_lane("test", list(range(n)), 30.0)
    results = []
    for i, (reducer, parts, announced) in enumerate(cases):
        usage = Usage()
        context = Context(
            name=f"t{i}",
            rank=rank,
            num_ranks=n,
            index=index_of(parts, True) if announced else None,
        )
        protocol = reducer.protocol(RowsGradient(parts[rank]), ReducerState(), context)
        reduced = lane.run(f"t{i}", protocol, usage)
        matrix = as_matrix(reduced).clone()
        assert same_everywhere(matrix)  # H2
        results.append((matrix, usage.sent_bytes, usage.received_bytes))
    return results, len(issued(lane))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gloo_gives_what_lockstep_gives(n):
    """The same bits, bytes (`Usage`) and number of requests (H5) as LocalTransport."""
    cases = []
    for name in EVERY:
        for counts_, v, dtype in (
            ((30, 0, 7, 12)[:n], 90, torch.float32),  # one rank with nothing to give
            ((1, 1000, 1, 3)[:n], 4096, torch.float32),  # C06: sizes from agreed values only
            ((9, 3, 4, 5)[:n], 33, torch.float16),
            ((0, 0, 0, 0)[:n], 12, torch.float64),
            ((0, 0, 0, 0)[:n], 0, torch.float32),  # C05: shape (0, 4)
        ):
            parts = random_rows(counts_, v, 4, dtype)
            cases.append((REDUCERS[name](), parts, False))
            if name in ("minimal", "allgather", "sketch"):
                cases.append((REDUCERS[name](), parts, True))
    ranks = run_ranks(n, over_gloo, cases)
    num_requests = 0
    for i, (reducer, parts, announced) in enumerate(cases):
        index = index_of(parts, True) if announced else None
        results, transport, _ = reduce_local(reducer, parts, index=index, name=f"t{i}")
        num_requests += len(transport.traffic)
        for rank in range(n):
            matrix, sent, received = ranks[rank][0][i]
            assert torch.equal(bits(matrix), bits(as_matrix(results[rank])))
            assert sent == transport.sent_bytes()[rank]
            assert received == transport.received_bytes()[rank]
    assert all(logged == num_requests for _, logged in ranks)


def large(rank, n):
    """Beyond the sizes from which parts go point to point, and sums over Gloo's ring."""
    lane = open_lane("test", list(range(n)), 30.0)
    parts = random_rows((3000, 2500, 10)[:n], 6000, 256)
    for name in ("dense", "allgather", "union", "balanced", "minimal", "sketch"):
        context = Context(name=name, rank=rank, num_ranks=n)
        gradient = DenseGradient(parts[rank].to_dense())
        reduced = lane.run(name, REDUCERS[name]().protocol(gradient, ReducerState(), context))
        matrix = as_matrix(reduced)
        assert same_everywhere(matrix)
        if name != "sketch":
            assert torch.allclose(matrix.double(), dense_mean(parts), atol=1e-5)


@pytest.mark.parametrize("n", [2, 3])
def test_large_messages(n):
    run_ranks(n, large)


def c07(rank, n, values):
    lane = open_lane("test", list(range(n)), 30.0)
    rows = SparseRows(torch.tensor([0]), torch.tensor([[values[rank]]], dtype=torch.float16), 1)
    out = []
    for name in EVERY:
        context = Context(name=name, rank=rank, num_ranks=n)
        protocol = REDUCERS[name]().protocol(RowsGradient(rows), ReducerState(), context)
        out.append(as_matrix(lane.run(name, protocol)).item())
    return out


def c07_bucket(rank, n):
    ddp = DDP(nn.Linear(2, 1, bias=False).half(), bucket_cap_mb=25)
    commlib.ddp.register(ddp)
    with torch.no_grad():
        ddp.module.weight.zero_()
    ddp(torch.tensor([[40000.0, -40000.0]], dtype=torch.float16)).sum().backward()
    return ddp.module.weight.grad.tolist()


def test_c07_halves_do_not_overflow():
    assert set(run_ranks(2, c07, [60000.0] * 2)[0][:-1]) == {60000}
    assert set(run_ranks(4, c07, [30000.0] * 4)[3][:-1]) == {30000}
    assert run_ranks(2, c07_bucket) == [[[40000, -40000]]] * 2


# With DDP.


def c08(rank, n, reducer, sparse):
    torch.manual_seed(3)
    ddp = DDP(nn.Embedding(8, 4, sparse=sparse))
    state = commlib.ddp.register(ddp, reducer)
    optim = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(poison):
        optim.zero_grad()
        loss = ddp(torch.tensor([3, rank])).sum()
        if poison and rank == 0:
            loss = loss * float("nan")
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        assert same_everywhere(ddp.module.weight)

    step(False)
    before = ddp.module.weight.detach().clone()
    residual = state.reducer_states["weight"].residual
    residual = None if residual is None else residual.clone()
    step(True)
    assert torch.equal(ddp.module.weight, before)
    assert scaler.get_scale() == 4.0
    after = state.reducer_states["weight"].residual
    assert residual is None or (torch.equal(after, residual) and bool(after.isfinite().all()))
    step(False)
    assert not torch.equal(ddp.module.weight, before)
    assert bool(ddp.module.weight.isfinite().all())


def c08_all(rank, n):
    for reducer in (None, "minimal", "union", "dense", S2(ratio=0.5), S2(ratio=0.5, wire="fp32")):
        c08(rank, n, reducer, False)


def test_c08_gradscaler_skips_on_both():
    run_ranks(2, c08_all)


def c10(rank, n, reducer, steps):
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    ddp = DDP(Words())
    state = commlib.ddp.register(ddp, reducer)
    train(ddp, rank, steps=steps, lr=0.05, optimizer=torch.optim.Adam)
    for parameter in ddp.parameters():
        assert same_everywhere(parameter)
    return [p.detach().clone() for p in ddp.parameters()], counts(state, "words.weight")


@pytest.mark.parametrize("reducer", [None, "sketch"], ids=str)
def test_c10_replicas_and_runs_never_drift(reducer):
    runs = [run_ranks(3, c10, reducer, 200)[0] for _ in range(2)]
    assert runs[0][1] == runs[1][1]
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(bits(a), bits(b))


def c12(rank, n):
    ids = torch.tensor([[1, 1, 3], [3]][rank])
    for mixed in (False, True):
        for reducer in EVERY[:-1]:
            table = nn.Embedding(5, 2, sparse=True)
            model = nn.Sequential(table, nn.Linear(2, 2)) if mixed else nn.Sequential(table)
            ddp = DDP(model)
            commlib.ddp.register(ddp, reducer)
            out = ddp(ids)
            if mixed:
                with torch.no_grad():
                    model[1].weight.copy_(torch.eye(2))
                    model[1].bias.zero_()
                ddp.zero_grad()
                out = ddp(ids)
            out.sum().backward()
            gradient = table.weight.grad
            assert gradient.layout == torch.sparse_coo
            dense = gradient.to_dense()
            assert dense.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]], (reducer, dense)


def test_c12_sparse_bucket():
    run_ranks(2, c12)


class Backwards(nn.Module):
    """Called in the opposite order of definition, so DDP rebuilds its buckets."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x):
        return self.first(self.second(x).relu()).square().mean()


def c13(rank, n):
    torch.manual_seed(0)
    ddp = DDP(Backwards(), bucket_cap_mb=0.01)
    tables = ["first.weight", "second.weight"]
    state = commlib.ddp.register(ddp, S2(ratio=0.5), tables=tables)
    generator = torch.Generator().manual_seed(rank)
    for step in range(50):
        x = torch.randn(4, 64, generator=generator)
        if step < 4:
            with torch.no_grad():
                before = {
                    name: torch.zeros(64, 64)
                    if (r := state.reducer_states[name].residual) is None
                    else r.clone()
                    for name in tables
                }
            lone = torch.autograd.grad(
                ddp.module(x), [dict(ddp.module.named_parameters())[t] for t in tables]
            )
            wanted = {name: g + before[name] for name, g in zip(tables, lone, strict=True)}
        ddp.zero_grad()
        ddp(x).backward()
        if step < 4:
            for name in tables:
                kept = state.reducer_states[name].residual.clone()
                torch.distributed.all_reduce(wanted[name])
                torch.distributed.all_reduce(kept)
                out = dict(ddp.module.named_parameters())[name].grad
                assert same_everywhere(out)
                assert torch.allclose(wanted[name] / n, out + kept / n, atol=1e-6)  # H3
    assert set(state.reducer_states) == set(tables)
    assert [state.reducer_states[name].step for name in tables] == [50, 50]


@pytest.mark.parametrize("n", [2, 3])
def test_c13_rebuilt_buckets(n):
    run_ranks(n, c13)


def c14(rank, n):
    torch.manual_seed(0)
    lone = Words()
    start = {k: v.clone() for k, v in lone.state_dict().items()}
    data = [[list(batches(r, 6)) for r in range(n)]][0]
    optim = torch.optim.SGD(lone.parameters(), lr=0.1)
    for step in range(3):
        optim.zero_grad()
        for r in range(n):
            for micro in (2 * step, 2 * step + 1):
                (lone(data[r][micro]) / n).backward()
        optim.step()
    for sync_first in (False, True):
        for view in (False, True):
            for to_none in (False, True):
                model = Words()
                model.load_state_dict(start)
                ddp = DDP(model, gradient_as_bucket_view=view)
                state = commlib.ddp.register(ddp, "minimal" if sync_first else None)
                optim = torch.optim.SGD(ddp.parameters(), lr=0.1)
                for step in range(3):
                    optim.zero_grad(set_to_none=to_none)
                    with ddp.no_sync():
                        ddp(data[rank][2 * step]).backward()
                    ddp(data[rank][2 * step + 1]).backward()
                    optim.step()
                for mine, theirs in zip(ddp.parameters(), lone.parameters(), strict=True):
                    assert torch.allclose(mine, theirs, atol=1e-6)
                    assert same_everywhere(mine)
                assert all(s.announce for s in state.reducer_states.values())


@pytest.mark.parametrize("n", [2])
def test_c14_no_sync(n):
    run_ranks(n, c14)


class Explodes(Minimal):
    def exchange(self, rows, index, state, context, guard):
        result = yield from super().exchange(rows, index, state, context, guard)
        if context.rank == 0 and state.step == 1:
            raise ArithmeticError("the decoder is on fire")
        return result


def c15(rank, n):
    ddp = DDP(Words())
    commlib.ddp.register(ddp, Explodes(), timeout_s=25.0)
    train(ddp, rank, steps=4)


@pytest.mark.parametrize("n", [2, 3])
def test_c15_an_exception_in_decode_ends_every_rank(n):
    results = run_ranks(n, c15, may_fail=True)
    for rank, result in enumerate(results):
        assert isinstance(result, Died), rank
        assert "the decoder is on fire" in result.text
        assert "weight" in result.text
        assert result.seconds < 30


def c20(rank, n, reducer, first, last, saved):
    torch.manual_seed(4)
    ddp = DDP(Words())
    state = commlib.ddp.register(ddp, reducer)
    optim = torch.optim.Adam(ddp.parameters(), lr=0.01)
    if saved is not None:
        loaded = torch.load(io.BytesIO(saved[rank]), weights_only=True)
        ddp.module.load_state_dict(loaded["model"])
        optim.load_state_dict(loaded["optim"])
        state.load_state_dict(loaded["commlib"])
    for ids in list(batches(rank, 10))[first:last]:
        optim.zero_grad()
        ddp(ids).backward()
        optim.step()
    buffer = io.BytesIO()
    torch.save(
        {
            "model": ddp.module.state_dict(),
            "optim": optim.state_dict(),
            "commlib": state.state_dict(),
        },
        buffer,
    )
    return buffer.getvalue()


@pytest.mark.parametrize("reducer", [None, S2(ratio=0.3), "minimal"], ids=str)
def test_c20_five_and_five_are_ten(reducer):
    whole = run_ranks(2, c20, reducer, 0, 10, None)
    half = run_ranks(2, c20, reducer, 0, 5, None)
    rest = run_ranks(2, c20, reducer, 5, 10, half)
    for a, b in zip(whole, rest, strict=True):
        a, b = (torch.load(io.BytesIO(x), weights_only=True) for x in (a, b))
        for name in a["model"]:
            assert torch.equal(bits(a["model"][name]), bits(b["model"][name]))
        for name, entry in a["commlib"]["tables"].items():
            residual = b["commlib"]["tables"][name]["residual"]
            assert (entry["residual"] is None) == (residual is None)
            assert residual is None or torch.equal(entry["residual"], residual)


class Other(Words):
    def __init__(self):
        super().__init__()
        self.extra = nn.Embedding(3, D)


class Wider(Words):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(V + 1, D)


def c20_errors(rank, n, saved):
    loaded = torch.load(io.BytesIO(saved[min(rank, 1)]), weights_only=True)["commlib"]
    texts = []
    for build, reducer in (
        (Words, S2(ratio=0.3)),
        (Other, S2(ratio=0.3)),
        (Wider, S2(ratio=0.3)),
        (Words, "minimal"),
    ):
        state = commlib.ddp.register(DDP(build()), reducer)
        try:
            state.load_state_dict(loaded)
        except ValueError as error:
            texts.append(str(error))
        else:
            texts.append("no error")
        assert state.reducer_states["words.weight"].step == (5 if texts[-1] == "no error" else 0)
    return texts


def test_c20_another_layout_is_an_error():
    saved = run_ranks(2, c20, S2(ratio=0.3), 0, 5, None)
    fits, other, wider, reducer = run_ranks(2, c20_errors, saved)[0]
    assert fits == "no error"
    assert "lacks ['extra.weight']" in other
    assert "residual of 'words.weight' is (50, 6), the table (51, 6)" in wider
    assert "checkpoint's reducer" in reducer
    texts = run_ranks(3, c20_errors, saved)[0]
    assert all("checkpoint's num_ranks = 2, here it is 3" in text for text in texts)


def c21(rank, n):
    for reducer in EVERY[:-1]:
        table = nn.Embedding(3, 1, padding_idx=0, sparse=True)
        ddp = DDP(table)
        state = commlib.ddp.register(ddp, reducer)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.tensor([[0, 0], [1, 1]][rank][: 2 - rank])).sum().backward()
            assert table.weight.grad.to_dense().tolist() == [[0], [0.5], [0]], reducer
        assert state.reducer_states["weight"].announce


def test_c21_a_batch_of_padding_only():
    run_ranks(2, c21)


def c22(rank, n):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for mode, weights in (("sum", None), ("mean", None), ("sum", [1.0])):
            for empty in (False, True):
                bag = nn.EmbeddingBag(4, 2, mode=mode, sparse=True, dtype=dtype)
                with torch.no_grad():
                    bag.weight.zero_()
                ddp = DDP(bag)
                commlib.ddp.register(ddp, "minimal")
                optim = torch.optim.SGD(ddp.parameters(), lr=1.0)
                offsets = torch.tensor([0, 1] if empty else [0])
                own = None if weights is None else torch.tensor(weights, dtype=dtype)
                ddp(torch.tensor([rank]), offsets, own).sum().backward()
                optim.step()
                want = [[-0.5, -0.5]] * 2 + [[0, 0]] * 2
                assert bag.weight.tolist() == want, (dtype, mode, weights, empty)


def test_c22_embedding_bag():
    run_ranks(2, c22)


def c24(rank, n):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 4)

        def forward(self):
            return (
                self.table(torch.tensor([2, 2, 2])).sum() + self.table(torch.tensor([2, 4])).sum()
            )

    ddp = DDP(Two())
    state = commlib.ddp.register(ddp, "minimal")
    ddp().backward()
    assert ddp.module.table.weight.grad[:, 0].tolist() == [0, 0, 4, 0, 1, 0]
    (record,) = state.stats()
    slot = 24 + 1  # header, and the bitmap of 6 rows
    # two unique rows: one message each, in push or pull, and the guard row of the push
    assert record["bytes_sent"] + record["bytes_received"] == 2 * (slot + (2 + 1) * 4 * 4)
    assert record["density"] == pytest.approx(2 / 6)


def test_c24_two_lookups_of_one_table():
    run_ranks(2, c24)
