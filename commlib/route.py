"""Who owns each row among its holders, and what one rank sends and receives: the plan of `minimal`.

The assignment is csrc/owners/assign.h, the halves of the two exchanges csrc/owners/route.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ops: Any = torch.ops.commlib


@dataclass(frozen=True, slots=True)
class Route:
    """Positions and counts of the exchanges of `minimal` for one rank; all tensors int64.

    Args:
        union: `[U]` the rows that any rank holds, sorted.
        spread_src: own rows that nobody else holds and nobody relays, positions in the own list;
            they go to everyone at once.
        spread_counts: `[n]` how many each rank spreads.
        spread_dst: where all ranks' spread rows go, as positions in `union`, grouped by holder.
        owned: `[O]` positions in `union` of the rows that this rank sums.
        push_src: own rows to send, grouped by owner, as positions in the own list.
        push_send: `[n]` how many go to each rank.
        push_recv: `[n]` how many come from each rank.
        push_dst: where received rows are added, as positions in `owned`, grouped by sender.
        own_src: own rows that this rank owns itself, positions in the own list.
        own_dst: the same rows as positions in `owned`.
        pull_src: sums to send, as positions in `owned`, grouped by receiver.
        pull_send: `[n]`.
        pull_recv: `[n]`.
        pull_dst: where received sums go, as positions in `union`, grouped by owner.
        kept_src: own rows that nobody else holds and another rank relays: own list.
        kept_dst: the same rows as positions in `union`.
    """

    union: Tensor
    spread_src: Tensor
    spread_counts: Tensor
    spread_dst: Tensor
    owned: Tensor
    push_src: Tensor
    push_send: Tensor
    push_recv: Tensor
    push_dst: Tensor
    own_src: Tensor
    own_dst: Tensor
    pull_src: Tensor
    pull_send: Tensor
    pull_recv: Tensor
    pull_dst: Tensor
    kept_src: Tensor
    kept_dst: Tensor


def minimal_route(indices: Tensor, counts: Tensor, num_rows: int, rank: int) -> Route:
    """Assign owners among holders and route this rank's rows.

    Args:
        indices: int64 `[sum of R_r]`, every rank's sorted unique ids, one list after the other.
        counts: int64 `[n]`, R_r of each rank.
        num_rows: V.
        rank: The rank to route for.

    Raises:
        RuntimeError: Ids that are unsorted, repeated or not below V; counts that do not add up.

    Source: ours; messages per row are k+n-2, the lower bound.
    """
    return Route(*_ops.minimal_route(indices, counts, num_rows, rank))


def minimal_owner(indices: Tensor, counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The union `[U]` (int64) and the owner of each of its rows `[U]` (int32)."""
    union, owner = _ops.minimal_owner(indices, counts, num_rows)
    return union, owner


def unite_rows(indices: Tensor, counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The union `[U]` and the position in it of each of `indices`, both int64."""
    union, position = _ops.unite_rows(indices, counts, num_rows)
    return union, position
