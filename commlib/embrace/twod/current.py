"""The batch that computes now, as far as its tables are concerned."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from commlib.embrace.table import ShardedTable
from commlib.embrace.twod.lookahead import AskedRows
from commlib.embrace.twod.parts import Subset

Fetched: TypeAlias = tuple[Subset, Future[list[Tensor]]]


@dataclass(slots=True, eq=False)
class Current:
    """The batch that computes now: its rows, and whose gradients are still missing.

    Args:
        step: Its number.
        rows: What all ranks look up.
        early: Rows that were fetched a batch ahead.
        late: Rows that were fetched when it began, by group.
        leaves: Rows `[u, D]` as they were fetched; gradients collect in them.
        used: Tables that have been looked up, in that order.
        boundaries: How many had been, where dense work came between.
        missing: Tables looked up whose gradient has not come, by group.
    """

    step: int
    rows: dict[ShardedTable, AskedRows]
    early: Fetched | None = None
    late: list[Fetched] = field(default_factory=list)
    leaves: dict[ShardedTable, Tensor] = field(default_factory=dict)
    used: list[ShardedTable] = field(default_factory=list)
    boundaries: set[int] = field(default_factory=set)
    missing: dict[int, list[ShardedTable]] = field(default_factory=dict)
    num_backwards: int = 0
