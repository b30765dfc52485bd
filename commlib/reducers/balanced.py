"""balanced: rows go to owners computed from the row id alone, and sums come back.

    claim   each rank tells each owner which of its rows it has: a bitmap over the owner's share
    push    the rows; the owner's own bitmap of what it will give travels at the same time
    pull    the sums

Every size is known before it is needed: the bitmaps have a fixed length and tell the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import AllGather, AllToAll, Protocol
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState, request_name
from commlib.reducers.gradient import Gradient
from commlib.rows import SparseRows, accumulate_dtype
from commlib.topology.link import Step, Workload


@dataclass(frozen=True, kw_only=True)
class Balanced(Reducer):
    """Push to balanced owners, sum, pull; steps 3, bytes (n-1)/n (S D w + U D w + V/4).

    Source: Zen (OSDI 2025); the owner function, without a table, is ours.
    """

    name: ClassVar[str] = "balanced"

    def protocol(
        self, gradient: Gradient, state: ReducerState, context: Context
    ) -> Protocol[Reduced]:
        rows, n = gradient.rows(), context.num_ranks
        share = -(-rows.num_rows // n)  # rows of one owner, at most
        segment = (share + 7) // 8
        owner, within = ops.balanced_owner(rows.indices, n)
        counts = torch.bincount(owner, minlength=n)
        order = torch.argsort(owner, stable=True)  # rows ascend within an owner
        claims = _bitmaps(within[order], counts, share)
        claimed = yield AllToAll(
            name=request_name(context, state, "claim"),
            tensor=claims,
            send=(segment,) * n,
            recv=(segment,) * n,
        )
        claimed = claimed.view(n, segment)
        sources = [ops.bitmap_to_indices(part, share) for part in claimed]
        given = ops.bitmap_or(claimed)
        owned = ops.bitmap_to_indices(given, share)

        arrived, offers = yield (
            AllToAll(
                name=request_name(context, state, "push"),
                tensor=ops.gather_rows(rows.values, order),
                send=tuple(counts.tolist()),
                recv=tuple(len(source) for source in sources),
            ),
            AllGather(
                name=request_name(context, state, "offer"), tensor=given, sizes=(segment,) * n
            ),
        )
        total = torch.zeros(len(owned), rows.dim, dtype=accumulate_dtype(rows.values.dtype))
        groups = arrived.split([len(source) for source in sources])
        for source, group in zip(sources, groups, strict=True):
            ops.scatter_add_rows_(total, torch.searchsorted(owned, source), group)
        sums = ops.scale_cast_rows(total, context.scale, rows.values.dtype)

        offered = [ops.bitmap_to_indices(part, share) for part in offers.view(n, segment)]
        pulled = yield AllGather(
            name=request_name(context, state, "pull"),
            tensor=sums,
            sizes=tuple(len(part) for part in offered),
        )
        union = torch.cat(
            [
                ops.balanced_row(torch.full_like(part, peer), part, n)
                for peer, part in enumerate(offered)
            ]
        )
        union, place = torch.sort(union)
        state.union = len(union)
        return Reduced(
            self.name,
            rows=SparseRows(union, ops.gather_rows(pulled, place), rows.num_rows),
            local_rows=len(rows.indices),
        )

    def steps(self, workload: Workload) -> tuple[Step, ...]:
        n, row = workload.num_ranks, workload.row_bytes
        segment = (-(-workload.num_rows // n) + 7) // 8
        own_rows = workload.rows / n if workload.own_rows is None else workload.own_rows
        return (
            Step("exchange", (n - 1) * segment),
            Step("local", 2 * workload.rows * row),
            Step("exchange", (workload.rows - own_rows) * row + (n - 1) * segment),
            Step("local", 2 * workload.rows * row),
            Step("exchange", (n - 1) * workload.union / n * row),
            Step("local", 2 * workload.union * row),
        )


def _bitmaps(within: Tensor, counts: Tensor, share: int) -> Tensor:
    """One packed bitmap an owner, over its share, one behind the other."""
    parts = within.split(counts.tolist())
    return torch.cat([ops.indices_to_bitmap(part, share) for part in parts])
