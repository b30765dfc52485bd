"""The ids of a lookup: checked, made unique, and told to all ranks in one round for all tables.

The tables of one lookup count as one table, whose rows are theirs one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import Protocol
from commlib.reducers.index import Index, index_round

_INTEGERS = (torch.int32, torch.int64)
_EMPTY = torch.empty(0, dtype=torch.int64)


def unique_ids(ids: Tensor, num_rows: int, table: str) -> Tensor:
    """The sorted unique ids of a batch, int64 `[u]`.

    Args:
        ids: int32 or int64, any shape.
        num_rows: V.
        table: Names the table in errors.

    Raises:
        TypeError: Not a tensor, or not of integers.
        IndexError: An id outside `[0, V)`; names it.
        ValueError: Not on the CPU.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids of table '{table}' are {type(ids).__name__}, not a tensor")
    if ids.dtype not in _INTEGERS:
        raise TypeError(
            f"ids of table '{table}' are {ids.dtype}; they must be torch.int32 or torch.int64"
        )
    if ids.device.type != "cpu":
        raise ValueError(f"ids of table '{table}' are on {ids.device}; move them to the CPU")
    try:
        return ops.unique_ids(ids, num_rows)
    except IndexError:
        bad = ids[(ids < 0) | (ids >= num_rows)].flatten()[0]
        raise IndexError(
            f"id {int(bad)} is outside table '{table}', whose rows are 0 to {num_rows - 1}"
        ) from None


@dataclass(frozen=True, slots=True)
class Asked:
    """Which rows of each table each rank looks up; equal on all ranks.

    Args:
        tables: `(indices, counts)` of each table, as in `Part`.
        index: Of all tables together.
    """

    tables: tuple[tuple[Tensor, tuple[int, ...]], ...]
    index: Index


def ids_round(
    name: str,
    ids: Sequence[Tensor] | None,
    num_rows: Sequence[int],
    slot_bytes: int,
    rank: int,
    num_ranks: int,
) -> Protocol[Asked]:
    """Tell every rank the own ids of some tables and learn theirs.

    Args:
        name: Agreed name of the request.
        ids: Sorted unique ids of each table; None from a rank whose ids were wrong, which takes
            part all the same, so that `index.refused` names it everywhere.
        num_rows: V of each table.
        slot_bytes: Agreed; `index.next_slot_bytes` is the next one.
        rank: This rank.
        num_ranks: n; one rank asks nothing.

    Steps and bytes: those of `commlib.reducers.index.index_round`.

    Source: ours.
    """
    first_rows = [0, *accumulate(num_rows)]
    total = first_rows.pop()
    shifted = [own + first for own, first in zip(ids or (), first_rows, strict=ids is not None)]
    joined = torch.cat([_EMPTY, *shifted])
    if num_ranks == 1:
        refused = () if ids is not None else (0,)
        index = Index(joined, (len(joined),), total, 0, slot_bytes, refused=refused)
    else:
        index = yield from index_round(
            name, joined, total, slot_bytes, rank, num_ranks, refuse=ids is None
        )
    return Asked(_apart(index, first_rows), index)


def _apart(index: Index, first_rows: Sequence[int]) -> tuple[tuple[Tensor, tuple[int, ...]], ...]:
    """The tables' own ids from those of all tables together."""
    if len(first_rows) == 1:
        return ((index.indices, index.counts),)
    starts = torch.tensor([*first_rows, index.num_rows], dtype=torch.int64)
    of_rank = index.indices.split(list(index.counts))
    sizes = [torch.searchsorted(own, starts).diff().tolist() for own in of_rank]
    pieces = [own.split(counts) for own, counts in zip(of_rank, sizes, strict=True)]
    return tuple(
        (
            torch.cat([own[table] for own in pieces]) - first,
            tuple(counts[table] for counts in sizes),
        )
        for table, first in enumerate(first_rows)
    )
