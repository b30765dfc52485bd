"""Vertical scheduling: the rows of a table are sent when they are needed, not when they are there.

With the ids of the next batch known on all ranks, the rows of a batch fall into

    gradients   prior     rows that the next batch looks up: they go first
                delayed   all others: they go last, while the next batch computes
    lookups     early     rows that no gradient under way will change: they go a batch ahead
                late      all others: they go once their update is done

so that between two batches only prior gradients and late rows are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from commlib.embrace.priority import DELAYED_ROWS, PRIOR_ROWS, needed_by
from commlib.embrace.rows import return_rows
from commlib.embrace.source import Rows, RowSource
from commlib.embrace.table import ShardedTable
from commlib.embrace.twod.current import Current
from commlib.embrace.twod.fetcher import Fetcher
from commlib.embrace.twod.gradients import Arriving, DueStep, Piece, whole
from commlib.embrace.twod.lookahead import Ahead
from commlib.embrace.twod.parts import Subset, subset
from commlib.embrace.twod.pending import PendingGrad, arrived, pending_grad
from commlib.embrace.twod.runner import Runner
from commlib.embrace.twod.stepper import Group, Stepper


class Vertical(RowSource):
    """Gives modules the rows that were fetched for them, and takes their gradients.

    Args:
        tables: The tables that are scheduled, sorted by name.
        runner: Carries requests.
        stepper: Updates tables.
        upcoming: Gives the next batch, its ids known, or None where there is none; may wait.
        arrive: Called when somebody looks at a gradient that is under way.
        label: Names requests; the same on every rank.
        overlap: Let gradients travel while other work goes on; else wait for them at once.
        fallback: Gives rows to tables that are not scheduled, and in evaluation.

    Source: EmbRace, vertical scheduling; early rows are ours.
    """

    def __init__(
        self,
        tables: Sequence[ShardedTable],
        runner: Runner,
        stepper: Stepper,
        upcoming: Callable[[], Ahead | None],
        arrive: Callable[[], None],
        label: str,
        overlap: bool,
        fallback: RowSource,
    ) -> None:
        self._tables = list(tables)
        self._runner = runner
        self._stepper = stepper
        self._upcoming = upcoming
        self._arrive = arrive
        self._label = label
        self._overlap = overlap
        self._fallback = fallback
        self._exchange = runner.exchange
        self._fetcher = Fetcher(self._tables, runner, label)
        self._open: dict[ShardedTable, list[Piece]] = {table: [] for table in tables}
        self._due: dict[ShardedTable, list[DueStep]] = {table: [] for table in tables}
        self.current: Current | None = None
        self.flush: Callable[[], None] = self.update_all

    # What modules ask for.

    def rows(self, table: ShardedTable, ids: Tensor) -> Rows:
        current = self.current
        scheduled = current is not None and table in current.rows
        if not (scheduled and table.training and torch.is_grad_enabled()):
            self.flush()
            return self._fallback.rows(table, ids)
        assert current is not None
        unique = current.rows[table].of_rank(self._exchange.rank)
        self._check(table, ids, unique)
        if table not in current.used:
            current.used.append(table)
            group = self._fetcher.group_of(table)
            if table not in current.leaves:
                for filled, leaf in self._fetcher.take(current, group):
                    if filled.local_weight.requires_grad:
                        leaf.requires_grad_()
                        arrived_here = partial(self._arrived, current, filled)
                        leaf.register_post_accumulate_grad_hook(arrived_here)
                    current.leaves[filled] = leaf
            current.missing.setdefault(group, []).append(table)
        return unique, current.leaves[table]

    def block_entered(self) -> None:
        """Dense work lies between what was looked up before and what comes after."""
        if self.current is not None:
            self.current.boundaries.add(len(self.current.used))

    # What the schedule calls, batch by batch.

    def prefetch(self, ahead: Ahead, volatile: dict[ShardedTable, Tensor]) -> None:
        """Send for the rows of the next batch that no gradient under way will change."""
        self._fetcher.fetch_early(ahead, volatile)

    def begin(self, ahead: Ahead) -> None:
        """Update the rows that this batch looks up, then send for those not fetched ahead."""
        for table, steps in self._due.items():
            asked = ahead.rows.get(table)
            while steps and (len(steps) > 1 or asked is None or steps[0].begun):
                steps.pop(0).take_rest(self._stepper, self._runner)
            if steps and asked is not None:
                steps[0].take_first(self._stepper, self._runner, asked.mask)
        self._fetcher.regroup(self.current)
        self.current = self._fetcher.begin(ahead)

    def volatile(self) -> dict[ShardedTable, Tensor]:
        """By table, the rows that gradients under way or to come will change; bool `[V]`.

        Tables whose optimizer moves all rows are left out: nothing of them is stable.
        """
        masks = {}
        for table in self._tables:
            if self._stepper.moves_all_rows(table.local_weight, table.sparse):
                continue
            current = self.current
            asked = None if current is None else current.rows.get(table)
            changing = torch.zeros(table.num_embeddings, dtype=torch.bool)
            if asked is not None:
                changing |= asked.mask
            pieces = [*self._open[table], *(p for due in self._due[table] for p in due.pieces)]
            for piece in pieces:
                changing[piece.union] = True
            masks[table] = changing
        return masks

    def forget_early(self) -> None:
        """The weights were replaced: rows fetched ahead are no longer theirs."""
        self._fetcher.forget_early()

    # What becomes of gradients.

    def due(self, settings: list[Group]) -> None:
        """The user's optimizer has stepped."""
        self._send_rest()
        for table, pieces in self._open.items():
            if pieces:
                self._due[table].append(DueStep(table, settings, pieces))
                self._open[table] = []
            if isinstance(table.local_weight.grad, PendingGrad):
                table.local_weight.grad = None

    def update_all(self) -> None:
        """Take all steps that are due, to their end."""
        for steps in self._due.values():
            while steps:
                steps.pop(0).take_rest(self._stepper, self._runner)

    def bring_home(self) -> None:
        """Put all gradients under way into `local_weight.grad`."""
        self._send_rest()
        for table, pieces in self._open.items():
            if pieces:
                self._open[table] = []
                gradient = whole(table, pieces, self._runner)
                pending = arrived(table.local_weight)
                if pending is None:
                    table.local_weight.grad = gradient
                else:
                    pending.copy_(gradient)

    def drop(self) -> None:
        """Forget gradients that no step has asked for."""
        self._open = {table: [] for table in self._tables}

    # Checks.

    def _check(self, table: ShardedTable, ids: Tensor, unique: Tensor) -> None:
        flat = ids.reshape(-1).to(torch.int64)
        if len(unique):
            place = torch.searchsorted(unique, flat).clamp_max_(len(unique) - 1)
            strange = flat[unique.index_select(0, place) != flat]
        else:
            strange = flat
        if len(strange):
            raise ValueError(
                f"table '{table.name}' is asked for id {int(strange[0])} on rank"
                f" {self._exchange.rank}, which is not among the ids of the batch: give"
                " schedule(..., ids=...) a function that returns all ids that the table looks up"
            )

    # Gradients.

    def _arrived(self, current: Current, table: ShardedTable, leaf: Tensor) -> None:
        group = self._fetcher.group_of(table)
        missing = current.missing[group]
        missing.remove(table)
        if not missing:
            used = [t for t in self._fetcher.groups[group] if t in current.used]
            self._send(current, group, [t for t in used if current.leaves[t].grad is not None])

    def _send_rest(self) -> None:
        """Send the gradients of groups of which some tables got none."""
        current = self.current
        if current is None:
            return
        for i, group in enumerate(self._fetcher.groups):
            some = [t for t in group if t in current.leaves and current.leaves[t].grad is not None]
            if some:
                self._send(current, i, some)

    def _send(self, current: Current, group: int, tables: list[ShardedTable]) -> None:
        """Send a group's gradients: what the next batch needs first, all else last."""
        rank = self._exchange.rank
        upcoming = self._upcoming()
        needed: dict[ShardedTable, Tensor | None] = {}
        for table in tables:
            asked = upcoming.rows.get(table) if upcoming is not None else None
            whole_table = torch.ones(table.num_embeddings, dtype=torch.bool)
            needed[table] = whole_table if asked is None else asked.mask
        current.num_backwards += 1
        name = f"{self._label}@{current.step}.{current.num_backwards}.grads{group}"
        prior = subset(current.rows, needed, tables, rank, inside=True)
        delayed = subset(current.rows, needed, tables, rank, inside=False)
        next_batch = needed_by(current.step + 1, PRIOR_ROWS, group)
        one_after = needed_by(current.step + 2, DELAYED_ROWS, group)
        sent = [
            self._send_part(current, f"{name}.prior", prior, next_batch),
            self._send_part(current, f"{name}.delayed", delayed, one_after),
        ]
        for table in tables:
            current.leaves[table].grad = None
            self._open[table].append(
                Piece(current.rows[table].union, sent[0].get(table), sent[1].get(table))
            )
            weight = table.local_weight
            if weight.grad is None:
                weight.grad = pending_grad(_placeholder(table), self._arrive)
        current.missing[group] = list(tables)

    def _send_part(
        self, current: Current, name: str, rows: Subset, priority: int
    ) -> dict[ShardedTable, Arriving]:
        if not rows:
            return {}
        exchange = self._exchange
        gradients = []
        for table, places in zip(rows.tables, rows.places, strict=True):
            gradient = current.leaves[table].grad
            assert gradient is not None
            gradients.append(
                gradient if len(places) == len(gradient) else gradient.index_select(0, places)
            )
        make = partial(
            return_rows,
            name,
            rows.parts,
            gradients,
            exchange.scale,
            exchange.rank,
            exchange.num_ranks,
        )
        future = self._runner.submit(name, make, priority)
        if not self._overlap:
            self._runner.wait(future, name, "gradients")
        return {table: Arriving(name, future, i) for i, table in enumerate(rows.tables)}


def _placeholder(table: ShardedTable) -> Tensor:
    weight = table.local_weight
    if not table.sparse:
        return torch.empty_like(weight.detach())
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64),
        weight.detach().new_empty(0, weight.shape[1]),
        tuple(weight.shape),
        check_invariants=False,
    )
