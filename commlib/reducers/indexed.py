"""What reducers over a known index share: use announced ids, or run the index round now."""

from __future__ import annotations

from abc import abstractmethod

from commlib.collectives.requests import Protocol
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState, request_name
from commlib.reducers.gradient import Gradient
from commlib.reducers.guard import Guard
from commlib.reducers.index import Index, first_slot, index_round
from commlib.rows import SparseRows


class IndexedReducer(Reducer):
    """Exchanges values only, once all ranks know who holds which rows.

    With announced ids the exchange is guarded: if any rank's gradient has rows that it did not
    announce, all ranks learn it in that very exchange, run the index round and exchange again,
    and stop using announcements for this parameter.
    """

    @property
    def uses_index(self) -> bool:
        return True

    @abstractmethod
    def exchange(
        self, rows: SparseRows, index: Index, state: ReducerState, context: Context, guard: Guard
    ) -> Protocol[SparseRows | None]:
        """The values' rounds; None as soon as the guard has tripped."""

    def protocol(
        self, gradient: Gradient, state: ReducerState, context: Context
    ) -> Protocol[Reduced]:
        index = context.index
        if index is not None:
            rows = gradient.rows()
            covered = index.cover(rows, context.rank)
            guard = Guard(active=index.announced, raised=covered is None)
            if covered is None:
                covered = index.zeros(rows, context.rank)
            result = yield from self.exchange(covered, index, state, context, guard)
            if result is not None:
                return self._done(result, rows, index, state)
            state.announce = False
        index = yield from self.find_index(gradient, state, context)
        rows = gradient.rows()
        result = yield from self.exchange(rows, index, state, context, Guard(active=False))
        assert result is not None
        return self._done(result, rows, index, state)

    @staticmethod
    def find_index(gradient: Gradient, state: ReducerState, context: Context) -> Protocol[Index]:
        """The index round over the gradient's own rows, whose values are put in order meanwhile."""
        if state.slot_bytes < 0:
            state.slot_bytes = first_slot(gradient.num_rows)
        index = yield from index_round(
            request_name(context, state, "index"),
            gradient.indices(),
            gradient.num_rows,
            state.slot_bytes,
            context.rank,
            context.num_ranks,
            gradient.rows,
        )
        state.slot_bytes = index.next_slot_bytes
        return index

    def _done(
        self, result: SparseRows, rows: SparseRows, index: Index, state: ReducerState
    ) -> Reduced:
        state.rows, state.union = index.mean_rows, len(result.indices)
        return Reduced(self.name, rows=result, local_rows=len(rows.indices))
