"""noop: nothing is exchanged. Shows what free communication would give; never trains right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commlib.collectives.requests import Protocol
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState
from commlib.reducers.gradient import Gradient
from commlib.topology.link import Step, Workload


@dataclass(frozen=True, kw_only=True)
class Noop(Reducer):
    """The local gradient, as it is; steps 0, bytes 0. Ranks drift apart: for headroom only.

    Source: torch's noop_hook.
    """

    name: ClassVar[str] = "noop"
    lossy: ClassVar[bool] = True

    def protocol(
        self, gradient: Gradient, state: ReducerState, context: Context
    ) -> Protocol[Reduced]:
        yield from ()  # a generator that asks for nothing
        rows = gradient.rows()
        return Reduced(self.name, rows=rows, local_rows=len(rows.indices))

    def steps(self, workload: Workload) -> tuple[Step, ...]:
        return ()
