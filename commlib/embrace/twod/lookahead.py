"""One batch ahead: its ids go round the ranks while the batch before it computes.

The round also tells whose loader has ended, so that all ranks stop after the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commlib.collectives.requests import Protocol
from commlib.embrace.ids import Asked, ids_round, unique_ids
from commlib.embrace.table import ShardedTable
from commlib.embrace.twod.runner import Runner
from commlib.errors import CommError
from commlib.reducers.index import first_slot
from commlib.route import unite_rows

_NONE = torch.empty(0, dtype=torch.int64)
_ALIVE = torch.zeros(1, dtype=torch.int64)


@dataclass(slots=True, eq=False)
class AskedRows:
    """The rows of one table that a batch looks up, on all ranks.

    Args:
        indices: int64 `[sum of R_r]`, sorted and unique within each rank.
        counts: R_r of each rank.
        union: int64 `[U]`, sorted.
        mask: bool `[V]`, of the union.
    """

    indices: Tensor
    counts: tuple[int, ...]
    union: Tensor
    mask: Tensor

    def of_rank(self, rank: int) -> Tensor:
        """The rows of one rank, sorted."""
        parts: tuple[Tensor, ...] = self.indices.split(list(self.counts))
        return parts[rank]


@dataclass(slots=True, eq=False)
class Ahead:
    """A batch that is known ahead, and what all ranks look up in theirs.

    Args:
        batch: This rank's; None where its loader has ended.
        step: Its number.
        alive: Set by the round: every rank has a batch.
        refused: Set by the round: a rank whose ids were wrong.
        rows: Set by the round, by table.
        known: Done once these are set, or could not be.
    """

    batch: Any
    step: int
    mistake: Exception | None = None
    alive: bool = False
    refused: int | None = None
    rows: dict[ShardedTable, AskedRows] = field(default_factory=dict)
    known: Future[None] = field(default_factory=Future)


class Lookahead:
    """Pulls batches and announces their ids.

    Args:
        batches: This rank's batches.
        runner: Carries the rounds.
        label: Names the rounds; the same on every rank.

    Source: ours; that ids are known ahead is EmbRace's.
    """

    def __init__(self, batches: Iterator[Any], runner: Runner, label: str) -> None:
        self._batches = batches
        self._runner = runner
        self._label = label
        self._steps = 0
        self._slots: dict[tuple[str, ...], int] = {}

    def pull(
        self,
        tables: Sequence[ShardedTable],
        ids_of: Callable[[Any], Mapping[ShardedTable, Tensor]],
        then: Callable[[Ahead], None],
    ) -> Ahead:
        """The next batch; its ids are on their way when this returns.

        Args:
            tables: Whose ids are announced; the same on every rank, in the same order.
            ids_of: Gives them.
            then: Called when they are known, before anybody who waits goes on; on another thread.
        """
        nothing = object()
        batch = next(self._batches, nothing)
        ended = batch is nothing
        ahead = Ahead(None if ended else batch, self._steps)
        self._steps += 1
        own: list[Tensor] | None = [_NONE] * len(tables)
        if not ended:
            try:
                asked = ids_of(batch)
                own = [_own_ids(table, asked) for table in tables]
            except (IndexError, TypeError, ValueError) as error:
                ahead.mistake, own = error, None
        self._announce(ahead, tables, own, ended, then)
        return ahead

    def settle(self, ahead: Ahead) -> bool:
        """Wait until the ids are known; whether every rank has such a batch.

        Raises:
            IndexError, TypeError, ValueError: This rank's ids were wrong.
            CommError: Another rank's were, or the ranks lost each other.
        """
        self._runner.wait(ahead.known, f"{self._label}@{ahead.step}.ids", "ids")
        if ahead.mistake is not None:
            raise ahead.mistake
        if ahead.refused is not None:
            raise CommError(
                f"rank {ahead.refused} has a batch with ids that its tables do not have",
                rank=self._runner.exchange.rank,
                request=f"{self._label}@{ahead.step}.ids",
                remedy="see the error there",
            )
        return ahead.alive

    def _announce(
        self,
        ahead: Ahead,
        tables: Sequence[ShardedTable],
        own: list[Tensor] | None,
        ended: bool,
        then: Callable[[Ahead], None],
    ) -> None:
        exchange = self._runner.exchange
        names = tuple(table.name for table in tables)
        num_rows = [*(table.num_embeddings for table in tables), 1]
        slot = self._slots.get(names, first_slot(sum(num_rows)))
        told = None if own is None else [*own, _NONE if ended else _ALIVE]
        name = f"{self._label}@{ahead.step}.ids"

        def protocol() -> Protocol[Asked]:
            return ids_round(name, told, num_rows, slot, exchange.rank, exchange.num_ranks)

        def take(done: Future[Asked]) -> None:
            try:
                asked = done.result()
                self._slots[names] = asked.index.next_slot_bytes
                ahead.refused = asked.index.refused[0] if asked.index.refused else None
                *rows, (_, alive) = asked.tables
                ahead.alive = ahead.refused is None and all(alive)
                if ahead.alive:
                    for table, (indices, counts) in zip(tables, rows, strict=True):
                        ahead.rows[table] = _asked_rows(table, indices, counts)
                    then(ahead)
            except BaseException as error:
                ahead.known.set_exception(error)
            else:
                ahead.known.set_result(None)

        if exchange.ids is not None:
            exchange.ids.submit(name, protocol).add_done_callback(take)
        else:
            alone: Future[Asked] = Future()
            alone.set_result(exchange.run(name, protocol))
            take(alone)


def _own_ids(table: ShardedTable, asked: Mapping[ShardedTable, Tensor]) -> Tensor:
    if table not in asked:
        raise ValueError(f"ids(batch) has no ids of table '{table.name}', but had them before")
    return unique_ids(asked[table], table.num_embeddings, table.name)


def _asked_rows(table: ShardedTable, indices: Tensor, counts: tuple[int, ...]) -> AskedRows:
    union, _ = unite_rows(indices, torch.tensor(counts, dtype=torch.int64), table.num_embeddings)
    mask = torch.zeros(table.num_embeddings, dtype=torch.bool)
    mask[union] = True
    return AskedRows(indices, counts, union, mask)
