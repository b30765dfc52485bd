"""How fast is one partitioned table? Forward, backward and update, commlib beside its peers.

    python -m bench.embedding --ranks 4 --link 1gbit --rows 100000 --dim 256 --json out.json
    python -m bench.embedding --sweep --link 1gbit --json sweep.json

A step looks up Zipf ids, takes half the squared distance of their rows from a target as the loss,
and updates the table by SGD. All methods run in the same processes and take turns. Before anything
is timed, each method's table is compared with the one that a single process gets.

`bytes_per_rank` are those of the busiest rank in its larger direction, as the network interfaces of
emulated hosts count them (null on the link "none"); `own_bytes_per_rank` is what the method itself
counts as sent by rank 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bench import interface, netlab, torchrec_peer
from bench.embedding_methods import METHODS, NUM_BATCHES, Method, Shape, verified
from bench.harness import write_json
from bench.ranked import interleave_ranks
from commlib.cli.leave import leave

COPIES = {"ddp-dense": 2.0, "ddp-sparse": 1.0, "exact": 1.0}
"""Whole tables that a rank holds; what is not listed is partitioned."""
_MEMORY_SHARE = 0.8
_SWEEP = [
    Shape(rows=rows, dim=dim, tokens=tokens)
    for rows, dim in ((10_000, 64), (10_000, 256), (100_000, 64), (100_000, 256), (1_000_000, 64))
    for tokens in (512, 2_048, 8_192)
]


def measure(shape: Shape, names: Sequence[str], link: str, num_rounds: int) -> list[dict[str, Any]]:
    """Verifies, times and counts all methods on one shape; the same on every rank. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    methods = {name: METHODS[name](shape) for name in names}
    results = {name: verified(shape, method) for name, method in methods.items()}
    gc.collect()  # what checking took
    ids = [shape.ids(step, rank) for step in range(NUM_BATCHES)]
    calls = {name: _stepper(one, ids, shape.target(rank)) for name, one in methods.items()}
    timings = interleave_ranks(calls, num_rounds=num_rounds)
    records = []
    for name, timing in timings.items():
        on_wire = None if link == "none" else interface.busiest_rank(calls[name], NUM_BATCHES)
        records.append(
            {
                "method": name,
                "median_s": timing.median_s,
                "p10_s": timing.p10_s,
                "p90_s": timing.p90_s,
                "bytes_per_rank": on_wire,
                "own_bytes_per_rank": methods[name].sent_bytes(),
                "verified": results[name],
                **asdict(shape),
                "ranks": num_ranks,
                "link": link,
            }
        )
    for method in methods.values():
        method.close()
    return records


def _stepper(
    method: Method, ids: Sequence[torch.Tensor], target: torch.Tensor
) -> Callable[[], None]:
    """Returns a call that takes the method's next step, round the batches."""
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        method.step(ids[num_steps % len(ids)], target)
        num_steps += 1

    return step


def worker(args: argparse.Namespace) -> None:
    """One rank: measures one shape; rank 0 writes the records."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns where nobody says
    dist.init_process_group("gloo")
    records = measure(args.points[0], args.methods, args.link, args.rounds)
    if dist.get_rank() == 0:
        args.json.write_text(json.dumps(records))
    dist.barrier()
    leave()


def run(shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Launches the ranks on their link, for one shape, and collects what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        argv = ["bench.embedding", "--worker", "--methods", ",".join(args.methods)]
        for name, value in asdict(shape).items():
            argv += [f"--{name}", str(value)]
        argv += ["--link", args.link, "--rounds", str(args.rounds), "--json", str(path)]
        netlab.launch(argv, args.ranks, args.link, timeout_s=3_600)
        records: list[dict[str, Any]] = json.loads(path.read_text())
        return records


def show(records: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints the table of one shape, the fastest method first."""
    title = "one table: {rows} x {dim}, {tokens} ids a rank, {ranks} ranks, {link}"
    table = Table(title=title.format(**records[0]))
    table.add_column("method", no_wrap=True)
    peers = ("torchrec-cw", "ddp-sparse")
    for column in ("ms", "p10", "p90", "MB/rank", "own MB", *(f"x {p}" for p in peers), "verified"):
        table.add_column(column, justify="right")
    median_s = {record["method"]: record["median_s"] for record in records}
    for record in sorted(records, key=lambda one: one["median_s"]):
        table.add_row(
            record["method"],
            *(f"{record[key] * 1e3:.1f}" for key in ("median_s", "p10_s", "p90_s")),
            *(_megabytes(record[key]) for key in ("bytes_per_rank", "own_bytes_per_rank")),
            *(f"{median_s[p] / record['median_s']:.2f}" if p in median_s else "" for p in peers),
            "yes" if record["verified"] else "NO",
        )
    console.print(table)


def _megabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.2f}"


def needed_bytes(shape: Shape, names: Sequence[str], num_ranks: int) -> float:
    """Returns the memory of all ranks' tables: every method's, and one that is checked."""
    copies = sum(COPIES.get(name, 1 / num_ranks) for name in names) + 2
    return copies * shape.table_bytes * num_ranks


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="none", help='"none" or a rate such as "1gbit"')
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2_048, help="ids per rank and step")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--methods", default="all", help=f"all, or some of {','.join(METHODS)}")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sweep", action="store_true", help="several rows, columns and ids")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    asked = set(METHODS if args.methods == "all" else args.methods.split(","))
    args.methods = [name for name in METHODS if name in asked]
    unknown = sorted(asked - set(METHODS))
    if unknown:
        parser.error(f"--methods names {unknown}; there are {', '.join(METHODS)}")
    shape = Shape(rows=args.rows, dim=args.dim, tokens=args.tokens, zipf=args.zipf)
    args.points = _SWEEP if args.sweep else [shape]
    needed = max(needed_bytes(shape, args.methods, args.ranks) for shape in args.points)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _MEMORY_SHARE
    if needed > available:
        parser.error(
            f"these tables need {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are to "
            f"be had: leave methods out ({', '.join(COPIES)} hold whole tables), or make it smaller"
        )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the ranks and shows what they measured, or is one of them."""
    args = parse(argv)
    if args.worker:
        worker(args)
        return
    console = Console(width=110)
    left_out = [name for name in args.methods if name.startswith("torchrec")]
    reason = torchrec_peer.why_not() if left_out else None
    if reason is not None:
        args.methods = [name for name in args.methods if name not in left_out]
        console.print(f"without {', '.join(left_out)}: {reason}", highlight=False, markup=False)
    records = []
    for shape in args.points:
        measured = run(shape, args)
        show(measured, console)
        records += measured
    if args.json is not None:
        write_json(args.json, records)


if __name__ == "__main__":
    main()
