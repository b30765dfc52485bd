"""The contract of a reducer: local gradient in, reduced gradient out, same bits on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from commlib.collectives.requests import Protocol
from commlib.reducers.gradient import Gradient
from commlib.reducers.index import Index
from commlib.rows import SparseRows
from commlib.topology.link import Link, Step, Workload


@dataclass(slots=True)
class ReducerState:
    """What one parameter keeps from step to step.

    All but `residual` is agreed: every rank holds the same values, so sizes and choices may be
    computed from them. `residual` is the rank's own.

    Args:
        step: Reductions so far; also the source of fresh seeds.
        rows: S of the last step where it is known.
        union: U of the last step; -1 before the first.
        slot_bytes: Slot of the next index round; -1 before the first.
        announce: Announced ids are to be used; ends when one proved wrong.
        residual: `[V, D]` compression error not yet sent, fp32 or fp64.
    """

    step: int = 0
    rows: float = 0.0
    union: int = -1
    slot_bytes: int = -1
    announce: bool = True
    residual: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Where and how one reduction runs.

    Args:
        name: The parameter's name; with the step it names the requests.
        rank: This rank in the group.
        num_ranks: n.
        average: Mean over ranks; else their sum.
        link: The agreed link, for automatic choice.
        index: Ids announced ahead, where an index round has run for this step.
    """

    name: str
    rank: int
    num_ranks: int
    average: bool = True
    link: Link = field(default_factory=Link)
    index: Index | None = None

    @property
    def scale(self) -> float:
        """What a sum over ranks is multiplied with."""
        return 1.0 / self.num_ranks if self.average else 1.0


@dataclass(slots=True)
class Reduced:
    """A reduced gradient: rows outside which it is zero, or the dense `[V, D]` matrix.

    Args:
        reducer: Name of the algorithm that made it.
        rows: The union's rows; None when `dense` is given.
        dense: The whole matrix; None when `rows` is given.
        local_rows: Rows of this rank's gradient, -1 where nobody looked.
        omega: Relative squared error expected of a lossy method, else 0.
        bytes_sent: Bytes this rank sent; set by the caller that counts them.
    """

    reducer: str
    rows: SparseRows | None = None
    dense: Tensor | None = None
    local_rows: int = -1
    omega: float = 0.0

    def to_rows(self) -> SparseRows:
        """The result as rows; a dense one gives all rows with a non-zero bit."""
        if self.rows is not None:
            return self.rows
        assert self.dense is not None
        from commlib.reducers.gradient import DenseGradient

        return DenseGradient(self.dense).rows()


class Reducer(ABC):
    """One algorithm, as a frozen config that makes protocols.

    `protocol` takes the local gradient and leaves it as it was, unless the result shares its
    memory; afterwards the returned result holds the mean (or sum) over ranks, bitwise equal on
    all of them.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool] = False

    @property
    def uses_index(self) -> bool:
        """Whether ids announced in the forward pass are of use."""
        return False

    @abstractmethod
    def protocol(
        self, gradient: Gradient, state: ReducerState, context: Context
    ) -> Protocol[Reduced]:
        """The requests of one reduction, and its result."""

    @abstractmethod
    def steps(self, workload: Workload) -> tuple[Step, ...]:
        """Exchanges and local work of one reduction, in order; bytes are the mean over ranks."""

    def estimate_bytes(self, workload: Workload) -> float:
        """Bytes that a rank sends on average; equal to what `LocalTransport` counts."""
        return sum(step.num_bytes for step in self.steps(workload) if step.kind != "local")


def request_name(context: Context, state: ReducerState, what: str) -> str:
    """Agreed name of a request: parameter, step, round."""
    return f"{context.name}@{state.step}.{what}"
