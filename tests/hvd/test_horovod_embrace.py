"""Partitioned tables over Horovod: the weights that replicas under Horovod get."""

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from commlib import embrace
from commlib.horovod import broadcast_optimizer_state, broadcast_parameters
from tests.hvd.harness import run_horovod
from tests.hvd.models import Model, batches, build, ours, same_everywhere, theirs, weights

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.05)


def loop(model, optimizer, loader):
    for ids in loader:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(sparse, scheduled):
    torch.manual_seed(hvd.rank())  # rank 0's weights count
    model = Model(sparse)
    torch.manual_seed(0)
    if hvd.rank() == 0:
        model.load_state_dict(Model(sparse).state_dict())
    embrace.shard(model, transport="horovod", timeout_s=30.0)
    assert isinstance(model.words.weight, DTensor)
    optimizer = adagrad(model.parameters())
    broadcast_parameters(model.state_dict())
    if scheduled:
        loop(model, optimizer, embrace.schedule(batches(12), model, optimizer))
    else:
        optimizer = ours(optimizer, model.named_parameters())
        broadcast_optimizer_state(optimizer, model=model)
        optimizer.zero_grad()
        loop(model, optimizer, batches(12))
        assert not optimizer.commlib.layouts  # both tables are partitioned
    embrace.unshard(model)
    return weights(model)


def compare():
    off = {}
    for sparse in (True, False):
        model, optimizer = build(theirs, adagrad, sparse)
        loop(model, optimizer, batches(12))
        want = weights(model)
        for scheduled in (False, True):
            got = sharded(sparse, scheduled)
            assert same_everywhere(got)
            off[sparse, scheduled] = float((want - got).abs().max())
    return off


@pytest.mark.parametrize("n", [2, 3])
def test_partitioned_tables_over_horovod(n):
    for off in run_horovod(n, compare):
        assert len(off) == 4 and all(value <= 1e-6 for value in off.values()), off


def refusals():
    texts = []
    model = embrace.shard(Model(), transport="horovod")
    optimizer = ours(adagrad(model.parameters()), model.named_parameters())
    for call in (
        lambda: embrace.schedule([], model, optimizer),
        lambda: embrace.shard(Model(), transport="mpi"),
        lambda: embrace.shard(Model(), transport="horovod", group=torch.distributed.group.WORLD),
        lambda: embrace.shard(nn.Linear(2, 2), transport="horovod"),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        texts.append(str(raised.value))
    embrace.close(model)
    return texts


def test_refusals():
    for texts in run_horovod(2, refusals):
        reduces, unknown, group, nothing = texts
        assert "pass it the optimizer that DistributedOptimizer was made from" in reduces
        assert "transport = 'mpi'" in unknown and "leave group out" in group
        assert "no nn.Embedding" in nothing
