"""Lets `hvd.elastic.TorchState` keep what commlib's optimizers know, beside their own state.

What all ranks agreed on is taken over from rank 0 when they meet anew; a residual, which is one
rank's own, stays with its rank, also when the last commit is restored.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from horovod.torch.elastic import state as hvd_elastic

from commlib.frontend.saved import as_saved, from_saved
from commlib.horovod.state import State


class _OursType(type):
    def __instancecheck__(cls, optimizer: object) -> bool:
        return isinstance(optimizer, torch.optim.Optimizer) and isinstance(
            getattr(optimizer, "commlib", None), State
        )


class _Ours(metaclass=_OursType):
    """Every optimizer that `commlib.horovod.DistributedOptimizer` made."""


class _Handler(hvd_elastic.OptimizerStateHandler):  # type: ignore[misc]
    """Commits and restores reducer states with the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._saved = _snapshot(optimizer)

    def save(self) -> None:
        """A commit."""
        super().save()
        self._saved = _snapshot(self.value)

    def restore(self) -> None:
        """Back to the last commit."""
        super().restore()
        self.value.commlib.reducer_states = {
            name: from_saved(entry) for name, entry in self._saved.items()
        }


def register() -> None:
    """Tell Horovod's elastic state of commlib's optimizers; once."""
    registry = hvd_elastic.get_handler_registry()
    if (_Ours, _Handler) not in registry:
        hvd_elastic.set_handler_registry([(_Ours, _Handler), *registry])


def _snapshot(optimizer: Any) -> dict[str, Any]:
    states = optimizer.commlib.reducer_states
    return {name: copy.deepcopy(as_saved(state)) for name, state in states.items()}
