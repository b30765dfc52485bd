"""The lanes of one model: process groups, transports and threads that nobody else uses.

Three lanes: an index round may wait for another rank's forward pass, and values must not wait
behind it; dense gradients must not wait behind tables whose index is late. Groups of their own,
because the user's thread issues collectives on DDP's group at the same time, and collectives match
by order. Where requests match by name, one lane is all three.
"""

from __future__ import annotations

from dataclasses import dataclass

from commlib.schedule import Lane
from commlib.schedule.peers import Peers


@dataclass(frozen=True, slots=True)
class Lanes:
    """`data` carries the values of tables, `dense` all other gradients, `index` index rounds."""

    data: Lane
    dense: Lane
    index: Lane

    @classmethod
    def open(cls, peers: Peers, timeout_s: float) -> Lanes:
        """Make the lanes over the ranks of `peers`; collective over them."""
        data = peers.open_lane("data", timeout_s)
        if not data.transport.ordered:  # nothing waits behind anything: one thread will do
            return cls(data, data, data)
        # One board: a rank that failed in one lane will not come to the others.
        board = data.transport.blame.board
        others = [peers.open_lane(lane, timeout_s, board) for lane in ("dense", "index")]
        return cls(data, *others)

    def close(self) -> None:
        """End the threads and give the groups back."""
        for lane in (self.data, self.dense, self.index):
            lane.close()
