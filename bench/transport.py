"""When does a direct exchange beat Gloo's collectives? Small sizes count hops, large ones bytes.

    python -m bench.transport --ranks 4 --json FILE

`gather`: every rank gives one part to all others; `reduce`: an allreduce of n parts. Native is
torch.distributed's all_gather and all_reduce, direct what `C10dTransport` does, short is one joined
alltoall, long is point to point.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import netlab
from bench.harness import write_json
from bench.ranked import interleave_ranks
from commlib.cli.leave import leave
from commlib.collectives.c10d import C10dTransport
from commlib.collectives.exchange import start_exchange
from commlib.collectives.reduce import combine
from commlib.schedule import open_lane

PART_BYTES = (64, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20)


def candidates(transport: C10dTransport, num_bytes: int) -> dict[str, Callable[[], object]]:
    """The calls to compare for parts of one size."""
    n, group = transport.num_ranks, transport.group
    part = torch.ones(num_bytes // 4)
    outs = [torch.zeros_like(part) for _ in range(n)]
    whole = torch.ones(n, num_bytes // 4)

    def exchange(parts: list[Tensor], out: Tensor, short_bytes: int) -> None:
        sent = [one.view(torch.uint8) for one in parts]
        arriving = [row.view(torch.uint8) for row in out.unbind(0)]
        running = start_exchange(group, sent, arriving, short_bytes=short_bytes)
        for work in (running.gate, *running.direct):
            if work is not None:
                work.wait()
        running.finish()

    def gather(short_bytes: int) -> Callable[[], object]:
        return lambda: exchange([part] * n, torch.empty_like(whole), short_bytes)

    def reduce(short_bytes: int) -> Callable[[], object]:
        def run() -> Tensor:
            arrived, out = torch.empty_like(whole), torch.empty_like(whole)
            exchange(list(whole.unbind(0)), arrived, short_bytes)
            exchange([combine(list(arrived.unbind(0)), "max")] * n, out, short_bytes)
            return out

        return run

    always, never = 1 << 40, -1
    return {
        "gather native": lambda: dist.all_gather(outs, part),
        "gather short": gather(always),
        "gather long": gather(never),
        "reduce native": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX),
        "reduce short": reduce(always),
        "reduce long": reduce(never),
    }


def worker(args: argparse.Namespace) -> None:
    """One rank; rank 0 writes the records."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    transport = open_lane("bench", list(range(dist.get_world_size())), 120.0).transport
    records = []
    for num_bytes in PART_BYTES:
        timings = interleave_ranks(candidates(transport, num_bytes), num_rounds=args.rounds)
        records += [
            {
                "call": name,
                "part_bytes": num_bytes,
                "median_s": timing.median_s,
                "p10_s": timing.p10_s,
                "p90_s": timing.p90_s,
                "ranks": dist.get_world_size(),
                "link": args.link,
            }
            for name, timing in timings.items()
        ]
    if dist.get_rank() == 0:
        Path(args.json).write_text(json.dumps(records))
    dist.barrier()
    leave()


def show(records: list[dict[str, Any]], title: str) -> None:
    """Milliseconds, calls by part size."""
    table = Table(title=title)
    table.add_column("ms")
    for num_bytes in PART_BYTES:
        table.add_column(f"{num_bytes / 1024:g} KiB", justify="right")
    for call in dict.fromkeys(record["call"] for record in records):
        cells = [f"{r['median_s'] * 1e3:.2f}" for r in records if r["call"] == call]
        table.add_row(call, *cells)
    Console(width=110).print(table)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="none", help='"none" or a rate such as "1gbit"')
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        argv = ["bench.transport", "--worker", "--link", args.link, "--json", str(path)]
        netlab.launch([*argv, "--rounds", str(args.rounds)], args.ranks, args.link)
        records = json.loads(path.read_text())
    show(records, f"{args.ranks} ranks, link {args.link}: parts of")
    if args.json:
        write_json(args.json, records)


if __name__ == "__main__":
    main()
