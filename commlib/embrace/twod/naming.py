"""Which tables are scheduled, and where the ids of a batch are: named by the user, or found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from commlib.embrace.exchange import Exchange
from commlib.embrace.source import Rows, RowSource
from commlib.embrace.table import ShardedTable
from commlib.embrace.twod import finder
from commlib.embrace.twod.finder import IdsOf, Place

B = TypeVar("B")


class Naming:
    """Knows a batch's ids by table.

    Args:
        tables: All partitioned tables of the model, sorted by name.
        exchange: Theirs.
        ids_of: The user's function; None to find ids in the first iteration.

    Attributes:
        scheduled: Tables whose ids are known ahead; the same on every rank.
        batch: The one that computes now.

    Source: ours.
    """

    def __init__(
        self, tables: Sequence[ShardedTable], exchange: Exchange, ids_of: IdsOf | None
    ) -> None:
        self._tables = tables
        self._exchange = exchange
        self._ids_of = ids_of
        self._places: dict[ShardedTable, Place] = {}
        self.scheduled: list[ShardedTable] = []
        self.batch: Any = None

    def agreed(self, batches: Iterator[B]) -> Iterator[B]:
        """The batches, after the tables that `ids` names for the first one were agreed on."""
        if self._ids_of is None:
            return batches
        first = list(itertools.islice(batches, 1))
        named, mistake = self._tables, None  # a rank without a batch has no say
        try:
            for batch in first:
                named = list(finder.given(self._ids_of, batch, self._tables))
        except Exception as error:  # of the user's function too: agree first, then raise
            named, mistake = [], error
        self.scheduled = finder.agree(named, self._tables, self._exchange)
        if mistake is not None:
            raise mistake
        return itertools.chain(first, batches)

    def ids(self, batch: Any) -> Mapping[ShardedTable, Tensor]:
        """The ids of a batch, by table that is scheduled."""
        if self._ids_of is not None:
            return finder.given(self._ids_of, batch, self._tables)
        found = {table: self._places[table].ids(batch) for table in self.scheduled}
        for table, ids in found.items():
            if ids is None:
                raise ValueError(
                    f"the batch has no ids of table '{table.name}' where the first one had them:"
                    " give schedule(..., ids=...)"
                )
        return {table: ids for table, ids in found.items() if ids is not None}

    def note_lookup(self, table: ShardedTable, ids: Tensor) -> None:
        """A table was looked up that is not scheduled: its ids may be a part of the batch."""
        if self._ids_of is None and not self.scheduled and isinstance(ids, Tensor):
            place = finder.find(self.batch, ids)
            if place is not None and self._places.setdefault(table, place) == place:
                return
        self._places.pop(table, None)

    def note_places(self) -> None:
        """An iteration has ended: schedule the tables whose ids it showed."""
        if self._places and not self.scheduled:
            self.scheduled = finder.agree(self._places, self._tables, self._exchange)


class Finding(RowSource):
    """Gives rows when asked, and notes what was asked for."""

    def __init__(self, naming: Naming, source: RowSource) -> None:
        self._naming = naming
        self._source = source

    def rows(self, table: ShardedTable, ids: Tensor) -> Rows:
        self._naming.note_lookup(table, ids)
        return self._source.rows(table, ids)

    def rows_together(self, tables: Sequence[ShardedTable], ids: Sequence[Tensor]) -> list[Rows]:
        for table, own in zip(tables, ids, strict=True):
            self._naming.note_lookup(table, own)
        return self._source.rows_together(tables, ids)
