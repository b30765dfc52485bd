"""What is kept of a table's reducer state, as tensors, numbers and text only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from commlib.reducers import ReducerState


def as_saved(state: ReducerState) -> dict[str, Any]:
    """All fields; the residual is the live tensor, as in `torch.optim`."""
    return {field.name: getattr(state, field.name) for field in fields(ReducerState)}


def from_saved(entry: Mapping[str, Any]) -> ReducerState:
    """A state of its own: the residual is copied."""
    residual = entry["residual"]
    return ReducerState(**{**entry, "residual": None if residual is None else residual.clone()})


def agreed_part(state: ReducerState) -> dict[str, Any]:
    """What every rank holds alike: all but the residual."""
    return {**as_saved(state), "residual": None}


def check_residual(name: str, entry: Mapping[str, Any], shape: tuple[int, int]) -> None:
    """Refuse a residual that is not of the table's shape.

    Raises:
        ValueError: It is not; names both shapes.
    """
    residual = entry["residual"]
    if residual is not None and tuple(residual.shape) != shape:
        raise ValueError(
            f"the checkpoint's residual of {name!r} is {tuple(residual.shape)}, the table"
            f" {shape}: load it into the same model"
        )
