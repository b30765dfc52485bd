"""Finds tables that no module names: large parameters whose gradients have mostly zero rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commlib import ops
from commlib.collectives.requests import AllReduce, Protocol
from commlib.frontend.tables import Table

WATCH_STEPS = 3
MAX_DENSITY = 0.1


class DensityWatch:
    """Measures some dense parameters for three steps; then all ranks decide together.

    Args:
        shapes: `[V, D]` of the parameters to watch, by name.

    A parameter becomes a table if on no rank and in no watched step more than a tenth of its rows
    were non-zero.

    Source: ours.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self._shapes = dict(shapes)
        self._seen: dict[str, list[float]] = {name: [] for name in shapes}
        self._found: list[str] = []

    def names(self) -> set[str]:
        """All parameters that are or were watched."""
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, int]:
        """`[V, D]`."""
        return self._shapes[name]

    def watches(self, name: str) -> bool:
        """Whether this parameter is still being measured."""
        return name in self._seen

    def measure(self, name: str, gradient: Tensor) -> None:
        """Note the row density of this rank's gradient, before it is reduced."""
        matrix = gradient.view(self._shapes[name])
        self._seen[name].append(ops.bitmap_count(ops.scan_rows(matrix)) / matrix.shape[0])

    def decide(self, name: str) -> Protocol[Table | None]:
        """After the third step: a table, if every rank saw it sparse. Asks nothing before."""
        seen = self._seen[name]
        if len(seen) < WATCH_STEPS:
            return None
        densest = yield AllReduce(
            name=f"{name}.density", tensor=torch.tensor([max(seen)], dtype=torch.float64), op="max"
        )
        del self._seen[name]
        if float(densest) > MAX_DENSITY:
            return None
        self._found.append(name)
        return Table(name, self._shapes[name])

    def state_dict(self) -> dict[str, Any]:
        """Readings so far, and what they led to."""
        return {
            "seen": {name: list(seen) for name, seen in self._seen.items()},
            "found": list(self._found),
        }

    @staticmethod
    def found_in(state_dict: Mapping[str, Any]) -> set[str]:
        """The tables that a saved watch had found."""
        return set(state_dict["found"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Table]:
        """Go on where another watch was; gives the tables that it had found."""
        seen = state_dict["seen"]
        self._seen = {name: list(seen[name]) for name in self._shapes if name in seen}
        self._found = list(state_dict["found"])
        return {name: Table(name, self._shapes[name]) for name in self._found}
