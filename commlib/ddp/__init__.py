"""DDP frontend: one line turns sparse allreduce on.

ddp = DistributedDataParallel(model)
commlib.ddp.register(ddp)                            # exact, automatic
commlib.ddp.register(ddp, commlib.S2(ratio=0.25))    # lossy, with error feedback
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations as objects.
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from commlib.ddp.state import State
from commlib.reducers import Reducer

__all__ = ["State", "hook", "register"]

OPTIONS = {"tables", "dense", "find_sparse", "link", "timeout_s", "trace"}


def hook(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook; `ddp.register_comm_hook(commlib.ddp.State(ddp), commlib.ddp.hook)`.

    Args:
        state: Made for this DDP instance.
        bucket: Dense, or the sparse gradient of one `sparse=True` table.

    Returns:
        A future of the averaged bucket, of the bucket's own layout, bitwise equal on all ranks.
    """
    return state.reduce(bucket)


def register(
    ddp: DistributedDataParallel, reducer: Reducer | str | None = None, **options: Any
) -> State:
    """Reduce this DDP instance's gradients with commlib; call on every rank before training.

    Args:
        ddp: The DDP instance.
        reducer: None: exact, the cheapest algorithm chosen per table and step. `commlib.S2(...)`:
            lossy with error feedback. Or a config or name from `commlib.reducers`.
        **options: `tables`, `dense`, `find_sparse`, `link`, `timeout_s`, `trace`: see `State`.

    Returns:
        The state: `stats()`, `state_dict()`, `close()`.

    Raises:
        ValueError, TypeError: As `State`, at once and on every rank.
    """
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise TypeError(f"register() has no option {unknown}; there are {sorted(OPTIONS)}")
    state = State(ddp, reducer, **options)
    ddp.register_comm_hook(state, hook)
    return state
