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

from commlib.collectives.requests import AllReduce, Protocol
from commlib.collectives.usage import Usage
from commlib.ddp.buckets import DensePart, TablePart, split_bucket
from commlib.frontend.results import sparse_result, write_back
from commlib.frontend.tables import Table
from commlib.reducers.base import ReducerState
from commlib.reducers.gradient import DenseGradient, SparseGradient
from commlib.stats import Record, now_s

if TYPE_CHECKING:
    from commlib.ddp.state import State

T = TypeVar("T")
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

        result = partial(sparse_result, shape=shape)
        return self._state.table_jobs.submit(table, SparseGradient(buffer), result)

    def _submit_dense(self, bucket: GradBucket) -> list[Future[None]]:
        """Tables of the bucket to their lane, stretches between them to the dense one."""
        index = bucket.index()
        futures = []
        for part in split_bucket(bucket, self._state.names, self._state.tables):
            if isinstance(part, TablePart):
                gradient = DenseGradient(part.matrix)
                put_back = partial(write_back, matrix=part.matrix)
                futures.append(self._state.table_jobs.submit(part.table, gradient, put_back))
            else:
                usage = Usage()
                futures.append(
                    self._state.lanes.dense.submit(
                        f"bucket{index}",
                        partial(self._dense, part, index, usage),
                        priority=self._state.table_jobs.priority(part.names[0]),
                        usage=usage,
                    )
                )
        return futures

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
