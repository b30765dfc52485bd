"""`commlib doctor`'s worker: one of two processes that measure the loopback link between them."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
import sys

_TIMEOUT_S = 60.0


def loopback_env() -> dict[str, str]:
    """Returns this process's environment, with Gloo told to use loopback."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {**os.environ, **({"GLOO_SOCKET_IFNAME": names[0]} if names else {})}


def ping() -> dict[str, float]:
    """Measures the link from a new process of its own and a second one.

    Returns:
        The fields of `commlib.topology.Link`.

    Raises:
        RankError: It did not work; says why.
    """
    from commlib.cli.processes import run_ranks

    lines: list[str] = []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "commlib.cli.ping"]
    run_ranks([command], [loopback_env()], timeout_s=_TIMEOUT_S, on_line=lines.append)
    link: dict[str, float] = json.loads(next(line for line in lines if line.startswith("{")))
    return link


def main() -> None:
    """Measures, and prints the link as JSON (rank 0)."""
    import torch
    import torch.distributed as dist

    from commlib.cli.leave import leave
    from commlib.schedule import open_lane
    from commlib.topology.probe import probe_link

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_TIMEOUT_S))
    lane = open_lane("ping", list(range(dist.get_world_size())), _TIMEOUT_S)
    link = probe_link(lane)
    lane.close()
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(dataclasses.asdict(link)) + "\n")
    leave()


if __name__ == "__main__":
    main()
