"""union: OR the ranks' bitmaps, then a dense allreduce of the rows in the union."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import (
    RING_BYTES,
    AllGather,
    AllReduce,
    AllToAll,
    Protocol,
    chunk_sizes,
)
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState, request_name
from commlib.reducers.gradient import Gradient
from commlib.rows import SparseRows
from commlib.topology.link import Step, Workload


@dataclass(frozen=True, kw_only=True)
class Union(Reducer):
    """Bitmap OR and compact allreduce; steps 4, bytes 2(n-1)/n (V/8 + U D w).

    Source: S2 Reducer's union baseline, with a packed bitmap.
    """

    name: ClassVar[str] = "union"

    def protocol(
        self, gradient: Gradient, state: ReducerState, context: Context
    ) -> Protocol[Reduced]:
        rows = gradient.rows()
        union = yield from union_rows(rows, state, context)
        values = torch.zeros(len(union), rows.dim, dtype=rows.values.dtype)
        ops.scatter_rows_(values, torch.searchsorted(union, rows.indices), rows.values)
        values = yield AllReduce(
            name=request_name(context, state, "values"),
            tensor=values,
            op="mean" if context.average else "sum",
        )
        state.union = len(union)
        return Reduced(
            self.name,
            rows=SparseRows(union, values, rows.num_rows),
            local_rows=len(rows.indices),
        )

    def steps(self, workload: Workload) -> tuple[Step, ...]:
        values = workload.union * workload.row_bytes
        return (
            Step("local", (workload.rows + workload.union) * workload.row_bytes),
            *all_reduce_steps(workload.bitmap_bytes, workload.num_ranks),
            *all_reduce_steps(values, workload.num_ranks, workload.element_bytes),
            Step("local", workload.union * workload.row_bytes),
        )


def union_rows(rows: SparseRows, state: ReducerState, context: Context) -> Protocol[Tensor]:
    """The sorted ids that are in any rank's rows: bitmaps to their owners, OR, and back to all."""
    n, name = context.num_ranks, request_name(context, state, "bitmap")
    bitmap = ops.indices_to_bitmap(rows.indices, rows.num_rows)
    chunks = chunk_sizes(len(bitmap), n)
    mine = chunks[context.rank]
    arrived = yield AllToAll(name=f"{name}.scatter", tensor=bitmap, send=chunks, recv=(mine,) * n)
    own = ops.bitmap_or(arrived.view(n, mine))
    bitmap = yield AllGather(name=f"{name}.gather", tensor=own, sizes=chunks)
    return ops.bitmap_to_indices(bitmap, rows.num_rows)


def all_reduce_steps(num_bytes: float, num_ranks: int, element_bytes: int = 1) -> Sequence[Step]:
    """An allreduce of `num_bytes`: two exchanges and the sum between, or a ring where it is large.

    `element_bytes` tells whether a ring can sum it: 4 and 8 do, halves and bitmaps do not.
    """
    half = num_bytes * (num_ranks - 1) / num_ranks
    if element_bytes >= 4 and num_bytes >= RING_BYTES:
        return (Step("ring", 2 * half),)
    return (Step("exchange", half), Step("local", 2 * num_bytes), Step("exchange", half))
