"""The same weights as Horovod's own optimizer gives, for all that both can do."""

import horovod.torch as hvd
import pytest
import torch

import commlib
from tests.hvd.harness import run_horovod
from tests.hvd.models import (
    Model,
    Split,
    batches,
    build,
    ours,
    same_everywhere,
    theirs,
    weights,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

# Adam divides a gradient by its size: where ranks almost cancel, the last bit of fp32 decides.
OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), True, torch.float32),
    "sgd-dense": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False, torch.float32),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01), False, torch.float64),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05), True, torch.float64),
}


def train(model, optimizer, passes=1, steps=20):
    ids = iter(batches(steps * passes))
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            model(next(ids)).backward()
        optimizer.step()
    return weights(model)


def split(make):
    torch.manual_seed(0)
    model = Model().double()
    return train(model, Split(model, make))


def twenty_steps():
    worst = {}
    for name, (optimizer, sparse, dtype) in OPTIMIZERS.items():
        want = train(*build(theirs, optimizer, sparse, dtype))
        got = train(*build(ours, optimizer, sparse, dtype))
        assert same_everywhere(got), name
        worst[name] = float((want - got).abs().max())
    worst["sparse-adam"] = float((split(theirs) - split(ours)).abs().max())
    return worst


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_twenty_steps_equal_horovods(n):
    for worst in run_horovod(n, twenty_steps):
        assert len(worst) == 5 and all(0 <= off <= 1e-6 for off in worst.values()), worst


VARIANTS = {
    "sum": {"op": hvd.Sum},
    "passes": {"backward_passes_per_step": 3},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "groups-passes": {"groups": 2, "backward_passes_per_step": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "sparse-as-dense": {"sparse_as_dense": True},
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def variants():
    worst = {}
    for name, options in VARIANTS.items():
        passes = options.get("backward_passes_per_step", 1)
        # Horovod itself neither groups nor compresses where there are sparse gradients.
        sparse = not options.keys() & {"groups", "compression"}
        want = train(*build(theirs, sgd, sparse, **options), passes=passes, steps=6)
        model, optimizer = build(ours, sgd, sparse, **options)
        got = train(model, optimizer, passes=passes, steps=6)
        assert same_everywhere(got), name
        # Rows do not pass through fp16, so tables are closer to the truth than Horovod's.
        worst[name] = float((want - got).abs().max()), set(optimizer.commlib.layouts)
    return worst


def test_every_option_means_what_it_means_to_horovod():
    for worst in run_horovod(2, variants):
        for name, (off, tables) in worst.items():
            assert off <= (1e-3 if name == "fp16" else 1e-6), (name, off)
            assert ("words.weight" in tables) == (name != "sparse-as-dense"), name
            assert "kinds.weight" in tables


def reducers():
    """Every exact reducer, groups with sparse gradients, and S2 close by."""
    want = train(*build(theirs, sgd))
    off = {}
    for reducer in ("minimal", "union", "balanced", "allgather", "dense"):
        model, optimizer = build(ours, sgd, reducer=reducer)
        off[reducer] = float((want - train(model, optimizer)).abs().max())
        names = {record["reducer"] for record in optimizer.commlib.stats()}
        assert names == {reducer}, names
        assert all(state.announce for state in optimizer.commlib.reducer_states.values())
    model, optimizer = build(ours, sgd, groups=2)
    off["groups with sparse gradients"] = float((want - train(model, optimizer)).abs().max())
    model, optimizer = build(ours, sgd, reducer=commlib.S2(ratio=0.5))
    got = train(model, optimizer)
    assert same_everywhere(got)
    assert {record["reducer"] for record in optimizer.commlib.stats()} == {"sketch"}
    assert all(state.announce for state in optimizer.commlib.reducer_states.values())
    return off, float((want - got).norm() / want.norm())


def test_every_reducer_runs_over_horovod():
    for off, far in run_horovod(3, reducers):
        assert all(value <= 1e-6 for value in off.values()), off
        assert 0 < far < 0.1, far
