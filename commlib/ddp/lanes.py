"""The lanes of one DDP instance: process groups, transports and threads that nobody else uses.

Three lanes: an index round may wait for another rank's forward pass, and values must not wait
behind it; dense gradients must not wait behind tables whose index is late. Groups of their own,
because the user's thread issues collectives on DDP's group at the same time, and collectives match
by order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from commlib.collectives.board import Board
from commlib.collectives.c10d import C10dTransport
from commlib.collectives.driver import Driver

# Gloo gives up this much later than the transport, whose error says more.
_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Lanes:
    """`data` carries the values of tables, `dense` all other gradients, `index` index rounds."""

    data: Driver
    dense: Driver
    index: Driver

    @classmethod
    def open(cls, group: dist.ProcessGroup, timeout_s: float) -> Lanes:
        """Make the lanes over the ranks of `group`; collective over them."""
        ranks = dist.get_process_group_ranks(group)
        data = open_lane("data", ranks, timeout_s)
        # One board: a rank that failed in one lane will not come to the others.
        board = data.transport.board
        others = [open_lane(lane, ranks, timeout_s, board) for lane in ("dense", "index")]
        return cls(data, *others)

    def close(self) -> None:
        """End the threads and give the groups back."""
        for driver in (self.data, self.dense, self.index):
            driver.close()
            driver.transport.close()


def open_lane(lane: str, ranks: list[int], timeout_s: float, board: Board | None = None) -> Driver:
    """One lane over global `ranks`: a Gloo group of its own and the driver on it.

    Collective over `ranks` and nobody else. The group is made beside torch's registry, which
    names groups by how many a rank is in: ranks that are in different numbers of groups, and a
    group made anew after it was destroyed, would not find each other.
    """
    store = distributed_c10d._get_default_store()
    name = f"{lane}/{hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()}"
    rank = ranks.index(dist.get_rank())
    # Every rank counts for itself how often it was here; it came here together with the others.
    name = f"{name}/{store.add(f'commlib/{name}/{rank}', 1)}"
    group = dist.ProcessGroupGloo(
        PrefixStore(f"commlib/{name}/gloo/", store),
        rank,
        len(ranks),
        timedelta(seconds=timeout_s + _MARGIN_S),
    )
    board = board or Board.open(store, name, tuple(ranks), rank)
    transport = C10dTransport(cast(dist.ProcessGroup, group), board, timeout_s)
    return Driver(f"commlib.{lane}", transport)
