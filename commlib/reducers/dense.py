"""dense: the allreduce of the whole matrix, as if nothing were sparse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commlib.collectives.requests import AllReduce, Protocol
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState, request_name
from commlib.reducers.gradient import Gradient
from commlib.reducers.union import all_reduce_steps
from commlib.topology.link import Step, Workload


@dataclass(frozen=True, kw_only=True)
class Dense(Reducer):
    """One allreduce; steps 2, bytes 2(n-1)/n V D w. A dense gradient holds the result itself.

    Source: what DDP does.
    """

    name: ClassVar[str] = "dense"

    def protocol(
        self, gradient: Gradient, state: ReducerState, context: Context
    ) -> Protocol[Reduced]:
        matrix = yield AllReduce(
            name=request_name(context, state, "dense"),
            tensor=gradient.dense(),
            op="mean" if context.average else "sum",
        )
        return Reduced(self.name, dense=matrix)

    def steps(self, workload: Workload) -> tuple[Step, ...]:
        num_bytes = workload.num_rows * workload.row_bytes
        exchange = all_reduce_steps(num_bytes, workload.num_ranks, workload.element_bytes)
        if workload.dense_input:
            return tuple(exchange)
        # Rows are scattered into a cleared matrix; the result is scanned, and its rows gathered.
        return (Step("local", 2 * num_bytes), *exchange, Step("local", 3 * num_bytes))
