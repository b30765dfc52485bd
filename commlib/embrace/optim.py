"""Optimizer state of partitioned tables in checkpoints: DTensors out, own columns in.

Optimizers hold plain tensors beside plain parameters. Only their `state_dict` speaks DTensor, by
hooks that an optimizer gets at its first step, or by `attach`.
"""

from __future__ import annotations

import weakref
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commlib.embrace.columns import Columns, columns_of

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

_attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_watching = False


def attach(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Let an optimizer's `state_dict` give DTensors for partitioned tables, and take them.

    An optimizer gets this by itself at its first step, which
    `torch.distributed.checkpoint.state_dict` makes where there is no state yet. Call it where a
    checkpoint is loaded or saved before: by hand, or for Adagrad, which has state from the start.

    Args:
        optimizer: Any that treats elements one by one (SGD, Adagrad, Adam, SparseAdam, ...).

    Returns:
        The optimizer.
    """
    if optimizer not in _attached:
        _attached.add(optimizer)
        optimizer.register_state_dict_post_hook(_give_dtensors)
        optimizer.register_load_state_dict_pre_hook(_take_columns)
    return optimizer


def watch_optimizers() -> None:
    """From now on, attach every optimizer of a partitioned table at its first step."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _attached and any(columns_of(p) for p in _parameters(optimizer)):
        attach(optimizer)
    if isinstance(optimizer, SparseAdam):
        for parameter in _parameters(optimizer):
            if columns_of(parameter) is not None:
                _no_rows_instead_of_zeros(parameter)


def _no_rows_instead_of_zeros(parameter: Tensor) -> None:
    """Dense zeros as a gradient without rows.

    torch.distributed.checkpoint makes an optimizer's state by a step on dense zeros, which
    SparseAdam refuses.
    """
    gradient = parameter.grad
    if gradient is not None and not gradient.is_sparse and not gradient.any():
        none = torch.empty(1, 0, dtype=torch.int64)
        values = gradient.new_empty(0, gradient.shape[1])
        parameter.grad = torch.sparse_coo_tensor(
            none, values, gradient.shape, is_coalesced=True, check_invariants=False
        )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _shards(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[Any, Columns]:
    """Columns by the parameter's key in a state dict whose groups are given."""
    keys = chain.from_iterable(group["params"] for group in groups)
    pairs = zip(keys, _parameters(optimizer), strict=False)
    return {key: columns for key, own in pairs if (columns := columns_of(own)) is not None}


def _give_dtensors(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = dict(state_dict["state"])
    for key, columns in _shards(optimizer, state_dict["param_groups"]).items():
        if key in state:
            state[key] = {
                what: _wrap(value, columns, f"{type(optimizer).__name__}'s '{what}'")
                for what, value in state[key].items()
            }
    return {**state_dict, "state": state}


def _wrap(value: Any, columns: Columns, what: str) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if tuple(value.shape) != columns.local_shape:
        raise ValueError(
            f"{what} of a partitioned table has shape {tuple(value.shape)}, not that of its columns"
            f" {columns.local_shape}, so it depends on how the table is cut: use an optimizer that"
            " treats elements one by one"
        )
    return columns.wrap(value.to_dense() if value.is_sparse else value)


def _take_columns(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = dict(state_dict["state"])
    for key, columns in _shards(optimizer, state_dict["param_groups"]).items():
        if key in state:
            state[key] = {
                what: columns.unwrap(value, f"optimizer state '{what}'")
                if isinstance(value, Tensor) and value.dim() > 0
                else value
                for what, value in state[key].items()
            }
    return {**state_dict, "state": state}
