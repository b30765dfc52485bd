"""Index rounds ahead of time: ids are known in the forward pass, values only in the backward.

Embedding modules report their ids as they are looked up. When a frontend says so, one index round a
table starts on the index lane, always in the same order of tables, and runs under what is left of
the forward and backward pass. Until then ids pile up. A rank without a forward pass (a joined one)
announces what its gradient has once it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from commlib import ops
from commlib.collectives.requests import Protocol
from commlib.collectives.usage import Usage
from commlib.frontend.tables import Table
from commlib.reducers.index import Index, first_slot, index_round
from commlib.schedule import Lane

MAX_LOOKUPS = 64  # of a table; then they are merged


@dataclass(frozen=True, slots=True)
class Announced:
    """An index round's result, and what it took."""

    index: Index
    usage: Usage


@dataclass(slots=True)
class _Lookups:
    """One table's ids since its gradient was last reduced, and its index round under way."""

    table: Table
    slot_bytes: int
    watched: bool = False
    num_rounds: int = 0
    ids: list[tuple[Tensor, int]] = field(default_factory=list)
    future: Future[Announced] | None = None


class Announcer:
    """Watches the tables of one model.

    Args:
        trains: Whether the model is in training mode, so that lookups count.
        lane: The index lane.
        tables: The tables, in the order that every rank uses.
        wanted: Whether a table's announcements are still in use; the same on every rank.
        announced: Names of those that are announced, the same on every rank; where None, those
            with modules.

    Source: ours.
    """

    def __init__(
        self,
        trains: Callable[[], bool],
        lane: Lane,
        tables: Mapping[str, Table],
        wanted: Callable[[str], bool],
        announced: Container[str] | None = None,
    ) -> None:
        self._trains = trains
        self._lane = lane
        self._wanted = wanted
        self._lookups = {
            name: _Lookups(table, first_slot(table.shape[0]))
            for name, table in tables.items()
            if (table.modules if announced is None else name in announced)
        }
        self._handles: list[RemovableHandle] = []
        for name, table in tables.items():
            for module in table.modules:
                self.watch(name, module)

    def watch(self, name: str, module: nn.Module) -> None:
        """Note what `module` looks up in an announced table from now on."""
        if name in self._lookups:
            self._lookups[name].watched = True
            watch = _Watch(self, name)
            self._handles.append(module.register_forward_hook(watch, with_kwargs=True))

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def take(self, name: str, rows: Callable[[], Tensor]) -> Future[Announced] | None:
        """The index round of a table whose gradient is ready; None where it has none.

        Args:
            name: The table.
            rows: Gives the gradient's own ids, for a rank that looked nothing up.
        """
        if name not in self._lookups or not self._wanted(name):
            return None
        lookups = self._lookups[name]
        future, lookups.future = lookups.future, None
        lookups.ids.clear()
        return future or self._submit(lookups, rows)

    def announce(self) -> None:
        """Start the index round of every watched table with the ids looked up so far."""
        for name, lookups in self._lookups.items():
            if lookups.watched and self._wanted(name):
                looked_up = _unique(list(lookups.ids), lookups.table.shape[0])
                lookups.future = self._submit(lookups, looked_up)

    def record(self, name: str, ids: Tensor, padding: int | None) -> None:
        """Note ids that were looked up, if their gradient may be reduced."""
        if self._trains() and torch.is_grad_enabled() and self._wanted(name):
            lookups, drop = self._lookups[name], -1 if padding is None else padding
            if len(lookups.ids) >= MAX_LOOKUPS:  # forward passes that no backward pass follows
                lookups.ids[:] = [(_unique(list(lookups.ids), lookups.table.shape[0])(), -1)]
            lookups.ids.append((ids.detach().clone(), drop))

    def _submit(self, lookups: _Lookups, ids: Callable[[], Tensor]) -> Future[Announced]:
        name = f"{lookups.table.name}@{lookups.num_rounds}.announce"
        lookups.num_rounds += 1
        usage = Usage()

        def announce() -> Protocol[Announced]:
            index = yield from index_round(
                name,
                ids(),
                lookups.table.shape[0],
                lookups.slot_bytes,
                self._lane.rank,
                self._lane.num_ranks,
            )
            lookups.slot_bytes = index.next_slot_bytes
            return Announced(replace(index, announced=True), usage)

        return self._lane.submit(name, announce, usage=usage)


class _Watch:
    """The forward hook of one embedding; a copied or pickled model takes a dead one along."""

    def __init__(self, announcer: Announcer | None = None, name: str = "") -> None:
        self._announcer = announcer
        self._name = name

    def __call__(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: object
    ) -> None:
        ids = args[0] if args else kwargs.get("input")
        if self._announcer is not None and ids is not None:
            self._announcer.record(self._name, ids, module.padding_idx)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()


def _unique(ids: list[tuple[Tensor, int]], num_rows: int) -> Callable[[], Tensor]:
    """Sorted unique rows of all lookups, padding left out; computed on the lane's thread."""

    def unique() -> Tensor:
        parts = [ops.unique_ids(part, num_rows, drop) for part, drop in ids]
        return parts[0] if len(parts) == 1 else torch.cat([_EMPTY, *parts]).unique()

    return unique


_EMPTY = torch.empty(0, dtype=torch.int64)
