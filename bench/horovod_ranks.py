"""Horovod on ranks that are there already: what horovodrun would have done for them.

    rank 0        starts the rendezvous server, a process of its own on rank 0's host
    every rank    learns by torch.distributed where it is, and from its neighbours' local ranks
                  which place it has; then Horovod connects the ranks by itself

Nothing here is imported from Horovod before it is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

PREFIX = "horovod-"
"""Starts the names of methods that need Horovod."""

INSTALL = "commlib install-horovod"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """A rank's place; the fields are those of Horovod's SlotInfo, which its server reads.

    Attributes:
        hostname: Stands for the host; no address.
        rank: Of all.
        local_rank: On its host.
        cross_rank: Among the ranks of this local rank, one a host.
        size: Ranks.
        local_size: Ranks on its host.
        cross_size: Hosts that have this local rank.
    """

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def environment(self) -> dict[str, str]:
        """Returns what Horovod reads its place from."""
        return {f"HOROVOD_{key.upper()}": str(value) for key, value in vars(self).items()}


def place(local_ranks: Sequence[int]) -> list[Slot]:
    """Places ranks on hosts.

    Args:
        local_ranks: Of each rank, in their order; a 0 begins the next host.

    Raises:
        ValueError: A host's local ranks do not count up from 0.
    """
    hosts: list[list[int]] = []
    for rank, local_rank in enumerate(local_ranks):
        if local_rank == 0:
            hosts.append([])
        if not hosts or local_rank != len(hosts[-1]):
            raise ValueError(f"local ranks {list(local_ranks)} do not count up on each host")
        hosts[-1].append(rank)
    return [
        Slot(
            hostname=f"host{idx}",
            rank=rank,
            local_rank=local_rank,
            cross_rank=sum(len(host) > local_rank for host in hosts[:idx]),
            size=len(local_ranks),
            local_size=len(ranks),
            cross_size=sum(len(host) > local_rank for host in hosts),
        )
        for idx, ranks in enumerate(hosts)
        for local_rank, rank in enumerate(ranks)
    ]


def wanted(methods: Iterable[str]) -> list[str]:
    """Returns those of the methods that need Horovod."""
    return [name for name in methods if name.startswith(PREFIX)]


def why_not() -> str | None:
    """Returns why Horovod cannot be had here, or None if it can."""
    if importlib.util.find_spec("horovod") is None:
        return f"Horovod is not installed: run `{INSTALL}`, or leave these methods out"
    return None


def require(methods: Iterable[str]) -> None:
    """Refuses methods that cannot run here.

    Raises:
        SystemExit: Some need Horovod, and it is not there; says how to get it.
    """
    names, reason = wanted(methods), why_not()
    if names and reason is not None:
        raise SystemExit(f"{', '.join(names)}: {reason}")


@contextlib.contextmanager
def joined(methods: Iterable[str]) -> Iterator[None]:
    """Initialises Horovod on the ranks of the default group, and shuts it down; collective.

    Needs LOCAL_RANK, MASTER_ADDR and GLOO_SOCKET_IFNAME, as `netlab.launch` sets them.

    Args:
        methods: What will be measured; Horovod is left alone if none of them needs it.

    Raises:
        SystemExit: It is needed and not installed.
    """
    methods = list(methods)
    require(methods)
    if not wanted(methods):
        yield
        return
    with contextlib.ExitStack() as stack:
        local_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(local_ranks, int(os.environ["LOCAL_RANK"]))
        port: list[int | None] = [None]
        if dist.get_rank() == 0:
            port = [stack.enter_context(_server(local_ranks))]
        dist.broadcast_object_list(port, 0)
        os.environ.update(place(local_ranks)[dist.get_rank()].environment())
        os.environ |= {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"],
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port[0]),
            "HOROVOD_GLOO_IFACE": os.environ["GLOO_SOCKET_IFNAME"],
        }
        hvd = importlib.import_module("horovod.torch")
        hvd.init()
        yield
        dist.barrier()
        hvd.shutdown()


@contextlib.contextmanager
def _server(local_ranks: Sequence[int]) -> Iterator[int]:
    """Runs the rendezvous server beside this process; gives its port."""
    argv = [sys.executable, "-m", "bench.horovod_ranks", *map(str, local_ranks)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("Horovod's rendezvous server did not start")
        yield int(line)
        process.stdin.close()


def _serve(local_ranks: Sequence[int]) -> None:
    """Is the server, until standard input ends, as it does with the process that started this."""
    module = importlib.import_module("horovod.runner.http.http_server")
    server = module.RendezvousServer()
    port = server.start()
    server.init(place(local_ranks))
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    _serve([int(word) for word in sys.argv[1:]])
