"""Subsets of the rows that a batch looks up, as parts of an exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commlib.embrace.rows import Part
from commlib.embrace.table import ShardedTable
from commlib.embrace.twod.lookahead import AskedRows


@dataclass(frozen=True, slots=True, eq=False)
class Subset:
    """Some of the rows of some tables.

    Args:
        tables: Whose rows; those that have any, the same on every rank.
        parts: For the exchange.
        places: For each table, where its rows are among this rank's unique ids; int64.
    """

    tables: tuple[ShardedTable, ...]
    parts: tuple[Part, ...]
    places: tuple[Tensor, ...]

    def __bool__(self) -> bool:
        return bool(self.tables)


def subset(
    rows: Mapping[ShardedTable, AskedRows],
    masks: Mapping[ShardedTable, Tensor | None],
    tables: Sequence[ShardedTable],
    rank: int,
    *,
    inside: bool,
) -> Subset:
    """The rows inside (or outside) each table's mask.

    Args:
        rows: What all ranks look up.
        masks: bool `[V]` by table, agreed; None has no row inside.
        tables: Which to take.
        rank: This rank.
        inside: Take the rows in the mask; else the others.
    """
    taken, parts, places = [], [], []
    for table in tables:
        asked, mask = rows[table], masks[table]
        if mask is None:
            if inside or len(asked.indices) == 0:
                continue
            part = table.part(asked.indices, asked.counts)
            place = torch.arange(asked.counts[rank])
        else:
            keep = mask[asked.indices] if inside else ~mask[asked.indices]
            of_rank = keep.split(list(asked.counts))
            counts = tuple(int(own.count_nonzero()) for own in of_rank)
            if sum(counts) == 0:
                continue
            part = table.part(asked.indices[keep], counts)
            place = of_rank[rank].nonzero().squeeze(1)
        taken.append(table)
        parts.append(part)
        places.append(place)
    return Subset(tuple(taken), tuple(parts), tuple(places))
