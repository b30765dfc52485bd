"""What `DistributedOptimizer` takes beyond Horovod's own arguments."""

from __future__ import annotations

from dataclasses import dataclass

import horovod.torch as hvd

from commlib.reducers import Reducer
from commlib.topology import Link

MAX_TIMEOUT_S = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Validated once, equal on all ranks.

    Args:
        reducer: For tables.
        average: Mean over ranks; else their sum.
        sparse_as_dense: Sparse gradients are Horovod's, made dense.
        link: Cost of the network; None measures it.
        timeout_s: Longest wait for one request.
        process_set: Who takes part.
    """

    reducer: Reducer
    average: bool
    sparse_as_dense: bool
    link: Link | None
    timeout_s: float
    process_set: hvd.ProcessSet

    def __post_init__(self) -> None:
        if self.link is not None and not isinstance(self.link, Link):
            raise TypeError(f"link = {self.link!r} must be a commlib.topology.Link or None")
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not (number and 0 < self.timeout_s <= MAX_TIMEOUT_S):
            raise ValueError(
                f"timeout_s = {self.timeout_s!r} must be a number of seconds > 0,"
                f" at most {MAX_TIMEOUT_S:g}"
            )
