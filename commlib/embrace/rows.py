"""The two exchanges of column-wise tables: rows to those who look them up, gradients back.

    fetch    rank r sends to rank p its columns of the rows that p asked for: one all-to-all
    return   rank p sends to rank r the gradient of its rows in r's columns: one all-to-all

Everybody knows everybody's rows beforehand (an index), so no sizes and no ids travel. Each is for a
list of tables, and for any rows of them: what goes to one rank lies one behind the other, table by
table, as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import AllToAll, Protocol
from commlib.embrace.flat import as_bytes, as_matrix
from commlib.route import unite_rows
from commlib.rows import SparseRows, accumulate_dtype


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of one table, by rank; all but `weight` is equal on all ranks.

    Args:
        weight: `[V, d_r]` this rank's columns, r this rank.
        indices: int64 `[sum of R_r]`, sorted and unique within each rank.
        counts: R_r of each rank.
        widths: d_r of each rank; their sum is D.
        wire: Dtype that travels; None for the weight's own.
    """

    weight: Tensor
    indices: Tensor
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    wire: torch.dtype | None = None

    @property
    def num_rows(self) -> int:
        """V."""
        return int(self.weight.shape[0])

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of what travels."""
        return self.wire or self.weight.dtype

    def fetch_sizes(self, source: int, target: int) -> int:
        """Bytes from `source` to `target` in a fetch; the other way in a return."""
        return self.counts[target] * self.widths[source] * self.wire_dtype.itemsize


def fetch_rows(
    name: str, parts: Sequence[Part], rank: int, num_ranks: int
) -> Protocol[list[Tensor]]:
    """The rows of each part that this rank asked for, all columns: `[R_me, D]` of weight's dtype.

    Own columns are rounded to the wire's dtype like those of others, so that a row does not depend
    on who holds it. One rank asks nothing.

    Steps 1, bytes of rank r: sum over p != r of R_p d_r w; 2(n-1)/n S D w together with the return.

    Source: EmbRace, AlltoAll for column-wise embeddings.
    """
    held = [ops.gather_rows(part.weight, part.indices, dtype=part.wire_dtype) for part in parts]
    if num_ranks == 1:
        return [rows.to(part.weight.dtype) for rows, part in zip(held, parts, strict=True)]
    arrived = yield from _exchange(
        name,
        [
            as_bytes(rows).split([part.fetch_sizes(rank, p) for p in range(num_ranks)])
            for rows, part in zip(held, parts, strict=True)
        ],
        [[part.fetch_sizes(p, rank) for p in range(num_ranks)] for part in parts],
    )
    rows = []
    for part, pieces in zip(parts, arrived, strict=True):
        columns = [
            as_matrix(piece, part.wire_dtype, part.counts[rank], width)
            for piece, width in zip(pieces, part.widths, strict=True)
        ]
        rows.append(torch.cat(columns, 1).to(part.weight.dtype))
    return rows


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
    given = [
        _overflow_everywhere(gradient.to(part.wire_dtype))
        for gradient, part in zip(gradients, parts, strict=True)
    ]
    if num_ranks == 1:
        return [
            SparseRows(
                part.indices, ops.scale_cast_rows(own, scale, part.weight.dtype), part.num_rows
            )
            for own, part in zip(given, parts, strict=True)
        ]
    arrived = yield from _exchange(
        name,
        [
            [as_bytes(block) for block in own.split(list(part.widths), 1)]
            for own, part in zip(given, parts, strict=True)
        ],
        [[part.fetch_sizes(rank, p) for p in range(num_ranks)] for part in parts],
    )
    return [_sum(part, pieces, scale, rank) for part, pieces in zip(parts, arrived, strict=True)]


def fetch_bytes(parts: Sequence[Part], rank: int) -> int:
    """Bytes that `rank` sends in `fetch_rows`; equal to what `LocalTransport` counts."""
    peers = [p for p in range(len(parts[0].counts)) if p != rank]
    return sum(part.fetch_sizes(rank, p) for part in parts for p in peers)


def return_bytes(parts: Sequence[Part], rank: int) -> int:
    """Bytes that `rank` sends in `return_rows`; equal to what `LocalTransport` counts."""
    peers = [p for p in range(len(parts[0].counts)) if p != rank]
    return sum(part.fetch_sizes(p, rank) for part in parts for p in peers)


def _sum(part: Part, pieces: Sequence[Tensor], scale: float, rank: int) -> SparseRows:
    union, position = unite_rows(
        part.indices, torch.tensor(part.counts, dtype=torch.int64), part.num_rows
    )
    width = part.widths[rank]
    total = torch.zeros(len(union), width, dtype=accumulate_dtype(part.weight.dtype))
    rows = as_matrix(torch.cat(list(pieces)), part.wire_dtype, len(position), width)
    if total.dtype == torch.float64:
        rows = rows.to(total.dtype)
    ops.scatter_add_rows_(total, position, rows)
    return SparseRows(union, ops.scale_cast_rows(total, scale, part.weight.dtype), part.num_rows)


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
    name: str, sending: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
) -> Protocol[list[list[Tensor]]]:
    """One all-to-all of bytes for all tables.

    `sending[t][p]` of table t goes to rank p; `sizes[t][p]` bytes come from it. Gives what came,
    `[t][p]`.
    """
    num_tables = len(sending)
    outgoing = list(zip(*sending, strict=True))
    incoming = list(zip(*sizes, strict=True))
    flat = yield AllToAll(
        name=name,
        tensor=torch.cat([piece for peer in outgoing for piece in peer]),
        send=tuple(sum(map(len, peer)) for peer in outgoing),
        recv=tuple(map(sum, incoming)),
    )
    pieces = flat.split([size for peer in incoming for size in peer])
    return [list(pieces[table::num_tables]) for table in range(num_tables)]
