"""How do the bytes of each reducer grow? Counted exactly, on 2 to 64 simulated ranks.

    python -m bench.scale --ranks 2,4,8,16,32,64 --json scale.json --plot scale.png

All ranks run in one process on the local transport, real data through the real protocols. The time
is what an alpha-beta link would take for what the busiest rank moves.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.gradients import sparse_gradient, zipf_tokens
from bench.harness import write_json
from bench.netlab import parse_rate
from commlib.collectives.local import LocalTransport
from commlib.reducers import Context, Reducer, ReducerState, as_reducer
from commlib.reducers.gradient import RowsGradient, SparseGradient
from commlib.rows import SparseRows
from commlib.topology import Link, Step, Workload

METHODS = ("minimal", "balanced", "allgather", "union", "sketch", "dense")
# A dense sum moves the same bytes whatever the gradient is; its formula spares 64 matrices.
CLOSED_FORM = {"dense"}


def inputs(args: argparse.Namespace, num_ranks: int) -> list[SparseRows]:
    """The coalesced gradient of each rank; rank 0 has `--skew` times the tokens."""
    rows = []
    for rank in range(num_ranks):
        tokens = round(args.tokens * (args.skew if rank == 0 else 1))
        ids = zipf_tokens(args.rows, tokens, args.zipf, seed=rank)
        rows.append(SparseGradient(sparse_gradient(ids, args.rows, args.dim, seed=rank)).rows())
    return rows


def workload(rows: list[SparseRows]) -> Workload:
    """The sizes of one reduction."""
    union = len(torch.cat([part.indices for part in rows]).unique())
    return Workload(
        num_ranks=len(rows),
        num_rows=rows[0].num_rows,
        dim=rows[0].dim,
        element_bytes=rows[0].values.element_size(),
        rows=sum(len(part.indices) for part in rows) / len(rows),
        union=union,
    )


def count(reducer: Reducer, rows: list[SparseRows]) -> tuple[float, int, int]:
    """Mean and busiest bytes of a step in the steady state (the second), and its rounds."""
    num_ranks = len(rows)
    states = [ReducerState() for _ in rows]
    transport = LocalTransport(num_ranks)
    for _ in range(2):
        transport = LocalTransport(num_ranks)
        transport.run(
            [
                reducer.protocol(
                    RowsGradient(part),
                    states[rank],
                    Context(name="table", rank=rank, num_ranks=num_ranks),
                )
                for rank, part in enumerate(rows)
            ]
        )
        for state in states:
            state.step += 1
    sent = transport.sent_bytes()
    return sum(sent) / num_ranks, transport.busiest_bytes(), transport.num_rounds


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record a method and number of ranks."""
    link = Link(alpha_s=args.alpha_us * 1e-6, beta_s=8 / parse_rate(args.link))
    records = []
    for num_ranks in track([int(n) for n in args.ranks.split(",")], description="ranks"):
        rows = inputs(args, num_ranks)
        sizes = workload(rows)
        for method in args.methods.split(","):
            reducer = as_reducer(method)
            if method in CLOSED_FORM:
                mean_bytes = reducer.estimate_bytes(sizes)
                max_bytes, rounds = round(mean_bytes), 2
            else:
                mean_bytes, max_bytes, rounds = count(reducer, rows)
            steps = [Step("exchange", max_bytes / rounds)] * rounds
            records.append(
                {
                    "method": method,
                    "ranks": num_ranks,
                    "mean_bytes": mean_bytes,
                    "max_bytes": max_bytes,
                    "bytes_over_bound": max_bytes / sizes.bound_bytes(),
                    "rounds": rounds,
                    "link_s": link.seconds(steps),
                    "mean_rows": sizes.rows,
                    "union": sizes.union,
                    "skew": args.skew,
                }
            )
    return records


def show(records: list[dict[str, Any]], title: str) -> None:
    """Bytes of the busiest rank over the bound, and time on the link: methods by ranks."""
    ranks = sorted({record["ranks"] for record in records})
    for field, unit, scale in (
        ("bytes_over_bound", "busiest rank's bytes over the bound", 1.0),
        ("link_s", "ms on the link", 1e3),
    ):
        table = Table(title=f"{title}: {unit}")
        table.add_column("method")
        for num_ranks in ranks:
            table.add_column(f"n={num_ranks}", justify="right")
        for method in dict.fromkeys(record["method"] for record in records):
            cells = {r["ranks"]: r[field] * scale for r in records if r["method"] == method}
            table.add_row(method, *(f"{cells[num_ranks]:.3f}" for num_ranks in ranks))
        Console(width=110).print(table)


def plot(records: list[dict[str, Any]], path: str) -> None:
    """Megabytes of the busiest rank, and time, against the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for method in dict.fromkeys(record["method"] for record in records):
        mine = [record for record in records if record["method"] == method]
        ranks = [record["ranks"] for record in mine]
        left.loglog(ranks, [record["max_bytes"] / 1e6 for record in mine], "o-", label=method)
        right.loglog(ranks, [record["link_s"] * 1e3 for record in mine], "o-", label=method)
    left.set_ylabel("MB, busiest rank")
    right.set_ylabel("ms on the link")
    for axis in (left, right):
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3, which="both")
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8,16,32,64")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="per rank")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--skew", type=float, default=1.0, help="rank 0 has this many times more")
    parser.add_argument("--link", default="1gbit", help="rate of the modelled link")
    parser.add_argument("--alpha-us", type=float, default=100.0, help="latency of an exchange")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--plot", help="picture to write")
    args = parser.parse_args()
    records = measure(args)
    show(records, f"{args.rows} x {args.dim}, {args.tokens} tokens a rank, skew {args.skew:g}")
    if args.json:
        write_json(args.json, records)
    if args.plot:
        plot(records, args.plot)


if __name__ == "__main__":
    main()
