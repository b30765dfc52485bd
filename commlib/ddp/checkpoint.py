"""What a resumed run needs of the hook's state, as tensors, numbers and text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commlib.frontend.saved import as_saved, check_residual, from_saved

if TYPE_CHECKING:
    from commlib.ddp.state import State

VERSION = 1


def save(state: State) -> dict[str, Any]:
    """The state of this rank; residuals are the live tensors, as in `torch.optim`."""
    return {
        **_layout(state),
        "density": state.density.state_dict(),
        "tables": {name: as_saved(entry) for name, entry in state.reducer_states.items()},
    }


def load(state: State, saved: Mapping[str, Any]) -> None:
    """Put what `save` gave into `state`; residuals are copied.

    Raises:
        ValueError: Another layout or set of tables; nothing is changed.
    """
    if not (isinstance(saved, Mapping) and {"version", "density", "tables"} <= set(saved)):
        raise ValueError(
            f"{type(saved).__name__} is no state that commlib saved: pass what state_dict() gave"
        )
    for key, value in _layout(state).items():
        if saved.get(key) != value:
            raise ValueError(
                f"the checkpoint's {key} = {saved.get(key)!r}, here it is {value!r}:"
                " residuals belong to one rank of one world size and one reducer;"
                " load on the same layout, or start without this state"
            )
    _check_tables(state, saved)
    state.tables.update(state.density.load_state_dict(saved["density"]))
    for name, entry in saved["tables"].items():
        state.reducer_states[name] = from_saved(entry)


def _layout(state: State) -> dict[str, Any]:
    """What has to be equal where a state is saved and where it is loaded."""
    return {
        "version": VERSION,
        "num_ranks": state.num_ranks,
        "rank": state.rank,
        "reducer": repr(state.options.reducer),
    }


def _check_tables(state: State, saved: Mapping[str, Any]) -> None:
    found = state.density.found_in(saved["density"])
    known = {*state.tables, *(found & state.density.names())}
    theirs = set(saved["tables"])
    if theirs != known:
        raise ValueError(
            f"the checkpoint has tables {sorted(theirs - known)} that the model has not, and"
            f" lacks {sorted(known - theirs)}: load it into the same model"
        )
    for name, entry in saved["tables"].items():
        shape = state.tables[name].shape if name in state.tables else state.density.shape(name)
        check_residual(name, entry, shape)
