"""Sums of coded rows, such that every rank knows its own share of what comes out.

Each rank's rows are coded once, summed wide by one rank, coded again and given to all. The rank
that sums takes what the second coding lost as its own, so over the ranks the shares add up to the
result: what error feedback needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import AllGather, AllToAll, Later, Protocol, chunk_sizes
from commlib.reducers.base import Context
from commlib.reducers.guard import Guard
from commlib.reducers.wire import Wire
from commlib.route import Route


@dataclass(frozen=True, slots=True)
class CodedSum:
    """Result of a coded sum over rows `[B, D]`, wide.

    Args:
        total: The scaled sum, the same bits on every rank.
        share: This rank's part of it; over the ranks they add up to `total`.
    """

    total: Tensor
    share: Tensor


def sum_all_rows(name: str, rows: Tensor, wire: Wire, context: Context) -> Protocol[CodedSum]:
    """Sum rows that every rank has; rank r sums the r-th chunk of them.

    Steps 2, bytes 2(n-1)/n B times the coded row.
    """
    n, rank, dim = context.num_ranks, context.rank, rows.shape[1]
    chunks = chunk_sizes(len(rows), n)
    mine = chunks[rank]
    coded = wire.encode(rows)
    arrived = yield AllToAll(name=f"{name}.scatter", tensor=coded, send=chunks, recv=(mine,) * n)
    parts = wire.decode(arrived, dim, rows.dtype).view(n, mine, dim)
    sums = parts[0].clone()
    for part in parts[1:]:
        sums += part
    sums *= context.scale
    given = wire.encode(sums)
    gathered = yield AllGather(name=f"{name}.gather", tensor=given, sizes=chunks)
    total = wire.decode(gathered, dim, rows.dtype)
    share = wire.decode(coded, dim, rows.dtype) * context.scale
    start = sum(chunks[:rank])
    share[start : start + mine] += total[start : start + mine] - sums
    return CodedSum(total, share)


def sum_routed_rows(
    name: str,
    rows: Tensor,
    place: Tensor,
    route: Route,
    wire: Wire,
    context: Context,
    guard: Guard,
) -> Protocol[CodedSum | None]:
    """Sum rows that each rank has some of, along the route of `minimal`; None if the guard trips.

    Args:
        name: Agreed name; the requests are `name.push` and `name.pull`.
        rows: `[R, D]` this rank's rows, wide.
        place: `[R]` where they stand in the union.
        route: Of the union `[B]`; the result has a row for each of it.
        wire: Format of the rows.
        context: Rank, ranks and scale.
        guard: Of the announcement that the route rests on.

    Steps 2, bytes (S + B (n-2)/n) times the coded row, on average.
    """
    rank, dim, dtype = context.rank, rows.shape[1], rows.dtype
    coded = wire.encode(rows)
    pushing = yield Later(
        AllToAll(
            name=f"{name}.push",
            tensor=guard.pack(coded, route.push_src, route.push_send, rank),
            send=guard.sizes(route.push_send, rank),
            recv=guard.sizes(route.push_recv, rank),
        )
    )
    alone = ops.gather_rows(rows, route.spread_src)
    spreading = yield Later(
        AllGather(
            name=f"{name}.spread",
            tensor=wire.encode(ops.scale_cast_rows(alone, context.scale, dtype)),
            sizes=tuple(route.spread_counts.tolist()),
        )
    )
    seen = wire.decode(coded, dim, dtype)
    sums = torch.zeros(len(route.owned), dim, dtype=dtype)
    ops.scatter_add_rows_(sums, route.own_dst, ops.gather_rows(seen, route.own_src))
    groups = guard.unpack((yield pushing), route.push_recv, rank)
    if guard.tripped:
        yield spreading
        return None
    targets = route.push_dst.split(route.push_recv.tolist())
    for target, group in zip(targets, groups, strict=True):
        ops.scatter_add_rows_(sums, target, wire.decode(group.contiguous(), dim, dtype))
    sums = ops.scale_cast_rows(sums, context.scale, dtype)
    given = wire.encode(sums)
    pulling = yield Later(
        AllToAll(
            name=f"{name}.pull",
            tensor=ops.gather_rows(given, route.pull_src),
            send=tuple(route.pull_send.tolist()),
            recv=tuple(route.pull_recv.tolist()),
        )
    )
    total = torch.empty(len(route.union), dim, dtype=dtype)
    own_total = wire.decode(given, dim, dtype)
    ops.scatter_rows_(total, route.owned, own_total)
    if len(route.kept_src):
        # A relay's sum of this rank's row alone, computed as the relay does.
        kept = torch.zeros(len(route.kept_src), dim, dtype=dtype)
        kept += ops.gather_rows(seen, route.kept_src)
        again = wire.encode(ops.scale_cast_rows(kept, context.scale, dtype))
        ops.scatter_rows_(total, route.kept_dst, wire.decode(again, dim, dtype))
    ops.scatter_rows_(total, route.spread_dst, wire.decode((yield spreading), dim, dtype))
    ops.scatter_rows_(total, route.pull_dst, wire.decode((yield pulling), dim, dtype))
    share = torch.zeros_like(total)
    ops.scatter_add_rows_(share, place, seen, context.scale)
    ops.scatter_add_rows_(share, route.owned, own_total - sums)
    spread = place.index_select(0, route.spread_src)  # coded once, after scaling: all of it is ours
    ops.scatter_rows_(share, spread, ops.gather_rows(total, spread))
    return CodedSum(total, share)
