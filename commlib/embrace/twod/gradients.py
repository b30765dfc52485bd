"""Gradients of a table's own columns that are under way, and the steps that will use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from commlib.embrace.source import as_gradient
from commlib.embrace.table import ShardedTable
from commlib.embrace.twod.runner import Runner
from commlib.embrace.twod.stepper import Group, RowStep, Stepper, holding
from commlib.rows import SparseRows


@dataclass(slots=True, eq=False)
class Arriving:
    """One exchange of gradients, of several tables.

    Args:
        name: Of the request.
        future: One gradient a table.
        position: Which of them is this table's.
    """

    name: str
    future: Future[list[SparseRows]]
    position: int

    def wait(self, runner: Runner) -> SparseRows:
        """The gradient, waited for."""
        return runner.wait(self.future, self.name, "gradients")[self.position]


@dataclass(slots=True, eq=False)
class Piece:
    """What one backward pass gave to one table.

    Args:
        union: int64 `[U]`, all rows that it touches; known before it arrives.
        prior: Rows that the next batch looks up; None where there are none.
        delayed: All others; None where there are none.
    """

    union: Tensor
    prior: Arriving | None
    delayed: Arriving | None

    def arrivals(self) -> list[Arriving]:
        """All exchanges of it."""
        return [arriving for arriving in (self.prior, self.delayed) if arriving is not None]


@dataclass(slots=True, eq=False)
class DueStep:
    """A step that the user's optimizer has taken, and that a table has still to take.

    Args:
        table: Whose.
        settings: The optimizer's parameter groups at that time.
        pieces: Its gradient: the sum of what the backward passes gave, in their order.
    """

    table: ShardedTable
    settings: list[Group]
    pieces: list[Piece]
    _rows: RowStep | None = None
    _first: Tensor | None = None

    @property
    def begun(self) -> bool:
        """Whether the first rows were updated."""
        return self._rows is not None

    def take_first(self, stepper: Stepper, runner: Runner, mask: Tensor) -> None:
        """Update the rows in `mask` (bool `[V]`): those that the next batch looks up."""
        self._rows = stepper.rows(self.table.local_weight, self.settings)
        self._first = mask
        *earlier, newest = self.pieces
        arrivals = [piece.arrivals() for piece in earlier]
        # What the newest piece delays is outside the mask by construction.
        arrivals.append([newest.prior] if newest.prior is not None else [])
        self._take(runner, arrivals, mask, last=False)

    def take_rest(self, stepper: Stepper, runner: Runner) -> None:
        """Update all rows that have not been, and end the step."""
        arrivals = [piece.arrivals() for piece in self.pieces]
        if self._rows is None:
            parameter = self.table.local_weight
            with holding(parameter, total(self.table, [_join(a, runner) for a in arrivals])):
                stepper.step([parameter], self.settings)
            return
        assert self._first is not None
        arrivals[-1] = [a for a in arrivals[-1] if a is not self.pieces[-1].prior]
        self._take(runner, arrivals, ~self._first, last=True)

    def _take(
        self, runner: Runner, arrivals: Sequence[Sequence[Arriving]], mask: Tensor, last: bool
    ) -> None:
        assert self._rows is not None
        table = self.table
        pieces = [_inside(_join(some, runner), mask, table) for some in arrivals]
        if table.sparse:
            self._rows.part_of_rows(total(table, pieces), mask, last)
            return
        rows = mask.nonzero().squeeze(1)
        place = torch.zeros(len(mask), dtype=torch.int64)
        place[rows] = torch.arange(len(rows))
        gradient: Tensor | None = None
        for piece in pieces:
            own = piece.values.new_zeros(len(rows), piece.dim)
            own.index_copy_(0, place[piece.indices], piece.values)
            gradient = own if gradient is None else gradient + own
        assert gradient is not None
        self._rows.part_dense(rows, gradient, last)


def whole(table: ShardedTable, pieces: Sequence[Piece], runner: Runner) -> Tensor:
    """All pieces as the one gradient that autograd would have left."""
    return total(table, [_join(piece.arrivals(), runner) for piece in pieces])


def total(table: ShardedTable, pieces: Sequence[SparseRows | None]) -> Tensor:
    """The sum of pieces, added one by one as autograd does."""
    given = list(_gradients(table, pieces))
    gradient = given[0]
    for more in given[1:]:
        gradient = gradient + more
    return gradient


def _gradients(table: ShardedTable, pieces: Sequence[SparseRows | None]) -> Iterator[Tensor]:
    for piece in pieces:
        yield as_gradient(_none(table) if piece is None else piece, table.sparse)


def _join(arrivals: Sequence[Arriving], runner: Runner) -> SparseRows | None:
    """The rows of several exchanges, which have none in common, in order; None for no exchange."""
    parts = [arriving.wait(runner) for arriving in arrivals]
    if len(parts) < 2:
        return parts[0] if parts else None
    indices = torch.cat([part.indices for part in parts])
    order = indices.argsort()
    values = torch.cat([part.values for part in parts])
    return SparseRows(indices[order], values[order], parts[0].num_rows)


def _inside(rows: SparseRows | None, mask: Tensor, table: ShardedTable) -> SparseRows:
    if rows is None:
        return _none(table)
    keep = mask[rows.indices]
    if bool(keep.all()):
        return rows
    return SparseRows(rows.indices[keep], rows.values[keep], rows.num_rows)


def _none(table: ShardedTable) -> SparseRows:
    weight = table.local_weight
    empty = torch.empty(0, dtype=torch.int64)
    return SparseRows(empty, weight.detach().new_empty(0, weight.shape[1]), weight.shape[0])
