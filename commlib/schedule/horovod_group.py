"""torch.distributed beside Horovod, on the same ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from commlib.schedule.control import own_address
from commlib.schedule.horovod import HorovodPeers

_TIMEOUT_S = 300


def default_group(peers: HorovodPeers) -> dist.ProcessGroup:
    """torch.distributed's default group; made, with Gloo, where there is none. Collective.

    Raises:
        ValueError: The default group has other ranks than Horovod.

    Source: ours.
    """
    if not dist.is_initialized():
        _initialise(peers)
    theirs = (dist.get_rank(), dist.get_world_size())
    if theirs != (peers.rank, peers.num_ranks):
        raise ValueError(
            f"rank {theirs[0]} of {theirs[1]} in torch.distributed is rank {peers.rank} of"
            f" {peers.num_ranks} in Horovod: initialise both alike, or Horovod alone"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _initialise(peers: HorovodPeers) -> None:
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = None
    if peers.rank == 0:
        store = TCPStore(own_address(), 0, is_master=True, wait_for_workers=False)
    place = peers.gather("store", None if store is None else (store.host, store.port))[0]
    if store is None:
        store = TCPStore(place[0], place[1], is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=peers.rank, world_size=peers.num_ranks, timeout=timeout
    )
