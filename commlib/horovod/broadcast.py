"""Horovod's broadcasts, for models some of whose tables are partitioned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch
from torch.distributed.tensor import DTensor

from commlib.embrace.columns import columns_of


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """As `hvd.broadcast_parameters`; partitioned tables, which are no replicas, are left out.

    Args:
        params: A dict such as `model.state_dict()`, or a list such as
            `list(model.named_parameters())`.
        root_rank: Whose values all get.

    Source: Horovod's.
    """
    if isinstance(params, dict):
        params = {name: value for name, value in params.items() if not _is_shard(value)}
    elif isinstance(params, list):
        params = [p for p in params if not _is_shard(p[1] if isinstance(p, tuple) else p)]
    hvd.broadcast_parameters(params, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """As `hvd.broadcast_optimizer_state`; the state of partitioned tables is left out.

    Horovod makes a state where there is none by a step with gradients of zero, which weight decay
    turns into a change of the weights; here weights and gradients stay as they are.

    Args:
        optimizer: Wrapped or not.
        root_rank: Whose state all get.
        model: Tells which gradients are sparse.

    Source: Horovod's.
    """
    with _without_shards(optimizer), _weights_kept(optimizer):
        hvd.broadcast_optimizer_state(optimizer, root_rank, model)


def _is_shard(value: object) -> bool:
    return isinstance(value, DTensor) or (
        isinstance(value, torch.Tensor) and columns_of(value) is not None
    )


@contextmanager
def _weights_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    if optimizer.state:
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p, p.grad, p.detach().clone()) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, gradient, weight in kept:
                parameter.copy_(weight)
                parameter.grad = gradient


@contextmanager
def _without_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    groups = [list(group["params"]) for group in optimizer.param_groups]
    states = {p: optimizer.state.pop(p) for p in list(optimizer.state) if _is_shard(p)}
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not _is_shard(p)]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        optimizer.state.update(states)
