"""Runs a torch optimizer on some of its parameters, or on some rows of one, instead of on all.

The optimizer's own code does the arithmetic, on the parameter itself or on a copy of its rows, so
a logical step taken in parts gives the bits of one taken at once. The step count advances once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

SUPPORTED = (SGD, Adagrad, Adam, AdamW, SparseAdam)
Group = dict[str, Any]


class Stepper:
    """Takes steps of one optimizer in parts.

    Args:
        optimizer: One of `SUPPORTED`, which treat each element by itself.

    Raises:
        ValueError: Another optimizer.

    Source: ours.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if type(optimizer) not in SUPPORTED:
            known = ", ".join(kind.__name__ for kind in SUPPORTED)
            raise ValueError(
                f"optimizer = {type(optimizer).__name__} cannot take a step in parts; there are"
                f" {known}. Leave the schedule out, or use one of these"
            )
        self.optimizer = optimizer
        self._step = _unhooked(type(optimizer).step)

    def settings(self) -> list[Group]:
        """The parameter groups as they are now: learning rates may change before they are used."""
        return [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in g.items()}
            for g in self.optimizer.param_groups
        ]

    def step(self, parameters: Sequence[Parameter], settings: Sequence[Group]) -> None:
        """One step of some parameters, with the gradients that they hold."""
        wanted = {id(parameter) for parameter in parameters}
        groups = [
            {**group, "params": [p for p in group["params"] if id(p) in wanted]}
            for group in settings
        ]
        self._run([group for group in groups if group["params"]])

    def rows(self, parameter: Parameter, settings: Sequence[Group]) -> RowStep:
        """One step of a table, to be taken in parts."""
        for group in settings:
            if any(other is parameter for other in group["params"]):
                return RowStep(self.optimizer, parameter, group, self._run)
        raise ValueError("a partitioned table is not among the optimizer's parameters")

    def moves_all_rows(self, parameter: Parameter, sparse: bool) -> bool:
        """Whether a step also moves rows whose gradient is zero."""
        for group in self.optimizer.param_groups:
            if any(other is parameter for other in group["params"]):
                momentum = isinstance(self.optimizer, SGD) and group["momentum"] != 0
                return not sparse or momentum
        return False

    def _run(self, groups: list[Group]) -> None:
        kept = self.optimizer.param_groups
        self.optimizer.param_groups = groups
        try:
            with torch.no_grad():
                self._step(self.optimizer)
        finally:
            self.optimizer.param_groups = kept


class RowStep:
    """One logical step of one table `[V, d]`, taken in parts that together cover all its rows.

    Each part is a set of rows and their gradient; the last one ends the step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameter: Parameter,
        group: Group,
        run: Callable[[list[Group]], None],
    ) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._group = group
        self._run = run
        state = dict(optimizer.state.get(parameter, {}))
        self._is_first = not state
        self._before = {
            key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value
            for key, value in state.items()
        }
        self._sparse: dict[str, list[Tensor]] = {}

    def part_of_rows(self, gradient: Tensor, mask: Tensor, last: bool) -> None:
        """The rows in `mask`, whose gradient is row-sparse.

        Args:
            gradient: COO `[V, d]` with rows in `mask` only.
            mask: bool `[V]`. Rows that a sparse optimizer state holds are parted by it.
            last: Nothing follows.
        """
        parameter, state = self._parameter, self._optimizer.state[self._parameter]
        if isinstance(self._optimizer, SGD):
            # Its momentum moves all rows it holds, so it is parted by rows too; a loaded one is
            # dense.
            self._before = {k: _as_rows(value) for k, value in self._before.items()}
        held = {k: v for k, v in self._before.items() if isinstance(v, Tensor) and v.is_sparse}
        for key in [key for key in state if key in self._sparse and key not in held]:
            del state[key]  # begun in an earlier part of this first step
        for key, value in self._before.items():
            if key in held:
                state[key] = _rows_in(value, mask)
            elif not isinstance(value, Tensor) or value.dim() == 0:
                state[key] = value.clone() if isinstance(value, Tensor) else value
        with holding(parameter, gradient):
            self._run([{**self._group, "params": [parameter]}])
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.is_sparse:
                self._sparse.setdefault(key, []).append(value)
                if last:
                    state[key] = _join(self._sparse[key])
            elif self._is_first and _is_scalar(value):
                # Where this is the first step, the next part starts from its beginning too.
                self._before.setdefault(key, _before_first(value))

    def part_dense(self, rows: Tensor, gradient: Tensor, last: bool) -> None:
        """Some rows of a table whose gradient is dense.

        Args:
            rows: int64 `[R]`.
            gradient: `[R, d]`.
            last: Nothing follows.
        """
        parameter, states = self._parameter, self._optimizer.state
        shape = parameter.shape
        copy = Parameter(parameter.detach().index_select(0, rows), requires_grad=True)
        copy.grad = gradient
        if not self._is_first:
            states[copy] = {
                key: value.index_select(0, rows)
                if isinstance(value, Tensor) and value.shape == shape
                else value.clone()
                if isinstance(value, Tensor)
                else value
                for key, value in self._before.items()
            }
        try:
            self._run([{**self._group, "params": [copy]}])
            after = states.pop(copy, {})
        finally:
            states.pop(copy, None)
        with torch.no_grad():
            parameter.index_copy_(0, rows, copy.detach())
            own = states[parameter]
            for key, value in after.items():
                if isinstance(value, Tensor) and value.shape == copy.shape:
                    if not isinstance(own.get(key), Tensor):
                        own[key] = torch.zeros_like(parameter)
                    own[key].index_copy_(0, rows, value)
                elif last:
                    own[key] = value


@contextmanager
def holding(parameter: Parameter, gradient: Tensor) -> Iterator[None]:
    """`parameter.grad` is `gradient` within; a newer one that it holds stays."""
    kept, parameter.grad = parameter.grad, gradient
    try:
        yield
    finally:
        parameter.grad = kept


def _unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step without the hooks around it, which belong to the logical step."""
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _before_first(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else type(value)()


def _as_rows(value: Any) -> Any:
    dense = isinstance(value, Tensor) and value.dim() == 2 and not value.is_sparse
    return value.to_sparse(1) if dense else value


def _rows_in(value: Tensor, mask: Tensor) -> Tensor:
    indices = value._indices()
    keep = mask[indices[0]]
    return torch.sparse_coo_tensor(
        indices[:, keep],
        value._values()[keep],
        value.shape,
        is_coalesced=value.is_coalesced(),
        check_invariants=False,
    )


def _join(parts: list[Tensor]) -> Tensor:
    """Tensors of disjoint rows as one, its rows sorted, as a sum of sorted gradients has them."""
    indices = torch.cat([part._indices() for part in parts], 1)
    values = torch.cat([part._values() for part in parts])
    order = indices[0].argsort(stable=True)
    return torch.sparse_coo_tensor(
        indices[:, order],
        values[order],
        parts[0].shape,
        is_coalesced=all(part.is_coalesced() for part in parts),
        check_invariants=False,
    )
