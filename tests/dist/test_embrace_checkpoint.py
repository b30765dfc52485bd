"""Checkpoints of partitioned tables, from any number of ranks to any other."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

from commlib import embrace
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.dist

V, D = 20, 10


def build(sparse, seed):
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {"words": nn.Embedding(V, D, sparse=sparse), "narrow": nn.Embedding(V, 2, sparse=sparse)}
    )


OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "sparse_momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "sparse_adam": lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.1),
}


def train(model, optimizer, rank, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        ids = torch.randint(V, (6,), generator=generator)
        (model["words"](ids).square().sum() + model["narrow"](ids).square().sum()).backward()
        optimizer.step()


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def contents(model, optimizer):
    """Weights and optimizer state as whole tensors, by name."""
    found = {f"model.{name}": whole(value) for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for key, state in optimizer.state_dict()["state"].items():
        found |= {f"{names[key]}.{what}": whole(value) for what, value in state.items()}
    return {name: torch.as_tensor(value).clone() for name, value in found.items()}


def save(rank, n, folder, name):
    model = embrace.shard(build(name.startswith("sparse"), seed=0), timeout_s=30)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, rank)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    weight = state["model"]["words.weight"]
    assert isinstance(weight, DTensor) and weight.placements == (Shard(1),)
    assert weight.shape == (V, D)
    assert weight.to_local().data_ptr() == model["words"].local_weight.data_ptr()
    dcp.save(state, checkpoint_id=folder)
    return contents(model, optimizer)


def load(rank, n, folder, name):
    model = embrace.shard(build(name.startswith("sparse"), seed=9), timeout_s=30)
    optimizer = embrace.attach(OPTIMIZERS[name](model))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = contents(model, optimizer)
    train(model, optimizer, rank, steps=1)  # and it goes on
    return loaded


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_four_ranks_save_any_number_loads(name, tmp_path):
    saved = run_ranks(4, save, str(tmp_path), name)[0]
    assert any("." in key and not key.startswith("model.") for key in saved)
    for n in (1, 2, 3):
        for loaded in run_ranks(n, load, str(tmp_path), name):
            assert loaded.keys() == saved.keys()
            for key, value in saved.items():
                assert torch.equal(loaded[key], value), key


def by_hand(rank, n):
    """state_dict and load_state_dict without torch.distributed.checkpoint."""
    for name, build_optimizer in OPTIMIZERS.items():
        sparse = name.startswith("sparse")
        model = embrace.shard(build(sparse, seed=0), timeout_s=30)
        optimizer = build_optimizer(model)
        train(model, optimizer, rank)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        before = contents(model, optimizer)
        train(model, optimizer, rank, steps=2, seed=5)
        after = contents(model, optimizer)

        other = embrace.shard(build(sparse, seed=4), timeout_s=30)
        resumed = embrace.attach(build_optimizer(other))
        file = io.BytesIO()
        torch.save({"weights": weights, "state": state}, file)  # a file a rank: DTensors
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        other.load_state_dict(saved["weights"])
        resumed.load_state_dict(saved["state"])
        assert not isinstance(next(iter(resumed.state.values())).get("exp_avg"), DTensor)
        again = contents(other, resumed)
        assert all(torch.equal(again[key], value) for key, value in before.items())
        train(other, resumed, rank, steps=2, seed=5)
        again = contents(other, resumed)
        assert all(torch.equal(again[key], value) for key, value in after.items())
        embrace.close(model)
        embrace.close(other)


def unsharded_files(rank, n):
    """A checkpoint of the ordinary model, weights and Adam's state, into a partitioned one."""
    plain = build(False, seed=2)
    adam = torch.optim.Adam(plain.parameters())
    train(plain, adam, rank=0)
    file = io.BytesIO()
    torch.save({"model": plain.state_dict(), "adam": adam.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = embrace.shard(build(False, seed=3), timeout_s=30)
    optimizer = embrace.attach(torch.optim.Adam(model.parameters()))
    ddp = DDP(nn.ModuleDict({"m": model, "l": nn.Linear(2, 2)}))
    assert "m.words.weight" in ddp.parameters_to_ignore
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["adam"])
    got, expected = contents(model, optimizer), contents(plain, adam)
    assert all(torch.equal(got[key], value) for key, value in expected.items())
    embrace.unshard(model)  # and back
    for key, value in saved["model"].items():
        assert torch.equal(model.state_dict()[key], value)


def mistakes(rank, n):
    model = embrace.shard(build(False, seed=2), timeout_s=30)
    state = model.state_dict()
    state["words.weight"] = torch.zeros(V + 1, D)
    with pytest.raises(
        RuntimeError, match=r"words.weight has shape \(21, 10\).*whole table \(20, 10\)"
    ):
        model.load_state_dict(state)
    del state["words.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    own = model["words"].local_weight.detach().clone()
    model["words"].load_state_dict({"weight": own + 1})  # the own columns, as they are
    assert torch.equal(model["words"].local_weight, own + 1)
    model["words"].load_state_dict({"weight": own}, assign=True)
    assert "columns" in repr(model["words"]) and model["words"].weight.shape == (V, D)
    kept = model.state_dict(keep_vars=True)["words.weight"]
    assert kept.requires_grad and kept.shape == (V, D)

    adafactor = embrace.attach(torch.optim.Adafactor(model["words"].parameters(), lr=0.1))
    train(model, adafactor, rank, steps=1)
    with pytest.raises(ValueError, match="elements one by one"):
        adafactor.state_dict()


@pytest.mark.parametrize("body", [by_hand, unsharded_files, mistakes])
def test_by_hand(body):
    run_ranks(3, body)
