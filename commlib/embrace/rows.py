"""The two exchanges of column-wise tables: rows to those who look them up, gradients back.

    fetch    rank r sends to rank p its columns of the rows that p asked for: one all-to-all
    return   rank p sends to rank r the gradient of its rows in r's columns: one all-to-all

Everybody knows everybody's rows beforehand (an index), so no sizes and no ids travel. Each is for
a list of tables, and for any rows of them: what goes to one rank lies one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import AllToAll, Protocol, T
from commlib.embrace.columns import side_by_side
from commlib.embrace.parts import Part, Stack, stack_parts
from commlib.route import unite_rows
from commlib.rows import SparseRows, accumulate_dtype

__all__ = ["Part", "fetch_bytes", "fetch_rows", "return_bytes", "return_rows"]


def fetch_rows(
    name: str, parts: Sequence[Part], rank: int, num_ranks: int
) -> Protocol[list[Tensor]]:
    """The rows of each part that this rank asked for, all columns: `[R_me, D]` of weight's dtype.

    Own columns are rounded to the wire's dtype like those of others, so that a row does not depend
    on who holds it. One rank asks nothing. Results of several parts may share memory.

    Steps 1, bytes of rank r: sum over p != r of R_p d_r w; 2(n-1)/n S D w together with the return.

    Source: EmbRace, AlltoAll for column-wise embeddings.
    """
    stacks = stack_parts(parts)
    held = [stack.gather() for stack in stacks]
    if num_ranks == 1:
        whole = held
    else:
        ranks = range(num_ranks)
        arrived = yield from _exchange(
            name,
            [rows.view(-1) for rows in held],
            [[stack.size(rank, p) for p in ranks] for stack in stacks],
            [[stack.size(p, rank) for p in ranks] for stack in stacks],
        )
        whole = [
            side_by_side(flat, stack.counts[rank], stack.widths)
            for stack, flat in zip(stacks, arrived, strict=True)
        ]
    rows = [
        stack.apart(together.to(stack.dtype), rank)
        for stack, together in zip(stacks, whole, strict=True)
    ]
    return _in_order(stacks, rows)


def return_rows(
    name: str,
    parts: Sequence[Part],
    gradients: Sequence[Tensor],
    scale: float,
    rank: int,
    num_ranks: int,
) -> Protocol[list[SparseRows]]:
    """Each part's gradient in the own columns, over the union of all ranks' rows.

    Args:
        name: Agreed name of the request.
        parts: What was fetched.
        gradients: `[R_me, D]` of each part, this rank's own; left as they are.
        scale: Factor of the sum over ranks: 1/n for the mean.
        rank: This rank.
        num_ranks: n.

    Returns:
        For each part the rows `[U, d_me]` of weight's dtype: summed in rank order, in fp32 for
        half types, scaled, rounded once. A row with an element that is not finite is sent as NaN
        throughout, so that every rank sees the overflow that a loss scaler looks for.

    Steps 1, bytes of rank r: sum over p != r of R_r d_p w.

    Source: EmbRace, AlltoAll of output gradients; the order of sums and the NaN rule are ours.
    """
    stacks = stack_parts(parts)
    given = [_overflow_everywhere(stack.joined(gradients)) for stack in stacks]
    if num_ranks > 1:
        ranks = range(num_ranks)
        arrived = yield from _exchange(
            name,
            [
                torch.cat([block.reshape(-1) for block in own.split(list(stack.widths), 1)])
                for stack, own in zip(stacks, given, strict=True)
            ],
            [[stack.size(p, rank) for p in ranks] for stack in stacks],
            [[stack.size(rank, p) for p in ranks] for stack in stacks],
        )
        given = [
            flat.view(sum(stack.counts), stack.widths[rank])
            for stack, flat in zip(stacks, arrived, strict=True)
        ]
    sums = [_sum(stack, rows, scale) for stack, rows in zip(stacks, given, strict=True)]
    return _in_order(stacks, sums)


def fetch_bytes(parts: Sequence[Part], rank: int) -> int:
    """Bytes that `rank` sends in `fetch_rows`; equal to what `LocalTransport` counts."""
    return sum(
        (sum(part.counts) - part.counts[rank]) * part.widths[rank] * part.wire_dtype.itemsize
        for part in parts
    )


def return_bytes(parts: Sequence[Part], rank: int) -> int:
    """Bytes that `rank` sends in `return_rows`; equal to what `LocalTransport` counts."""
    return sum(
        part.counts[rank] * (sum(part.widths) - part.widths[rank]) * part.wire_dtype.itemsize
        for part in parts
    )


def _sum(stack: Stack, rows: Tensor, scale: float) -> list[SparseRows]:
    """The rows of all ranks, in rank order, summed into the union, table by table."""
    union, position = unite_rows(
        stack.indices, torch.tensor(stack.counts, dtype=torch.int64), stack.num_rows
    )
    total = torch.zeros(len(union), rows.shape[1], dtype=accumulate_dtype(stack.dtype))
    if total.dtype == torch.float64:
        rows = rows.to(total.dtype)
    ops.scatter_add_rows_(total, position, rows)
    return stack.sums_apart(union, ops.scale_cast_rows(total, scale, stack.dtype))


def _overflow_everywhere(gradient: Tensor) -> Tensor:
    """`gradient`, but NaN in all columns of rows that are not finite in one."""
    if gradient.numel() == 0:
        return gradient
    low, high = torch.aminmax(gradient)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return gradient
    finite = torch.isfinite(gradient).all(1, keepdim=True)
    return torch.where(finite, gradient, torch.nan)


def _exchange(
    name: str,
    sending: Sequence[Tensor],
    sent: Sequence[Sequence[int]],
    received: Sequence[Sequence[int]],
) -> Protocol[list[Tensor]]:
    """One all-to-all of flat tensors, one a stack, each by rank; as bytes where dtypes differ.

    Args:
        name: Agreed name of the request.
        sending: What each stack sends.
        sent: Elements of it that go to each rank.
        received: Elements that come from each rank.

    Returns:
        For each stack what came, flat, by rank.
    """
    if len(sending) == 1:
        flat = yield AllToAll(
            name=name, tensor=sending[0], send=tuple(sent[0]), recv=tuple(received[0])
        )
        return [flat]
    widths = [own.element_size() for own in sending]
    send = [[size * w for size in sizes] for sizes, w in zip(sent, widths, strict=True)]
    recv = [[size * w for size in sizes] for sizes, w in zip(received, widths, strict=True)]
    outgoing = [
        own.view(torch.uint8).split(sizes) for own, sizes in zip(sending, send, strict=True)
    ]
    flat = yield AllToAll(
        name=name,
        tensor=torch.cat([piece for rank in zip(*outgoing, strict=True) for piece in rank]),
        send=tuple(map(sum, zip(*send, strict=True))),
        recv=tuple(map(sum, zip(*recv, strict=True))),
    )
    pieces = flat.split([size for rank in zip(*recv, strict=True) for size in rank])
    return [
        torch.cat(pieces[stack :: len(sending)]).view(own.dtype)
        for stack, own in enumerate(sending)
    ]


def _in_order(stacks: Sequence[Stack], results: Sequence[Sequence[T]]) -> list[T]:
    """Results of the stacks' parts in the order in which the parts were given."""
    numbered = [
        (number, result)
        for stack, own in zip(stacks, results, strict=True)
        for number, result in zip(stack.numbers, own, strict=True)
    ]
    return [result for _, result in sorted(numbered, key=lambda pair: pair[0])]
