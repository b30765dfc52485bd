"""Lanes over Horovod: requests match by name, so each rank goes by its own priorities."""

from __future__ import annotations

import pickle
from typing import Any

import horovod.torch as hvd
import torch

from commlib.collectives.blame import Blame
from commlib.collectives.board import Board
from commlib.collectives.horovod import HorovodCommError, HorovodTransport
from commlib.collectives.rendezvous import RendezvousStore
from commlib.schedule.lane import Lane

# A rank that held a request back would wait for one that holds back another.
_NO_LIMIT = 1 << 62

_num_opened = 0


class HorovodPeers:
    """The ranks of a Horovod process set.

    Args:
        process_set: Who takes part; this rank must.

    Raises:
        ValueError: Horovod is not initialised, or this rank is not in the process set.

    Source: ours.
    """

    def __init__(self, process_set: hvd.ProcessSet | None = None) -> None:
        if not hvd.is_initialized():
            raise ValueError("Horovod is not initialised: call hvd.init() first")
        self.process_set = hvd.global_process_set if process_set is None else process_set
        if not self.process_set.included():
            raise ValueError(f"rank {hvd.rank()} is not in {self.process_set}")

    @property
    def rank(self) -> int:
        """This rank within the process set."""
        return int(self.process_set.rank())

    @property
    def num_ranks(self) -> int:
        """Ranks in the process set."""
        return int(self.process_set.size())

    def gather(self, what: str, item: Any) -> list[Any]:
        """Every rank's item, in rank order; all ranks ask for the same `what` at a time."""
        data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        name = f"commlib.gather.{what}"
        length = torch.tensor([len(data)])
        sizes = hvd.allgather(length, name=f"{name}.sizes", process_set=self.process_set)
        everything = hvd.allgather(data, name=name, process_set=self.process_set)
        return [pickle.loads(part.numpy().tobytes()) for part in everything.split(sizes.tolist())]

    def open_lane(
        self,
        lane: str,
        timeout_s: float,
        board: Board | None = None,
        *,
        slice_bytes: int = _NO_LIMIT,
        credit_bytes: int = _NO_LIMIT,
    ) -> Lane:
        """A lane over these ranks; collective. Sizes are not used: Horovod cuts and fuses."""
        global _num_opened
        # New workers of an elastic job have opened less than those who were there before.
        number = 1 + max(self.gather("open", _num_opened))
        _num_opened = number
        scope = f"commlib.{lane}.{number}"
        ranks = tuple(range(self.num_ranks))
        board = board or Board(RendezvousStore.open(scope), ranks, self.rank)
        blame = Blame(board, self.rank, HorovodCommError)
        transport = HorovodTransport(self.process_set, scope, blame, timeout_s)
        return Lane(f"commlib.{lane}", transport, [], slice_bytes=_NO_LIMIT, credit_bytes=_NO_LIMIT)
