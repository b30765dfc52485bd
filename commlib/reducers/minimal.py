"""minimal (ours): an exact sparse allreduce that meets the lower bound on bytes.

    index    who holds which row (announced in the forward pass, or an index round)
    push     rows that several ranks hold go to their owners, who are holders themselves
    spread   at the same time, rows that one rank holds go from it to everyone
    sum      in fp32 for half types, in rank order behind the owner's own row
    pull     owners send the sums to everyone, while what was spread still arrives

No sizes and no ids travel after the index: owners follow from it on every rank alike. Where one
rank holds far more than its share, part of its rows is pushed to idle ranks and pulled from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from commlib import ops
from commlib.collectives.requests import AllGather, AllToAll, Later, Protocol
from commlib.reducers.base import Context, ReducerState, request_name
from commlib.reducers.guard import Guard
from commlib.reducers.index import Index
from commlib.reducers.indexed import IndexedReducer
from commlib.route import minimal_route
from commlib.rows import SparseRows, accumulate_dtype
from commlib.topology.link import Step, Workload


@dataclass(frozen=True, kw_only=True)
class Minimal(IndexedReducer):
    """Owner among holders; steps 3 (2 with announced ids).

    Bytes w D (S + U (n-2)/n) and the index: the lower bound.

    Source: ours; docs/algorithms.md derives the bound and the assignment.
    """

    name: ClassVar[str] = "minimal"

    def exchange(
        self, rows: SparseRows, index: Index, state: ReducerState, context: Context, guard: Guard
    ) -> Protocol[SparseRows | None]:
        dtype, rank = rows.values.dtype, context.rank
        route = minimal_route(index.indices, index.counts_tensor, rows.num_rows, rank)
        pushing = yield Later(
            AllToAll(
                name=request_name(context, state, "push"),
                tensor=guard.pack(rows.values, route.push_src, route.push_send, rank),
                send=guard.sizes(route.push_send, rank),
                recv=guard.sizes(route.push_recv, rank),
            )
        )
        alone = ops.gather_rows(rows.values, route.spread_src)
        spreading = yield Later(
            AllGather(
                name=request_name(context, state, "spread"),
                tensor=ops.scale_cast_rows(alone, context.scale, dtype),
                sizes=tuple(route.spread_counts.tolist()),
            )
        )
        total = torch.zeros(len(route.owned), rows.dim, dtype=accumulate_dtype(dtype))
        ops.scatter_add_rows_(total, route.own_dst, ops.gather_rows(rows.values, route.own_src))
        groups = guard.unpack((yield pushing), route.push_recv, rank)
        if guard.tripped:
            yield spreading
            return None
        targets = route.push_dst.split(route.push_recv.tolist())
        for target, group in zip(targets, groups, strict=True):
            ops.scatter_add_rows_(total, target, group)
        sums = ops.scale_cast_rows(total, context.scale, dtype)

        pulling = yield Later(
            AllToAll(
                name=request_name(context, state, "pull"),
                tensor=ops.gather_rows(sums, route.pull_src),
                send=tuple(route.pull_send.tolist()),
                recv=tuple(route.pull_recv.tolist()),
            )
        )
        values = rows.values.new_empty(len(route.union), rows.dim)
        ops.scatter_rows_(values, route.owned, sums)
        if len(route.kept_src):
            # As the relay computes it, so that the bits agree (0 + -0.0 is +0.0).
            kept = torch.zeros(len(route.kept_src), rows.dim, dtype=total.dtype)
            kept += ops.gather_rows(rows.values, route.kept_src)
            kept = ops.scale_cast_rows(kept, context.scale, dtype)
            ops.scatter_rows_(values, route.kept_dst, kept)
        ops.scatter_rows_(values, route.spread_dst, (yield spreading))
        ops.scatter_rows_(values, route.pull_dst, (yield pulling))
        return SparseRows(route.union, values, rows.num_rows)

    def steps(self, workload: Workload) -> tuple[Step, ...]:
        n, row = workload.num_ranks, workload.row_bytes
        owned = workload.union / n
        push = (workload.rows - owned) * row if n > 1 else 0.0
        pull = (n - 1) * owned * row
        index = (Step("exchange", workload.index_bytes),) if workload.index_bytes else ()
        return (
            Step("local", 2 * workload.rows * row),
            *index,
            Step("exchange", push),
            Step("local", workload.rows * row),
            Step("exchange", pull),
            Step("local", (owned * (n - 1) + workload.union) * row),
        )
