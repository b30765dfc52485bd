"""What Horovod's own tests of its optimizer check, on models that have tables as well.

Horovod's source distribution comes without its tests, so they cannot be run from there; each check
here is named as the test whose question it asks.
"""

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from commlib.horovod import broadcast_optimizer_state, broadcast_parameters
from tests.hvd.harness import run_horovod
from tests.hvd.models import Model, batches, ours, same_everywhere, weights

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam")


def make(name, parameters, lr=0.05, **options):
    return getattr(torch.optim, name)(parameters, lr=lr, **options)


def take_step(model, optimizer, ids):
    optimizer.zero_grad()
    model(ids).backward()
    optimizer.step()


def values(optimizer):
    """All tensors of an optimizer's state, flat."""
    parts = [
        v.detach().double().reshape(-1)
        for state in optimizer.state.values()
        for v in state.values()
        if torch.is_tensor(v)
    ]
    return torch.cat([torch.zeros(1, dtype=torch.float64), *parts])


def broadcast_state():
    """A state that only rank 0 has reaches all; training goes on alike."""
    for name in OPTIMIZERS:
        torch.manual_seed(hvd.rank())
        model = Model(sparse=False)
        optimizer = make(name, model.parameters())
        if hvd.rank() == 0:
            for ids in batches(2):
                take_step(model, optimizer, ids)
        optimizer = ours(optimizer, model.named_parameters())
        broadcast_parameters(model.state_dict())
        broadcast_optimizer_state(optimizer, model=model)
        assert same_everywhere(values(optimizer)), name
        take_step(model, optimizer, batches(1)[0])
        assert same_everywhere(weights(model)), name
        optimizer.commlib.close()
    return True


def broadcast_state_options():
    torch.manual_seed(0)
    model = Model(sparse=False)
    options = ({"lr": 0.1, "momentum": 0.8}, {"lr": 0.2, "momentum": 0.9})[hvd.rank() > 0]
    optimizer = ours(make("SGD", model.parameters(), **options), model.named_parameters())
    take_step(model, optimizer, batches(1)[0])
    broadcast_optimizer_state(optimizer, model=model)
    group = optimizer.param_groups[0]
    take_step(model, optimizer, batches(2)[1])
    return group["lr"], group["momentum"]


def broadcast_state_no_grad():
    model = Model(sparse=False)
    model.frozen = nn.Parameter(torch.tensor([1, 3]), requires_grad=False)
    optimizer = ours(make("SGD", model.parameters(), momentum=0.9), model.named_parameters())
    broadcast_parameters(model.state_dict())
    broadcast_optimizer_state(optimizer, model=model)
    take_step(model, optimizer, batches(1)[0])
    return model.frozen.grad is None and same_everywhere(weights(model))


class TwoWays(nn.Module):
    """Each output has a table of its own."""

    def __init__(self, sparse):
        super().__init__()
        self.first = nn.Embedding(40, 4, sparse=sparse)
        self.second = nn.Embedding(40, 4, sparse=sparse)
        self.out = nn.Linear(4, 1)

    def forward(self, ids):
        one = self.out(self.first(ids))
        return one.pow(2).mean(), self.out(self.second(ids)).pow(2).mean()


def force_allreduce():
    """Ranks reach different parameters; every gradient is reduced all the same."""
    for sparse in (True, False):
        torch.manual_seed(0)
        model = TwoWays(sparse)
        optimizer = ours(make("SGD", model.parameters()), model.named_parameters())
        before = weights(model)
        for ids in batches(3):
            optimizer.zero_grad()
            model(ids % 40)[hvd.rank() % 2].backward()
            optimizer.step()
        assert same_everywhere(weights(model))
        moved = (weights(model) != before).view(-1)
        assert bool(moved[:160].any()) and bool(moved[160:320].any())
    return True


def dynamic_requires_grad():
    """Two optimizers by turns, as in a GAN, each with the other's parameters switched off."""
    torch.manual_seed(0)
    gen, disc = nn.Embedding(30, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = {
        gen: ours(make("SGD", gen.parameters()), gen.named_parameters()),
        disc: ours(make("SGD", disc.parameters()), disc.named_parameters()),
    }
    for ids in batches(6):
        for trained in (gen, disc):
            for module, optimizer in optimizers.items():
                module.requires_grad_(module is trained)
                optimizer.zero_grad()
            disc(gen(ids % 30)).pow(2).sum().backward()
            for module in (gen, disc):
                for p in module.parameters():
                    assert (module is trained) == (p.grad is not None and bool(p.grad.any()))
            optimizers[trained].step()
    return same_everywhere(torch.cat([weights(gen), weights(disc)]))


def gradient_clipping():
    model = Model(sparse=False)
    broadcast_parameters(model.state_dict())
    optimizer = ours(make("SGD", model.parameters()), model.named_parameters())
    for ids in batches(3):
        optimizer.zero_grad()
        (1000 * model(ids)).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        left = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()
        assert abs(float(left) - 0.1) < 1e-4
        with optimizer.skip_synchronize():
            optimizer.step()
    return same_everywhere(weights(model))


def state_before_wrapping():
    """What an optimizer had before it was wrapped is not lost."""
    torch.manual_seed(0)
    model = Model()
    optimizer = make("Adagrad", model.parameters(), initial_accumulator_value=0.5)
    wrapped = ours(optimizer, model.named_parameters())
    return bool((wrapped.state[model.words.weight]["sum"] == 0.5).all())


def no_named_parameters():
    torch.manual_seed(0)
    model = Model()
    optimizer = ours(make("SGD", model.parameters()), None)
    for ids in batches(3):
        take_step(model, optimizer, ids)
    tables = sorted(optimizer.commlib.layouts)
    return tables, same_everywhere(weights(model))


def passes_changed():
    """`set_backward_passes_per_step` between steps."""
    torch.manual_seed(0)
    model = Model()
    optimizer = ours(make("SGD", model.parameters()), model.named_parameters())
    ids = iter(batches(8))
    take_step(model, optimizer, next(ids))
    optimizer.set_backward_passes_per_step(2)
    for _ in range(3):
        optimizer.zero_grad()
        model(next(ids)).backward()
        model(next(ids)).backward()
        optimizer.step()
    return same_everywhere(weights(model))


def everything():
    return {
        check.__name__: check()
        for check in (
            broadcast_state,
            broadcast_state_options,
            broadcast_state_no_grad,
            force_allreduce,
            dynamic_requires_grad,
            gradient_clipping,
            state_before_wrapping,
            no_named_parameters,
            passes_changed,
        )
    }


def test_what_horovods_tests_of_the_optimizer_check():
    for got in run_horovod(2, everything):
        assert got.pop("broadcast_state_options") == (0.1, 0.8)
        tables, same = got.pop("no_named_parameters")
        assert tables == ["allreduce.noname.0.0", "allreduce.noname.0.1"] and same
        assert all(got.values()), got
