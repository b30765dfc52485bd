"""Horovod frontend: change the import, keep the script.

import horovod.torch as hvd
from commlib.horovod import DistributedOptimizer          # was hvd.DistributedOptimizer

Raises:
    ImportError: Horovod is not installed; says how to install it.
"""

from __future__ import annotations

try:
    import horovod.torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"commlib.horovod needs Horovod with PyTorch ({error}): run `commlib install-horovod`,"
        " which builds it for the torch that is installed"
    ) from error

from commlib.horovod.broadcast import broadcast_optimizer_state, broadcast_parameters
from commlib.horovod.optimizer import DistributedOptimizer
from commlib.horovod.state import State

__all__ = [
    "DistributedOptimizer",
    "State",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
