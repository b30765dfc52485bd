"""The ranks that work together, and how to open lanes between them."""

from __future__ import annotations

import typing
from typing import Any

import torch.distributed as dist

from commlib.collectives.board import Board
from commlib.schedule.lane import CREDIT_BYTES, SLICE_BYTES, Lane
from commlib.schedule.open import open_lane


class Peers(typing.Protocol):
    """A group of ranks; every method but the properties is collective over them."""

    @property
    def rank(self) -> int:
        """This rank within the group."""

    @property
    def num_ranks(self) -> int:
        """Ranks in the group."""

    def gather(self, what: str, item: Any) -> list[Any]:
        """Every rank's item, in rank order; `what` names the occasion."""

    def open_lane(
        self,
        lane: str,
        timeout_s: float,
        board: Board | None = None,
        *,
        slice_bytes: int = SLICE_BYTES,
        credit_bytes: int = CREDIT_BYTES,
    ) -> Lane:
        """A lane over these ranks, as `commlib.schedule.open_lane`."""


class GroupPeers:
    """The ranks of a torch.distributed process group.

    Args:
        group: The group.

    Source: ours.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        """As `Peers`."""
        return self.group.rank()

    @property
    def num_ranks(self) -> int:
        """As `Peers`."""
        return self.group.size()

    def gather(self, what: str, item: Any) -> list[Any]:
        """As `Peers`; collectives of a group match by order, so `what` is not needed."""
        items: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(items, item, group=self.group)
        return items

    def open_lane(
        self,
        lane: str,
        timeout_s: float,
        board: Board | None = None,
        *,
        slice_bytes: int = SLICE_BYTES,
        credit_bytes: int = CREDIT_BYTES,
    ) -> Lane:
        """As `Peers`."""
        ranks = dist.get_process_group_ranks(self.group)
        return open_lane(
            lane, ranks, timeout_s, board, slice_bytes=slice_bytes, credit_bytes=credit_bytes
        )
