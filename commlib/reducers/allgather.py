"""allgather: every rank sends its coalesced rows to every other, and each sums for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from commlib import ops
from commlib.collectives.requests import AllToAll, Protocol
from commlib.reducers.base import Context, ReducerState, request_name
from commlib.reducers.guard import Guard
from commlib.reducers.index import Index
from commlib.reducers.indexed import IndexedReducer
from commlib.route import unite_rows
from commlib.rows import SparseRows, accumulate_dtype
from commlib.topology.link import Step, Workload


@dataclass(frozen=True, kw_only=True)
class AllGatherRows(IndexedReducer):
    """Coalesced rows to everyone; steps 2 (1 with announced ids), bytes (n-1) S D w and the index.

    Source: the sparse allreduce of Gloo and Horovod, with coalesced rows and known sizes.
    """

    name: ClassVar[str] = "allgather"

    def exchange(
        self, rows: SparseRows, index: Index, state: ReducerState, context: Context, guard: Guard
    ) -> Protocol[SparseRows | None]:
        rank, num_ranks, dtype = context.rank, context.num_ranks, rows.values.dtype
        counts = index.counts_tensor
        others = torch.full((num_ranks,), len(rows.indices), dtype=torch.int64)
        others[rank] = 0
        everything = torch.arange(len(rows.indices)).repeat(num_ranks - 1)
        expected = counts.clone()
        expected[rank] = 0
        arrived = yield AllToAll(
            name=request_name(context, state, "gather"),
            tensor=guard.pack(rows.values, everything, others, rank),
            send=guard.sizes(others, rank),
            recv=guard.sizes(expected, rank),
        )
        groups = guard.unpack(arrived, expected, rank)
        if guard.tripped:
            return None
        groups[rank] = rows.values
        union, position = unite_rows(index.indices, counts, rows.num_rows)
        total = torch.zeros(len(union), rows.dim, dtype=accumulate_dtype(dtype))
        targets = position.split(list(index.counts))
        for target, group in zip(targets, groups, strict=True):
            ops.scatter_add_rows_(total, target, group)
        return SparseRows(union, ops.scale_cast_rows(total, context.scale, dtype), rows.num_rows)

    def steps(self, workload: Workload) -> tuple[Step, ...]:
        n, sent = workload.num_ranks, workload.rows * workload.row_bytes
        index = (Step("exchange", workload.index_bytes),) if workload.index_bytes else ()
        return (
            Step("local", (n - 1) * sent),
            *index,
            Step("exchange", (n - 1) * sent),
            Step("local", n * sent + 2 * workload.union * workload.row_bytes),
        )
