"""auto: the cheapest exact reducer for the link, chosen alike on every rank without a message."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from commlib.collectives.requests import Protocol
from commlib.reducers.allgather import AllGatherRows
from commlib.reducers.balanced import Balanced
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState
from commlib.reducers.dense import Dense
from commlib.reducers.gradient import DenseGradient, Gradient
from commlib.reducers.index import HEADER_BYTES
from commlib.reducers.indexed import IndexedReducer
from commlib.reducers.minimal import Minimal
from commlib.reducers.union import Union
from commlib.topology.link import Link, Step, Workload

CANDIDATES: tuple[Reducer, ...] = (
    Minimal(),
    AllGatherRows(),
    Union(),
    Balanced(),
    Dense(),
)
# A dense step does not look at rows; this often one looks again whether they have become sparse.
RELOOK_STEPS = 32


@dataclass(frozen=True, kw_only=True)
class Auto(Reducer):
    """Least time by the alpha-beta model over what every rank knows; costs what its choice costs.

    S and U are this step's where ids were announced, else the last step's. A first step without
    announcement runs the index round, and so does every 32nd step of a table gone dense.

    Source: ours.
    """

    name: ClassVar[str] = "auto"

    @property
    def uses_index(self) -> bool:
        return True

    def protocol(
        self, gradient: Gradient, state: ReducerState, context: Context
    ) -> Protocol[Reduced]:
        index = context.index
        unknown = state.union < 0 or state.step % RELOOK_STEPS == RELOOK_STEPS - 1
        if index is None and unknown:
            index = yield from IndexedReducer.find_index(gradient, state, context)
            context = replace(context, index=index)
        if index is not None:
            state.rows = index.mean_rows
            state.union = len(index.union())
        workload = Workload(
            num_ranks=context.num_ranks,
            num_rows=gradient.num_rows,
            dim=gradient.dim,
            element_bytes=gradient.dtype.itemsize,
            rows=state.rows,
            union=state.union,
            dense_input=isinstance(gradient, DenseGradient),
            index_bytes=0.0
            if index is not None
            else (context.num_ranks - 1) * float(HEADER_BYTES + max(0, state.slot_bytes)),
        )
        return (yield from self.choose(workload, context.link).protocol(gradient, state, context))

    @staticmethod
    def choose(workload: Workload, link: Link) -> Reducer:
        """The candidate whose steps take least time; the first of equals."""
        return min(CANDIDATES, key=lambda reducer: link.seconds(reducer.steps(workload)))

    def steps(self, workload: Workload) -> tuple[Step, ...]:
        return self.choose(workload, Link()).steps(workload)
