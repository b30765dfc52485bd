"""What scripts written for Horovod rely on: calls, warnings, errors, public failures."""

import time
import warnings

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import commlib
from commlib.collectives.requests import AllReduce, ask
from commlib.horovod import DistributedOptimizer
from commlib.reducers import Context, ReducerState, as_reducer
from commlib.reducers.gradient import SparseGradient
from commlib.schedule.horovod import HorovodPeers
from tests.hvd.harness import HASH_SEEDS, run_horovod
from tests.hvd.models import LINK, Model, batches, build, ours, same_everywhere, weights

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


class Row(nn.Module):
    """One table whose gradient is what is passed in."""

    def __init__(self, sparse=True):
        super().__init__()
        self.table = nn.Embedding(1, 2, sparse=sparse)
        nn.init.zeros_(self.table.weight)

    def forward(self, gradient):
        return (self.table(torch.zeros(1, dtype=torch.int64)) * gradient).sum()


def clip():
    """C29: synchronise, clip, step; each parameter is reduced once."""
    stepped = {}
    for sparse in (True, False):
        model = Row(sparse)
        optimizer = ours(sgd(model.parameters()), model.named_parameters())
        for _ in range(2):  # the first step finds the table, the second submits in the hook
            nn.init.zeros_(model.table.weight)
            optimizer.zero_grad()
            model(torch.tensor([[3.0, 0.0], [0.0, 4.0]])[hvd.rank()]).backward()
            optimizer.synchronize()
            grad = model.table.weight.grad
            dense = grad.to_dense() if sparse else grad
            assert torch.equal(dense, torch.tensor([[1.5, 2.0]])), dense
            norm = dense.norm()
            grad.div_(norm) if sparse else grad.mul_(1.0 / norm)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert len(optimizer.commlib.stats()) == 2
        stepped[sparse] = (-model.table.weight.detach()).tolist()
    return stepped


def warns():
    """As Horovod: a second synchronisation by `step` is warned of, and changes nothing."""
    model, optimizer = build(ours, sgd)
    for _ in range(2):
        optimizer.zero_grad()
        model(batches(1)[0]).backward()
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert any("skip_synchronize" in str(w.message) for w in caught)
    return same_everywhere(weights(model))


def asserts():
    """As Horovod: gradients thrown away, or computed too often, before a step."""
    model, optimizer = build(ours, sgd)
    for _ in range(2):
        model(batches(1)[0]).backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    model(batches(1)[0]).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        model(batches(1)[0]).backward()
    optimizer.step()
    return True


def refuses():
    """Arguments: Horovod's errors, and ours, on every rank."""
    model = Model()
    named = list(model.named_parameters())
    texts = []
    for make in (
        lambda: ours(sgd(model.parameters()), [(n, p) for n, p in named[:-1]]),
        lambda: ours(sgd(model.parameters()), [("x", p) for _, p in named]),
        lambda: ours(sgd(model.parameters()), named, backward_passes_per_step=0),
        lambda: ours(sgd(model.parameters()), named, op=hvd.Adasum),
        lambda: ours(sgd(model.parameters()), named, op=hvd.Sum, gradient_predivide_factor=2.0),
        lambda: ours(torch.optim.SparseAdam([model.words.weight]), named[:1], sparse_as_dense=True),
        lambda: ours(sgd(model.parameters()), named, reducer="nonsense"),
        lambda: ours(sgd(model.parameters()), named, reducer=("union", "minimal")[hvd.rank()]),
    ):
        with pytest.raises((ValueError, TypeError)) as raised:
            make()
        texts.append(str(raised.value))
    if hvd.rank():
        model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError) as raised:
        ours(sgd(model.parameters()), model.named_parameters())
    return [*texts, str(raised.value)]


def missing():
    """C28: parameters that no backward pass reached, on one rank or on all, in any hash order."""
    model, optimizer = build(ours, sgd)
    for step, ids in enumerate(batches(4)):
        optimizer.zero_grad()
        if step % 2 or hvd.rank():
            model(ids).backward()
        optimizer.step()
    assert same_everywhere(weights(model))
    optimizer.zero_grad()
    optimizer.step()  # nobody has a gradient
    return same_everywhere(weights(model)), hash("words.weight")


def empty_batch():
    model, optimizer = build(ours, sgd)
    for ids in batches(3):
        optimizer.zero_grad()
        model(ids[:0] if hvd.rank() else ids).nan_to_num().backward()
        optimizer.step()
    return same_everywhere(weights(model).nan_to_num())


