"""Where a table gets its rows: the seam between modules and the exchange.

A module asks its exchange's source for the unique rows of a batch, and looks up in them as usual.
The source here asks the other ranks at once; another may have fetched the rows beforehand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from commlib import ops
from commlib.collectives.requests import Protocol
from commlib.embrace.ids import Asked, ids_round, unique_ids
from commlib.embrace.parts import Part
from commlib.embrace.rows import fetch_rows, return_rows
from commlib.errors import CommError
from commlib.reducers.index import first_slot
from commlib.rows import SparseRows

if TYPE_CHECKING:
    from commlib.embrace.exchange import Exchange
    from commlib.embrace.table import ShardedTable

Rows = tuple[Tensor, Tensor]  # the unique ids, int64 [u], sorted; their rows [u, D]


class RowSource(ABC):
    """Gives modules the rows that they look up; `exchange.source` is the one in use."""

    @abstractmethod
    def rows(self, table: ShardedTable, ids: Tensor) -> Rows:
        """The unique ids of a batch, sorted, and their rows `[u, D]`.

        The rows are differentiable where the table's gradient is wanted: what flows back into
        them reaches `table.local_weight.grad`, by whatever means the source has. All ranks call it
        for the same tables in the same order.

        Args:
            table: The module that asks.
            ids: int32 or int64, any shape, unchecked.

        Raises:
            IndexError, TypeError: Ids that are none; on the other ranks a CommError that says so.
        """

    def rows_together(self, tables: Sequence[ShardedTable], ids: Sequence[Tensor]) -> list[Rows]:
        """The same for several tables of one exchange."""
        return [self.rows(table, own) for table, own in zip(tables, ids, strict=True)]


class SynchronousRows(RowSource):
    """Asks the other ranks when a module asks, and sends gradients when they are there.

    For all tables asked together one round of ids (two where their slot was short) and one
    all-to-all; backward one all-to-all.

    Source: EmbRace, hybrid communication.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def rows(self, table: ShardedTable, ids: Tensor) -> Rows:
        return self.rows_together([table], [ids])[0]

    def rows_together(self, tables: Sequence[ShardedTable], ids: Sequence[Tensor]) -> list[Rows]:
        own: list[Tensor] | None = None
        mistake: Exception | None = None
        try:
            own = [
                unique_ids(part, table.num_embeddings, table.name)
                for table, part in zip(tables, ids, strict=True)
            ]
        except (IndexError, TypeError, ValueError) as error:
            mistake = error  # raised once the others know
        lookup = _Lookup(self._exchange, tuple(tables), own, mistake)
        weights = [table.local_weight for table in tables]
        rows = _Exchanged.apply(lookup, *weights)  # type: ignore[no-untyped-call]
        return list(zip(own or (), rows, strict=True))


@dataclass(slots=True, eq=False)
class _Lookup:
    """One lookup of some tables, from its ids to its gradients."""

    exchange: Exchange
    tables: tuple[ShardedTable, ...]
    own: list[Tensor] | None
    mistake: Exception | None
    label: str = ""
    parts: tuple[Part, ...] = ()
    # A sparse gradient that nobody else refers to autograd rebuilds without its coalesced flag,
    # and the optimizer then sorts it once more.
    kept: list[Tensor] = field(default_factory=list)

    def fetch(self) -> tuple[Tensor, ...]:
        exchange = self.exchange
        names = tuple(table.name for table in self.tables)
        self.label = names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
        num_rows = [table.num_embeddings for table in self.tables]
        slot = exchange.slots.get(names, first_slot(sum(num_rows)))
        name = exchange.request_name(self.label)

        def protocol() -> Protocol[tuple[Asked, list[Tensor]]]:
            rank, num_ranks = exchange.rank, exchange.num_ranks
            asked = yield from ids_round(f"{name}.ids", self.own, num_rows, slot, rank, num_ranks)
            if asked.index.refused:
                return asked, []
            self.parts = tuple(
                table.part(*rows) for table, rows in zip(self.tables, asked.tables, strict=True)
            )
            rows = yield from fetch_rows(f"{name}.rows", self.parts, rank, num_ranks)
            return asked, rows

        asked, rows = exchange.run(name, protocol)
        self._check(asked, name)
        exchange.slots[names] = asked.index.next_slot_bytes
        return tuple(rows)

    def _check(self, asked: Asked, name: str) -> None:
        if self.mistake is not None:
            raise self.mistake
        if asked.index.refused:
            tables = ", ".join(f"'{table.name}'" for table in self.tables)
            raise CommError(
                f"rank {asked.index.refused[0]} gave ids that are none of table {tables}",
                rank=self.exchange.rank,
                request=name,
                remedy="see the error there; this lookup gave nothing, the next one may",
            )

    def give_back(self, wanted: Sequence[bool], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the tables' own columns, None where nobody wants one."""
        exchange = self.exchange
        parts = [part for part, want in zip(self.parts, wanted, strict=True) if want]
        given = [own for own, want in zip(gradients, wanted, strict=True) if want]
        name = exchange.request_name(f"{self.label}.grads")

        def protocol() -> Protocol[list[SparseRows]]:
            return return_rows(
                name, parts, given, exchange.scale, exchange.rank, exchange.num_ranks
            )

        sums = iter(exchange.run(name, protocol))
        own = [
            as_gradient(next(sums), table.sparse) if want else None
            for table, want in zip(self.tables, wanted, strict=True)
        ]
        self.kept = [gradient for gradient in own if gradient is not None and gradient.is_sparse]
        return own


class _Exchanged(torch.autograd.Function):
    """Rows of all ranks' columns as a function of the own ones."""

    @staticmethod
    def forward(ctx: Any, lookup: _Lookup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.lookup = lookup
        rows = lookup.fetch()
        frozen = zip(rows, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(own for own, wanted in frozen if not wanted))
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.lookup.give_back(ctx.needs_input_grad[1:], gradients)


def as_gradient(rows: SparseRows, sparse: bool) -> Tensor:
    """A table's gradient `[V, d]`: COO, coalesced, or dense with zeros elsewhere."""
    if not sparse:
        dense = rows.values.new_zeros(rows.num_rows, rows.dim)
        return ops.scatter_rows_(dense, rows.indices, rows.values)
    return torch.sparse_coo_tensor(
        rows.indices.unsqueeze(0),
        rows.values,
        (rows.num_rows, rows.dim),
        is_coalesced=True,
        check_invariants=False,
    )
