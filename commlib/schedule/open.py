"""Opens a lane: a Gloo group of its own, made beside torch's registry."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from commlib.collectives.blame import Blame
from commlib.collectives.board import Board
from commlib.collectives.c10d import C10dTransport
from commlib.schedule.control import connect
from commlib.schedule.lane import CREDIT_BYTES, SLICE_BYTES, Lane

# Gloo gives up this much later than the transport, whose error says more.
_MARGIN_S = 5.0


def open_lane(
    lane: str,
    ranks: list[int],
    timeout_s: float,
    board: Board | None = None,
    *,
    slice_bytes: int = SLICE_BYTES,
    credit_bytes: int = CREDIT_BYTES,
) -> Lane:
    """One lane over global `ranks`: a Gloo group and control connections of its own.

    Collective over `ranks` and nobody else. The group is made beside torch's registry, which
    names groups by how many a rank is in: ranks that are in different numbers of groups, and a
    group made anew after it was destroyed, would not find each other.

    Args:
        lane: Names it; may be used again.
        ranks: Global ranks; the first one leads.
        timeout_s: Longest wait for one request.
        board: Where failures are told; lanes of one owner share one.
        slice_bytes: As `Lane`'s.
        credit_bytes: As `Lane`'s.

    Raises:
        CommError: The ranks did not find each other in time.

    Source: ours.
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
    transport = C10dTransport(cast(dist.ProcessGroup, group), Blame(board, rank), timeout_s)
    control = connect(store, name, rank, len(ranks), timeout_s)
    return Lane(
        f"commlib.{lane}", transport, control, slice_bytes=slice_bytes, credit_bytes=credit_bytes
    )
