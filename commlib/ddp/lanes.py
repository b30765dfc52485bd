"""The lanes of one DDP instance: process groups, transports and threads that nobody else uses.

Three lanes: an index round may wait for another rank's forward pass, and values must not wait
behind it; dense gradients must not wait behind tables whose index is late. Groups of their own,
because the user's thread issues collectives on DDP's group at the same time, and collectives match
by order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from commlib.schedule import Lane, open_lane


@dataclass(frozen=True, slots=True)
class Lanes:
    """`data` carries the values of tables, `dense` all other gradients, `index` index rounds."""

    data: Lane
    dense: Lane
    index: Lane

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
        for lane in (self.data, self.dense, self.index):
            lane.close()
