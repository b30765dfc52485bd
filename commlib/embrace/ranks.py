"""Which ranks share tables, and what carries bytes between them."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from commlib.schedule.peers import GroupPeers, Peers

TransportName = Literal["c10d", "horovod"]


def find_ranks(
    group: dist.ProcessGroup | None, transport: TransportName
) -> tuple[dist.ProcessGroup, Peers]:
    """The process group of the tables' DTensors, and the ranks to talk to.

    Under Horovod the group carries no tables; it is torch.distributed's default one, made on
    Horovod's ranks where there is none.

    Raises:
        ValueError: torch.distributed or Horovod is not initialised, this rank is not in the group,
            an unknown transport, or a group that is not Horovod's.
        ImportError: Horovod is not installed.
    """
    if transport not in ("c10d", "horovod"):
        raise ValueError(f"transport = {transport!r} must be 'c10d' or 'horovod'")
    if transport == "c10d":
        group = _as_group(group)
        return group, GroupPeers(group)
    if group is not None:
        raise ValueError('transport="horovod" takes all of Horovod\'s ranks: leave group out')
    import commlib.horovod  # noqa: F401  # its error says how to install Horovod
    from commlib.schedule.horovod import HorovodPeers
    from commlib.schedule.horovod_group import default_group

    peers = HorovodPeers()
    return default_group(peers), peers


def _as_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "no process group: call torch.distributed.init_process_group before sharding tables"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"rank {dist.get_rank()} is not in the group that was given")
    return group
