"""Turns a bucket into jobs: its tables on the data lane, what lies between on the dense lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from commlib import ops
from commlib.collectives.requests import AllReduce, Protocol
from commlib.collectives.usage import Usage
from commlib.ddp.announce import Announced
from commlib.ddp.buckets import DensePart, TablePart, sparse_result, split_bucket
from commlib.ddp.tables import Table
from commlib.reducers.base import Context, Reduced, ReducerState
from commlib.reducers.gradient import DenseGradient, Gradient, SparseGradient
from commlib.stats import Record, now_s
from commlib.topology.link import Workload

if TYPE_CHECKING:
    from commlib.ddp.state import State

T = TypeVar("T")
U = TypeVar("U")
_WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Jobs:
    """Submits the parts of buckets to their lanes.

    Args:
        state: The hook's state.

    Source: ours.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._dense_steps: dict[int, int] = {}
        self._order = {name: i for i, name in enumerate(state.names.values())}

    def submit(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue one bucket's reduction; returns at once."""
        buffer = bucket.buffer()
        if buffer.layout == torch.sparse_coo:
            return _torch_future([self._submit_sparse(bucket, buffer)], lambda parts: parts[0])
        return _torch_future(self._submit_dense(bucket), lambda _: buffer)

    def _submit_sparse(self, bucket: GradBucket, buffer: Tensor) -> Future[Tensor]:
        name = self._state.names[id(bucket.parameters()[0])]
        shape = buffer.shape
        table = self._state.tables.get(name) or Table(name, (shape[0], shape[1:].numel()))
        self._state.reducer_states.setdefault(name, ReducerState())

        def result(reduced: Reduced) -> Tensor:
            rows = reduced.to_rows()
            return sparse_result(rows.indices, rows.values, shape)

        return self._submit_table(table, SparseGradient(buffer), result)

    def _submit_dense(self, bucket: GradBucket) -> list[Future[None]]:
        """Tables of the bucket to their lane, stretches between them to the dense one."""
        index = bucket.index()
        futures = []
        for part in split_bucket(bucket, self._state.names, self._state.tables):
            if isinstance(part, TablePart):
                gradient = DenseGradient(part.matrix)
                write_back = partial(_write_back, matrix=part.matrix)
                futures.append(self._submit_table(part.table, gradient, write_back))
            else:
                usage = Usage()
                futures.append(
                    self._state.lanes.dense.submit(
                        f"bucket{index}",
                        partial(self._dense, part, index, usage),
                        priority=self._priority(part.names[0]),
                        usage=usage,
                    )
                )
        return futures

    def _priority(self, name: str) -> int:
        """What the next forward pass needs first goes first: parameters in order of definition."""
        return self._order[name]

    def _submit_table(
        self, table: Table, gradient: Gradient, result: Callable[[Reduced], T]
    ) -> Future[T]:
        """Queue a table's reduction once its index round, if there is one, has ended."""
        announced = self._state.announcer.take(table.name, lambda: gradient.rows().indices)
        ready_s, usage = now_s(), Usage()

        def submit(known: Announced | None) -> Future[T]:
            return self._state.lanes.data.submit(
                table.name,
                lambda: self._table(table, gradient, known, ready_s, usage, result),
                priority=self._priority(table.name),
                usage=usage,
            )

        return submit(None) if announced is None else _then(announced, submit)

    def _table(
        self,
        table: Table,
        gradient: Gradient,
        known: Announced | None,
        ready_s: float,
        usage: Usage,
        result: Callable[[Reduced], T],
    ) -> Protocol[T]:
        state, lane = self._state.reducer_states[table.name], self._state.lanes.data
        start = now_s()
        context = Context(
            name=table.name,
            rank=lane.rank,
            num_ranks=lane.num_ranks,
            link=self._state.link,
            index=None if known is None else known.index,
        )
        reduced = yield from self._state.options.reducer.protocol(gradient, state, context)
        answer = result(reduced)
        workload = _workload(gradient, state, reduced, known, lane.num_ranks)
        record = _record(table, gradient, state, reduced, known, usage, workload, ready_s, start)
        self._state.recorder.add(record)
        state.step += 1
        return answer

    def _dense(self, part: DensePart, index: int, usage: Usage) -> Protocol[None]:
        state = self._state
        watch = state.density
        watched = [
            (name, gradient)
            for name, gradient in zip(part.names, part.gradients, strict=True)
            if watch.watches(name)
        ]
        for name, gradient in watched:
            watch.measure(name, gradient)
        start = now_s()
        step = self._dense_steps.get(index, 0)
        self._dense_steps[index] = step + 1
        yield from self._reduce_dense(f"bucket{index}@{step}", part.flat)
        state.recorder.add(
            Record(
                step=step,
                parameter=f"bucket{index}",
                reducer=state.options.dense or "dense",
                bytes_sent=usage.sent_bytes,
                bytes_received=usage.received_bytes,
                exchange_s=usage.exchange_s,
                decode_s=usage.local_so_far_s(),
                start_s=start,
            )
        )
        for name, _ in watched:
            table = yield from watch.decide(name)
            if table is not None:
                state.reducer_states.setdefault(name, ReducerState())
                state.tables[name] = table

    def _reduce_dense(self, name: str, flat: Tensor) -> Protocol[None]:
        wire = self._state.options.dense
        sent = flat if wire is None or flat.dtype.itemsize <= 2 else flat.to(_WIRES[wire])
        mean = yield AllReduce(name=name, tensor=sent, op="mean")
        if mean.data_ptr() != flat.data_ptr():
            flat.copy_(mean)


def _write_back(reduced: Reduced, matrix: Tensor) -> None:
    """Put the result into the bucket; rows outside the union are zero there already."""
    if reduced.rows is not None:
        ops.scatter_rows_(matrix, reduced.rows.indices, reduced.rows.values)
    elif reduced.dense is not None and reduced.dense.data_ptr() != matrix.data_ptr():
        matrix.copy_(reduced.dense)


def _workload(
    gradient: Gradient,
    state: ReducerState,
    reduced: Reduced,
    known: Announced | None,
    num_ranks: int,
) -> Workload:
    rows = known.index.mean_rows if known is not None else float(reduced.local_rows)
    union = len(reduced.rows.indices) if reduced.rows is not None else state.union
    return Workload(
        num_ranks=num_ranks,
        num_rows=gradient.num_rows,
        dim=gradient.dim,
        element_bytes=gradient.dtype.itemsize,
        rows=rows,
        union=union,
    )


def _record(
    table: Table,
    gradient: Gradient,
    state: ReducerState,
    reduced: Reduced,
    known: Announced | None,
    usage: Usage,
    facts: Workload,
    ready_s: float,
    start_s: float,
) -> Record:
    num_rows = max(1, gradient.num_rows)
    seen = facts.rows >= 0 and facts.union >= 0
    extra = known.usage if known is not None else Usage()
    return Record(
        step=state.step,
        parameter=table.name,
        reducer=reduced.reducer,
        density=reduced.local_rows / num_rows if reduced.local_rows >= 0 else -1.0,
        union_density=facts.union / num_rows if facts.union >= 0 else -1.0,
        gamma=facts.gamma if seen else -1.0,
        bytes_sent=usage.sent_bytes + extra.sent_bytes,
        bytes_received=usage.received_bytes + extra.received_bytes,
        bound_bytes=facts.bound_bytes() if seen else -1.0,
        omega=reduced.omega,
        scan_s=gradient.scan_s,
        exchange_s=usage.exchange_s,
        decode_s=max(0.0, usage.local_so_far_s() - gradient.scan_s),
        index_s=extra.exchange_s,
        wait_s=start_s - ready_s,
        start_s=start_s,
    )


def _then(first: Future[U], submit: Callable[[U], Future[T]]) -> Future[T]:
    """What `submit` gives for the result of `first`; an error of either is the result's."""
    outer: Future[T] = Future()

    def pass_on(done: Future[T]) -> None:
        error = done.exception()
        if error is None:
            outer.set_result(done.result())
        else:
            outer.set_exception(error)

    def go_on(done: Future[U]) -> None:
        error = done.exception()
        if error is None:
            submit(done.result()).add_done_callback(pass_on)
        else:
            outer.set_exception(error)

    first.add_done_callback(go_on)
    return outer


def _torch_future(
    futures: Sequence[Future[T]], result: Callable[[list[T]], Tensor]
) -> torch.futures.Future[Tensor]:
    """One torch future of all parts, on which C++ sees an exception as one.

    `torch.futures.Future.set_exception` raises only where Python unwraps it; DDP waits in C++,
    where only what a `then` callback raises arrives as an error with its text.
    """
    carrier: torch.futures.Future[None] = torch.futures.Future()
    left = len(futures)
    lock = threading.Lock()

    def count(done: Future[T]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            carrier.set_result(None)

    ended: torch.futures.Future[Tensor] = carrier.then(
        lambda _: result([future.result() for future in futures])
    )
    for future in futures:
        future.add_done_callback(count)
    return ended
