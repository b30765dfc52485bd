"""What a resumed run needs of an optimizer's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commlib.frontend.saved import as_saved, check_residual, from_saved
from commlib.frontend.tables import matrix_shape
from commlib.horovod.layout import Layout

if TYPE_CHECKING:
    from commlib.horovod.state import State

VERSION = 1


def save(state: State) -> dict[str, Any]:
    """The state of this rank; residuals are the live tensors, as in `torch.optim`."""
    return {
        **_origin(state),
        "layouts": {n: [lay.sparse, lay.announced] for n, lay in state.layouts.items()},
        "tables": {name: as_saved(entry) for name, entry in state.reducer_states.items()},
    }


def load(state: State, saved: Mapping[str, Any]) -> None:
    """Put what `save` gave into `state`; residuals are copied.

    Raises:
        ValueError: Another layout or set of tables; nothing is changed.
    """
    if not (isinstance(saved, Mapping) and {"version", "layouts", "tables"} <= set(saved)):
        raise ValueError(
            f"{type(saved).__name__} is no state that commlib saved: pass what state_dict() gave"
        )
    for key, value in _origin(state).items():
        if saved.get(key) != value:
            raise ValueError(
                f"the checkpoint's {key} = {saved.get(key)!r}, here it is {value!r}:"
                " residuals belong to one rank of one world size and one reducer;"
                " load on the same layout, or start without this state"
            )
    for name, entry in saved["tables"].items():
        if name not in state.parameters or (state.settled and name not in state.layouts):
            raise ValueError(f"the checkpoint has table {name!r}, which the model has not")
        check_residual(name, entry, matrix_shape(state.parameters[name]))
    state.adopt(
        {name: Layout(*layout) for name, layout in saved["layouts"].items()},
        {name: from_saved(entry) for name, entry in saved["tables"].items()},
    )


def _origin(state: State) -> dict[str, Any]:
    """What has to be equal where a state is saved and where it is loaded."""
    process_set = state.options.process_set
    return {
        "version": VERSION,
        "num_ranks": process_set.size(),
        "rank": process_set.rank(),
        "reducer": repr(state.options.reducer),
    }
