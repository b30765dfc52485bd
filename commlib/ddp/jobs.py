"""Turns a bucket into jobs: its tables on the data lane, what lies between on the dense lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from commlib import ops
from commlib.collectives.c10d import C10dTransport, Usage
from commlib.collectives.requests import AllReduce, Protocol
from commlib.ddp.announce import Announced
from commlib.ddp.buckets import DensePart, TablePart, sparse_result, split_bucket
from commlib.ddp.tables import Table
from commlib.errors import CommError
from commlib.reducers.base import Context, Reduced, ReducerState
from commlib.reducers.gradient import DenseGradient, Gradient, SparseGradient
from commlib.stats import Record, now_s
from commlib.topology.link import Workload

if TYPE_CHECKING:
    from commlib.ddp.state import State

T = TypeVar("T")
_WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_TableTask = tuple[Table, Gradient, "Future[Announced] | None"]


class Jobs:
    """Submits the parts of buckets to their lanes.

    Args:
        state: The hook's state.

    Source: ours.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._dense_steps: dict[int, int] = {}

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
        task = self._task(table, SparseGradient(buffer))

        def run() -> Tensor:
            rows = self._reduce_table(task).to_rows()
            return sparse_result(rows.indices, rows.values, shape)

        return self._state.lanes.data.submit(name, run)

    def _submit_dense(self, bucket: GradBucket) -> list[Future[None]]:
        """Tables of the bucket to their lane, stretches between them to the dense one."""
        lanes, index = self._state.lanes, bucket.index()
        futures = []
        for part in split_bucket(bucket, self._state.names, self._state.tables):
            if isinstance(part, TablePart):
                task = self._task(part.table, DenseGradient(part.matrix))
                futures.append(lanes.data.submit(part.table.name, self._table_job(task)))
            else:
                job = partial(self._reduce_dense, part, index)
                futures.append(lanes.dense.submit(f"bucket{index}", job))
        return futures

    def _table_job(self, task: _TableTask) -> Callable[[], None]:
        return lambda: _write_back(self._reduce_table(task), task[1].dense())

    def _task(self, table: Table, gradient: Gradient) -> _TableTask:
        announced = self._state.announcer.take(table.name, lambda: gradient.rows().indices)
        return table, gradient, announced

    def _reduce_table(self, task: _TableTask) -> Reduced:
        table, gradient, announced = task
        state, lane = self._state.reducer_states[table.name], self._state.lanes.data.transport
        usage, start = Usage(), now_s()
        known = None if announced is None else _result(announced, table.name, lane)
        waited = now_s() - start
        context = Context(
            name=table.name,
            rank=lane.rank,
            num_ranks=lane.num_ranks,
            link=self._state.link,
            index=None if known is None else known.index,
        )
        reduced = lane.run(self._state.options.reducer.protocol(gradient, state, context), usage)
        total = now_s() - start
        local_s = max(0.0, total - waited - usage.exchange_s - gradient.scan_s)
        self._state.recorder.add(
            _record(
                table,
                gradient,
                state,
                reduced,
                known,
                usage,
                lane.num_ranks,
                start,
                waited,
                local_s,
            )
        )
        state.step += 1
        return reduced

    def _reduce_dense(self, part: DensePart, index: int) -> None:
        state = self._state
        lane, watch = state.lanes.dense.transport, state.density
        watched = [
            (name, gradient)
            for name, gradient in zip(part.names, part.gradients, strict=True)
            if watch.watches(name)
        ]
        for name, gradient in watched:
            watch.measure(name, gradient)
        usage, start = Usage(), now_s()
        step = self._dense_steps.get(index, 0)
        self._dense_steps[index] = step + 1
        lane.run(self._dense_protocol(f"bucket{index}@{step}", part.flat), usage)
        state.recorder.add(
            Record(
                step=step,
                parameter=f"bucket{index}",
                reducer=state.options.dense or "dense",
                bytes_sent=usage.sent_bytes,
                bytes_received=usage.received_bytes,
                exchange_s=usage.exchange_s,
                decode_s=max(0.0, now_s() - start - usage.exchange_s),
                start_s=start,
            )
        )
        for name, _ in watched:
            table = lane.run(watch.decide(name))
            if table is not None:
                state.reducer_states.setdefault(name, ReducerState())
                state.tables[name] = table

    def _dense_protocol(self, name: str, flat: Tensor) -> Protocol[None]:
        wire = self._state.options.dense
        sent = flat if wire is None or flat.dtype.itemsize <= 2 else flat.to(_WIRES[wire])
        mean = yield AllReduce(name=name, tensor=sent, op="mean")
        if mean.data_ptr() != flat.data_ptr():
            flat.copy_(mean)


def _result(future: Future[Announced], table: str, lane: C10dTransport) -> Announced:
    """The index round's result; its own lane gives up first, and says better why."""
    try:
        return future.result(lane.timeout_s + 5.0)
    except TimeoutError:
        raise CommError(
            f"the index round has not ended within {lane.timeout_s + 5.0:g} s",
            rank=lane.rank,
            request=f"{table}.announce",
        ) from None


def _write_back(reduced: Reduced, matrix: Tensor) -> None:
    """Put the result into the bucket; rows outside the union are zero there already."""
    if reduced.rows is not None:
        ops.scatter_rows_(matrix, reduced.rows.indices, reduced.rows.values)
    elif reduced.dense is not None and reduced.dense.data_ptr() != matrix.data_ptr():
        matrix.copy_(reduced.dense)


def _record(
    table: Table,
    gradient: Gradient,
    state: ReducerState,
    reduced: Reduced,
    known: Announced | None,
    usage: Usage,
    num_ranks: int,
    start: float,
    waited: float,
    local_s: float,
) -> Record:
    num_rows = max(1, gradient.num_rows)
    rows = known.index.mean_rows if known is not None else float(reduced.local_rows)
    union = len(reduced.rows.indices) if reduced.rows is not None else state.union
    facts = Workload(
        num_ranks=num_ranks,
        num_rows=gradient.num_rows,
        dim=gradient.dim,
        element_bytes=gradient.dtype.itemsize,
        rows=max(0.0, rows),
        union=max(0, union),
    )
    seen = rows >= 0 and union >= 0
    extra = known.usage if known is not None else Usage()
    return Record(
        step=state.step,
        parameter=table.name,
        reducer=reduced.reducer,
        density=reduced.local_rows / num_rows if reduced.local_rows >= 0 else -1.0,
        union_density=union / num_rows if union >= 0 else -1.0,
        gamma=facts.gamma if seen else -1.0,
        bytes_sent=usage.sent_bytes + extra.sent_bytes,
        bytes_received=usage.received_bytes + extra.received_bytes,
        bound_bytes=facts.bound_bytes() if seen else -1.0,
        omega=reduced.omega,
        scan_s=gradient.scan_s,
        exchange_s=usage.exchange_s,
        decode_s=local_s,
        index_s=extra.exchange_s,
        wait_s=waited,
        start_s=start,
    )


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
