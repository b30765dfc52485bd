"""The lanes of one DDP instance: process groups, transports and threads that nobody else uses.

Two lanes, because an index round may wait for another rank's forward pass, and values must not
wait behind it. Groups of their own, because the user's thread issues collectives on DDP's group at
the same time, and collectives match by order.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlib.collectives.board import Board
from commlib.collectives.c10d import C10dTransport
from commlib.collectives.driver import Driver


@dataclass(frozen=True, slots=True)
class Lanes:
    """`index` carries index rounds, `data` everything else."""

    data: Driver
    index: Driver

    @classmethod
    def open(cls, group: dist.ProcessGroup, timeout_s: float) -> Lanes:
        """Make both lanes over the ranks of `group`; collective over them."""
        ranks = dist.get_process_group_ranks(group)
        drivers = [open_lane(lane, ranks, timeout_s) for lane in ("data", "index")]
        return cls(*drivers)

    def close(self) -> None:
        """End the threads and give the groups back."""
        for driver in (self.data, self.index):
            driver.close()
            if driver.transport.failed is None:
                dist.destroy_process_group(driver.transport.group)


def open_lane(lane: str, ranks: list[int], timeout_s: float) -> Driver:
    """One lane over global `ranks`: a new Gloo group and the driver on it."""
    group = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout_s),
        backend="gloo",
        use_local_synchronization=True,
        group_desc=f"commlib.{lane}",
    )
    store = distributed_c10d._get_default_store()
    board = Board.open(store, f"{group.group_name}/{lane}", tuple(ranks), group.rank())
    transport = C10dTransport(group, board, timeout_s)
    return Driver(f"commlib.{lane}", transport)
