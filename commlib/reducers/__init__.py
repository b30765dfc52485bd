"""Gradients in, reduced gradients out; one algorithm a file, all behind `Reducer.protocol`."""

from __future__ import annotations

from commlib.reducers.allgather import AllGatherRows
from commlib.reducers.auto import Auto
from commlib.reducers.balanced import Balanced
from commlib.reducers.base import Context, Reduced, Reducer, ReducerState
from commlib.reducers.dense import Dense
from commlib.reducers.minimal import Minimal
from commlib.reducers.noop import Noop
from commlib.reducers.sketch import S2
from commlib.reducers.union import Union

REDUCERS: dict[str, type[Reducer]] = {
    reducer.name: reducer
    for reducer in (Noop, Dense, AllGatherRows, Union, Balanced, Minimal, S2, Auto)
}


def as_reducer(reducer: Reducer | str | None) -> Reducer:
    """A reducer from its config or name; None is `auto`, exact.

    Raises:
        ValueError: A name that no reducer has.
        TypeError: Neither a config nor a name.
    """
    if reducer is None:
        return Auto()
    if isinstance(reducer, Reducer):
        return reducer
    if isinstance(reducer, str):
        if reducer not in REDUCERS:
            raise ValueError(
                f"reducer = {reducer!r} must be one of {sorted(REDUCERS)}; 'auto' is exact"
            )
        return REDUCERS[reducer]()
    raise TypeError(
        f"reducer = {reducer!r} must be a name of {sorted(REDUCERS)} or a config such as"
        " commlib.S2(ratio=0.25)"
    )


__all__ = [
    "REDUCERS",
    "S2",
    "AllGatherRows",
    "Auto",
    "Balanced",
    "Context",
    "Dense",
    "Minimal",
    "Noop",
    "Reduced",
    "Reducer",
    "ReducerState",
    "Union",
    "as_reducer",
]
