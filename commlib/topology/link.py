"""The alpha-beta model of a link, and of the memory behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

StepKind = Literal["exchange", "ring", "local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a step costs on this machine and its network; equal on all ranks.

    Args:
        alpha_s: Seconds of one direct exchange of nothing between all ranks.
        beta_s: Seconds per byte that a rank sends directly.
        ring_s: Seconds per byte that a rank sends in a ring allreduce; None: as beta_s.
        memory_s: Seconds per byte of rows gathered, scattered or summed.

    Raises:
        ValueError: A cost that is negative or not finite.

    Source: alpha-beta model; memory term ours.
    """

    alpha_s: float = 1e-3
    beta_s: float = 8e-9
    ring_s: float | None = None
    memory_s: float = 5e-10

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s", "ring_s", "memory_s"):
            value = getattr(self, name)
            if name == "ring_s" and value is None:
                continue
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value} must be a finite number of seconds >= 0")

    def seconds(self, steps: Iterable[Step]) -> float:
        """Time of steps that run one after another."""
        total = 0.0
        for step in steps:
            if step.kind == "exchange":
                total += self.alpha_s + step.num_bytes * self.beta_s
            elif step.kind == "ring":
                ring_s = self.beta_s if self.ring_s is None else self.ring_s
                total += 2 * self.alpha_s + step.num_bytes * ring_s
            else:
                total += step.num_bytes * self.memory_s
        return total


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an algorithm: a direct exchange, a ring allreduce, or local work over rows.

    Args:
        kind: `exchange` and `ring` (a large allreduce) count bytes that a rank sends on average;
            `local` bytes it handles.
        num_bytes: Those bytes.
    """

    kind: StepKind
    num_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The size of one reduction, in the project's notation; equal on all ranks.

    Args:
        num_ranks: n.
        num_rows: V.
        dim: D, elements per row.
        element_bytes: w.
        rows: S, mean number of non-zero rows of a rank.
        union: U, rows that are non-zero on any rank.
        dense_input: The gradient arrives as a `[V, D]` matrix, so rows must be scanned for and
            a dense sum needs no conversion.
        index_bytes: Bytes that a rank sends in the index round; 0 once it has run.
        announced: Ids were announced, so the union is known before the step.
        own_rows: Mean number of a rank's rows whose hashed owner it is itself; default S/n.
    """

    num_ranks: int
    num_rows: int
    dim: int
    element_bytes: int
    rows: float
    union: int
    dense_input: bool = False
    index_bytes: float = 0.0
    announced: bool = False
    own_rows: float | None = None

    @property
    def row_bytes(self) -> int:
        """D w."""
        return self.dim * self.element_bytes

    @property
    def bitmap_bytes(self) -> int:
        """V/8, rounded up."""
        return (self.num_rows + 7) // 8

    @property
    def gamma(self) -> float:
        """U/S."""
        return self.union / self.rows if self.rows else 1.0

    def bound_bytes(self) -> float:
        """Least bytes that a rank sends on average: w D (S + U (n-2)/n), 0 with one rank.

        Derived: a row held by k ranks needs k + n - 2 messages on a point-to-point network.
        """
        if self.num_ranks == 1:
            return 0.0
        shared = self.union * (self.num_ranks - 2) / self.num_ranks
        return self.row_bytes * (self.rows + shared)