def scaled():
    """GradScaler, as Horovod's guide has it; an overflow on one rank skips the step on all."""
    model, optimizer = build(ours, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    kept = []
    for step, ids in enumerate(batches(4)):
        before = weights(model)
        optimizer.zero_grad()
        loss = model(ids) * (float("inf") if step == 2 and hvd.rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        kept.append(torch.equal(before, weights(model)))
    return kept, same_everywhere(weights(model))


def saved():
    """S2: residuals are saved and loaded; a resumed run takes the same steps."""

    def start():
        return build(ours, sgd, reducer=commlib.S2(ratio=0.3))

    model, optimizer = start()
    ids = batches(6)
    for step in range(3):
        optimizer.zero_grad()
        model(ids[step]).backward()
        optimizer.step()
    again, resumed = start()
    again.load_state_dict(model.state_dict())
    resumed.commlib.load_state_dict(optimizer.commlib.state_dict())
    for step in range(3, 6):
        for m, o in ((model, optimizer), (again, resumed)):
            o.zero_grad()
            m(ids[step]).backward()
            o.step()
    return torch.equal(weights(model), weights(again)), same_everywhere(weights(model))


def everything():
    return {
        check.__name__: check()
        for check in (clip, warns, asserts, refuses, missing, empty_batch, scaled, saved)
    }


def test_scripts_written_for_horovod():
    hashes = set()
    for got in run_horovod(2, everything, env={HASH_SEEDS: "1"}):
        for stepped in got["clip"].values():
            assert stepped == [pytest.approx([0.6, 0.8])]
        assert got["warns"] and got["asserts"] and got["empty_batch"]
        unnamed, twice, passes, adasum, divide, dense, reducer, unlike, unequal = got["refuses"]
        assert "not named" in unnamed and "Duplicates: x" in twice.replace(
            "duplicates", "Duplicates"
        )
        assert "backward_passes_per_step must be > 0" in passes
        assert "hvd.Average or hvd.Sum" in adasum and "gradient_predivide_factor" in divide
        assert "SparseAdam takes sparse gradients only" in dense
        assert "nonsense" in reducer
        assert "reducer must be the same on every rank" in unlike
        assert "'extra.weight'" in unequal and "absent" in unequal
        same, seed = got["missing"]
        hashes.add(seed)
        assert same
        assert got["scaled"] == ([False, False, True, False], True)
        assert got["saved"] == (True, True)
    assert len(hashes) == 2  # each rank had an order of its own


def in_flight():
    """C27: four sparse tensors at once, waited for in both orders, 200 rounds."""
    lane = HorovodPeers().open_lane("test", 30.0)
    reducer, states = as_reducer("minimal"), [ReducerState() for _ in range(4)]
    generator = torch.Generator().manual_seed(hvd.rank())
    for turn in range(200):
        gradients, futures = [], []
        for which in range(4):
            ids = torch.randint(50, (5,), generator=generator)
            values = torch.randint(-8, 9, (5, 3), generator=generator).float()
            gradients.append(torch.sparse_coo_tensor(ids[None], values, (50, 3)).coalesce())
            context = Context(
                name=f"t{which}", rank=lane.rank, num_ranks=lane.num_ranks, average=False
            )

            def make(which=which, context=context, gradient=gradients[-1]):
                return reducer.protocol(SparseGradient(gradient), states[which], context)

            futures.append(lane.submit(f"t{which}", make))
        for which in range(4) if turn % 2 else reversed(range(4)):
            rows = futures[which].result(30).to_rows()
            states[which].step += 1
            if turn % 20 == 0:
                want = hvd.allreduce(gradients[which].to_dense(), op=hvd.Sum, name=f"want{which}")
                got = torch.zeros(50, 3)
                got[rows.indices] = rows.values
                assert torch.equal(got, want)
    lane.close()
    return True


@pytest.mark.parametrize("threshold", [None, "0"])
def test_four_sparse_tensors_in_flight(threshold):
    env = {} if threshold is None else {"HOROVOD_FUSION_THRESHOLD": threshold}
    assert all(run_horovod(2, in_flight, env=env))


def late():
    """Rank 1 does not take its second step in time."""
    model = Model()
    optimizer = DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), link=LINK, timeout_s=2.0
    )
    for ids in batches(2):
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
    if hvd.rank() == 1:
        time.sleep(8)
        return ""
    model(batches(1)[0]).backward()
    try:
        optimizer.synchronize()
    except commlib.CommError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_named():
    text, _ = run_horovod(2, late)
    assert "rank 1 is gone or stuck" in text and "within 2 s" in text and "in request" in text


DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def process_set():
    """Ranks 0 and 2 train together; rank 1 is not asked."""
    pair = hvd.add_process_set([0, 2])
    model, optimizer = build(ours, sgd, process_set=pair)
    for ids in batches(4):
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
    together = hvd.allgather(weights(model)[None], name="test.sets")
    return [torch.equal(together[0], row) for row in together], len(optimizer.commlib.stats())


def test_process_sets():
    for rank, (equal, num_records) in enumerate(run_horovod(3, process_set, env=DYNAMIC)):
        assert equal == [True, False, True]
        assert num_records == (0 if rank == 1 else 8)


def lane_errors():
    lane = HorovodPeers().open_lane("test", 20.0)
    ones = torch.ones(4)

    def work():
        yield AllReduce(name="x", tensor=ones.clone())
        if hvd.rank() == 1:
            raise ZeroDivisionError("decoding went wrong")
        yield AllReduce(name="y", tensor=ones.clone())

    future = lane.submit("table", work)
    try:
        future.result(30)
    except (ZeroDivisionError, commlib.CommError) as error:
        text = f"{type(error).__name__}: {error}"
    with pytest.raises(commlib.CommError):
        lane.submit("later", lambda: ask(AllReduce(name="l", tensor=ones))).result(20)
    return text


def test_an_exception_on_one_rank_ends_the_others():
    other, own = run_horovod(2, lane_errors)
    assert own.startswith("ZeroDivisionError")
    assert "rank 1 failed" in other and "decoding went wrong" in other
