"""Lookups of a batch, in two parts: what can be fetched a batch ahead, and what must wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from commlib.embrace.priority import EARLY_ROWS, LOOKUP, needed_by
from commlib.embrace.rows import fetch_bytes, fetch_rows
from commlib.embrace.table import ShardedTable
from commlib.embrace.twod.current import Current, Fetched
from commlib.embrace.twod.lookahead import Ahead
from commlib.embrace.twod.parts import subset
from commlib.embrace.twod.runner import Runner

_SHORT_BYTES = 256 << 10  # mean over ranks; below, one exchange costs less than two


class Fetcher:
    """Sends for rows, and puts together what comes.

    Args:
        tables: The tables that are scheduled, sorted by name.
        runner: Carries requests.
        label: Names requests; the same on every rank.

    Attributes:
        groups: Tables whose rows, and gradients, travel together.

    Source: EmbRace, vertical scheduling; early rows are ours.
    """

    def __init__(self, tables: Sequence[ShardedTable], runner: Runner, label: str) -> None:
        self._tables = list(tables)
        self._runner = runner
        self._label = label
        self._exchange = runner.exchange
        self._early: dict[int, Fetched] = {}
        self.groups: list[list[ShardedTable]] = [self._tables] if tables else []

    def group_of(self, table: ShardedTable) -> int:
        """Which group a table is in."""
        return next(i for i, group in enumerate(self.groups) if table in group)

    def regroup(self, current: Current | None) -> None:
        """Tables looked up one after another, with no dense work between, share an exchange.

        Args:
            current: The batch that has ended, which shows how tables are looked up.
        """
        if current is None or not current.used:
            return
        groups: list[list[ShardedTable]] = []
        for i, table in enumerate(current.used):
            if i == 0 or i in current.boundaries:
                groups.append([table])
            else:
                groups[-1].append(table)
        self.groups = groups + [[table] for table in self._tables if table not in current.used]

    def fetch_early(self, ahead: Ahead, volatile: dict[ShardedTable, Tensor]) -> None:
        """Send for the rows of the next batch that no gradient under way will change."""
        rank, n = self._exchange.rank, self._exchange.num_ranks
        stable = [table for table in ahead.rows if table in volatile]
        early = subset(ahead.rows, volatile, stable, rank, inside=False)
        if early:
            name = f"{self._label}@{ahead.step}.early"
            make = partial(fetch_rows, name, early.parts, rank, n)
            priority = needed_by(ahead.step, EARLY_ROWS)
            self._early[ahead.step] = (early, self._runner.submit(name, make, priority))

    def forget_early(self) -> None:
        """The weights were replaced: rows fetched ahead are no longer theirs."""
        self._early.clear()

    def begin(self, ahead: Ahead) -> Current:
        """Send for the rows of a batch that were not fetched ahead."""
        current = Current(ahead.step, ahead.rows, self._early.pop(ahead.step, None))
        self._fetch_late(current)
        return current

    def take(self, current: Current, group: int) -> Iterator[tuple[ShardedTable, Tensor]]:
        """Wait for the rows `[u, D]` of a group's tables."""
        for table in self.groups[group]:
            if table not in current.rows:
                continue
            size = (current.rows[table].counts[self._exchange.rank], table.embedding_dim)
            leaf = torch.empty(size, dtype=table.local_weight.dtype)
            for rows, future in [*([current.early] if current.early else []), *current.late]:
                if table in rows.tables:
                    i = rows.tables.index(table)
                    got = self._runner.wait(future, f"{self._label}@{current.step}", "rows")[i]
                    if len(got) == len(leaf):
                        leaf = got
                    else:
                        leaf.index_copy_(0, rows.places[i], got)
            yield table, leaf

    def _fetch_late(self, current: Current) -> None:
        rank, n = self._exchange.rank, self._exchange.num_ranks
        got = {} if current.early is None else dict.fromkeys(current.early[0].tables)
        groups = [[table for table in group if table in current.rows] for group in self.groups]
        masks = {
            table: self._late_mask(current, table, table in got)
            for group in groups
            for table in group
        }
        together = subset(current.rows, masks, list(chain(*groups)), rank, inside=False)
        if sum(fetch_bytes(together.parts, peer) for peer in range(n)) <= n * _SHORT_BYTES:
            late = [together]
        else:  # what the front of the model needs need not wait for the rest
            late = [subset(current.rows, masks, group, rank, inside=False) for group in groups]
        for i, rows in enumerate(late):
            if rows:
                name = f"{self._label}@{current.step}.rows{i}"
                make = partial(fetch_rows, name, rows.parts, rank, n)
                priority = needed_by(current.step, LOOKUP, i)
                current.late.append((rows, self._runner.submit(name, make, priority)))

    def _late_mask(self, current: Current, table: ShardedTable, got: bool) -> Tensor | None:
        """The rows that came early; None where none did."""
        if not got:
            return None
        assert current.early is not None
        part = current.early[0].parts[current.early[0].tables.index(table)]
        mask = torch.zeros(table.num_embeddings, dtype=torch.bool)
        mask[part.indices] = True
        return mask
