"""Horovod's own optimizer, with the way tables are reduced replaced.

Everything else stays Horovod's: hooks, counting of backward passes, dense allreduces with fusion,
groups and compression, `step`, `skip_synchronize`, `zero_grad` and their errors. All private names
of Horovod 0.28.1 that commlib uses are in this file.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

import horovod.torch as hvd
from horovod.torch import mpi_ops
from torch import Tensor

from commlib.embrace.columns import columns_of
from commlib.horovod.state import State

_POLL_S = 0.0003


def is_elastic() -> bool:
    """Whether workers come and go."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def epoch() -> object:
    """Stands for this initialisation of Horovod; another one after `hvd.shutdown`, `hvd.init`."""
    return mpi_ops._handle_map


def parameter_names(optimizer: Any) -> dict[Any, str]:
    """Horovod's names of an optimizer's parameters."""
    names: dict[Any, str] = optimizer._parameter_names
    return names


class _Nothing:
    """The handle of a parameter that Horovod must not touch, or not yet."""

    def __call__(self) -> None:
        raise AssertionError("never waited for")


_SHARD, _LATER = _Nothing(), _Nothing()


class _Reduction:
    """The handle of a table under way."""

    def __init__(self, future: Future[Tensor]) -> None:
        self.future = future

    def __call__(self) -> None:
        raise AssertionError("never waited for by Horovod")


class Adapter:
    """Takes tables out of Horovod's hands.

    Args:
        optimizer: What `hvd.DistributedOptimizer` gave; its methods are replaced.
        state: Reduces tables.

    In the first step, and in the first after Horovod was initialised anew, everything waits for
    `synchronize`, where all ranks agree on what the tables are. From then on each gradient is
    submitted as soon as it is there.

    Source: ours.
    """

    def __init__(self, optimizer: Any, state: State) -> None:
        self._optimizer = optimizer
        self._state = state
        self._names = parameter_names(optimizer)
        self._ordered = sorted(optimizer._requires_update, key=lambda p: self._names[p])
        self._shards = {p for p in self._ordered if columns_of(p) is not None}
        self._tables: list[Any] = []
        self._ours = set(self._shards)
        self._epoch: object = None
        self._announced = False
        self._allreduce = optimizer._allreduce_grad_async
        self._grouped = optimizer._grouped_allreduce_grad_async
        self._synchronize = optimizer.synchronize
        optimizer._allreduce_grad_async = self.allreduce
        optimizer._grouped_allreduce_grad_async = self.grouped_allreduce
        optimizer.synchronize = self.synchronize

    def open(self) -> None:
        """Open the state on the ranks of now; collective."""
        self._state.open()
        self._epoch = epoch()
        if self._state.settled:
            self._set_tables()

    def allreduce(self, parameter: Any) -> tuple[Any, Any]:
        """Stands for `_allreduce_grad_async`."""
        if parameter in self._shards:
            return _SHARD, None
        if not self._ready():
            return _LATER, None
        if not self._announced:
            self._announced = True
            self._state.announce()
        name = self._names[parameter]
        if name in self._state.layouts:
            return _Reduction(self._state.submit(name)), None
        handle: tuple[Any, Any] = self._allreduce(parameter)
        return handle

    def grouped_allreduce(self, parameters: tuple[Any, ...]) -> tuple[Any, Any]:
        """Stands for `_grouped_allreduce_grad_async`."""
        if not self._ready():
            return _LATER, None
        if parameters[0] in self._ours:  # a group of its own
            return self.allreduce(parameters[0])
        if not self._announced:
            self._announced = True
            self._state.announce()
        handle: tuple[Any, Any] = self._grouped(parameters)
        return handle

    def synchronize(self) -> None:
        """Stands for `synchronize`: waits until every gradient is reduced."""
        optimizer = self._optimizer
        if not optimizer.process_set.included():
            self._synchronize()
            return
        if self._epoch is not epoch():
            self.open()
        # Without their ids nothing is announced: each table's gradient tells its rows itself.
        self._announced |= self._state.settle(self._sparse())
        self._set_tables()
        self._launch()
        tables = {p: self._take(p) for p in self._tables}
        for parameter in self._shards:
            self._take(parameter)
        self._wait_politely()
        self._synchronize()
        for parameter, reduction in tables.items():
            parameter.grad = self._state.wait(reduction.future, self._names[parameter])
        for parameter in (*self._tables, *self._shards):
            optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
        self._announced = False

    def _ready(self) -> bool:
        return self._state.settled and self._epoch is epoch()

    def _sparse(self) -> set[str]:
        return {
            self._names[p]
            for p in self._ordered
            if p not in self._shards and p.grad is not None and p.grad.is_sparse
        }

    def _set_tables(self) -> None:
        """Leave to Horovod what are no tables, and give each table a group of its own."""
        tables = [p for p in self._ordered if self._names[p] in self._state.layouts]
        if len(tables) == len(self._tables) > 0:
            return
        self._tables = tables
        ours = self._ours = {*tables, *self._shards}
        optimizer = self._optimizer
        optimizer._requires_update -= ours
        if optimizer._groups is not None:
            groups = dict.fromkeys(optimizer._p_to_group.values())
            split = [tuple(p for p in group if p not in ours) for group in groups]
            alone = [(p,) for p in ours]
            optimizer._p_to_group = {p: group for group in (*split, *alone) for p in group}
            optimizer._group_counts = {group: 0 for group in (*split, *alone) if group}
            for key in [key for key in optimizer._handles if isinstance(key, tuple)]:
                if key not in optimizer._group_counts:
                    del optimizer._handles[key]

    def _launch(self) -> None:
        """Submit what no hook has submitted, in the order of names."""
        handles = self._optimizer._handles
        for key in [key for key, (handle, _) in handles.items() if handle in (None, _LATER)]:
            del handles[key]
        under_way: set[Any] = set()
        for key in handles:
            under_way.update(key if isinstance(key, tuple) else (key,))
        for parameter in self._ordered:
            if parameter not in under_way:
                handles[parameter] = self.allreduce(parameter)

    def _take(self, parameter: Any) -> Any:
        handles = self._optimizer._handles
        handle, _ = handles.pop(parameter, None) or handles.pop((parameter,))
        return handle

    def _wait_politely(self) -> None:
        """Horovod's own wait keeps a core busy, which other ranks of a host may need."""
        deadline = time.monotonic() + self._state.options.timeout_s
        for key, (handle, _) in self._optimizer._handles.items():
            while isinstance(handle, int) and not hvd.poll(handle):
                if time.monotonic() > deadline:
                    first = key[0] if isinstance(key, tuple) else key
                    raise self._state.late(self._names[first])
                time.sleep(_POLL_S)
