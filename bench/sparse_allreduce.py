"""How fast is one sparse allreduce? Every reducer beside its peers, on real Gloo processes.

    python -m bench.sparse_allreduce --ranks 4 --link 1gbit --json out.json
    python -m bench.sparse_allreduce --sweep --json sweep.json --plot sweep.png

The input is what `nn.Embedding(sparse=True)` hands over: one row a token, repeated ids not summed.
Results are verified against the exact mean before anything is timed. Methods named horovod-... need
Horovod, which is initialised for them only: its background threads then run during all methods.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from bench import horovod_peer, horovod_ranks, netlab
from bench.candidates import METHODS, REDUCERS, Candidates, Shape
from bench.harness import write_json
from bench.ranked import interleave_ranks
from commlib.cli.leave import leave
from commlib.schedule import Lane, open_lane
from commlib.topology import Link, probe_link

SWEEP_METHODS = (*(name for name in REDUCERS if name not in ("sketch", "noop")), "torch-sparse")
# What `--methods all` means: Horovod would be at work in the background of every method.
ALL = tuple(name for name in METHODS if not horovod_ranks.wanted([name]))
DENSITIES = (0.0001, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0)


def measure(
    shape: Shape,
    methods: list[str],
    lane: Lane,
    link: Link,
    num_rounds: int,
    horovod: tuple[Lane, Link] | None = None,
) -> list[dict[str, Any]]:
    """Verify, then time all methods side by side; the same records on every rank."""
    bench = Candidates(shape, lane, link, horovod)
    calls = {name: bench.candidate(name) for name in methods}
    verified = {name: bench.verified(name, call) for name, call in calls.items()}
    timings = interleave_ranks(calls, num_rounds=num_rounds)
    records, bound = [], bench.touched.bound_bytes
    for name, timing in timings.items():
        num_bytes = bench.bytes_per_rank(name)
        reduced = bench.reduced.get(name)
        records.append(
            {
                "method": name,
                "median_s": timing.median_s,
                "p10_s": timing.p10_s,
                "p90_s": timing.p90_s,
                "bytes_per_rank": num_bytes,
                "bytes_over_bound": num_bytes / bound if bound else 0.0,
                "omega": reduced.omega if reduced else 0.0,
                "verified": verified[name],
                "chosen": reduced.reducer if reduced else name,
                "union": bench.touched.union_rows,
                "mean_rows": bench.touched.mean_rows,
                **asdict(shape),
            }
        )
    return records


def worker(args: argparse.Namespace) -> None:
    """One rank: measures the shapes it is given; rank 0 writes the records."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    lane = open_lane("bench", list(range(dist.get_world_size())), timeout_s=120.0)
    link = probe_link(lane)
    methods, records = args.methods.split(","), []
    with horovod_ranks.joined(methods):
        horovod = horovod_peer.open_lane() if horovod_ranks.wanted(methods) else None
        for fields in json.loads(args.shapes):
            records += measure(Shape(**fields), methods, lane, link, args.rounds, horovod)
        if horovod is not None:
            horovod[0].close()
    if dist.get_rank() == 0:
        about = {"ranks": dist.get_world_size(), "link": args.link, "probed": asdict(link)}
        if horovod is not None:
            about["probed_horovod"] = asdict(horovod[1])
        Path(args.json).write_text(json.dumps([{**record, **about} for record in records]))
    dist.barrier()
    leave()


def run(
    shapes: list[Shape], methods: list[str], ranks: int, link: str, num_rounds: int
) -> list[dict[str, Any]]:
    """Launch the ranks on their link and collect what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "records.json")
        argv = ["bench.sparse_allreduce", "--worker", "--methods", ",".join(methods)]
        argv += ["--shapes", json.dumps([asdict(shape) for shape in shapes]), "--link", link]
        argv += ["--rounds", str(num_rounds), "--json", path]
        netlab.launch(argv, ranks, link, timeout_s=1800)
        records: list[dict[str, Any]] = json.loads(Path(path).read_text())
        return records


def show(records: list[dict[str, Any]]) -> None:
    """One table a shape and link."""
    table = Table(
        title="sparse allreduce: {rows} x {dim}, {ranks} ranks, {link}".format(**records[0])
    )
    for column in ("method", "ms", "p10", "p90", "MB/rank", "x bound", "x dense", "verified"):
        table.add_column(column, justify="left" if column == "method" else "right")
    dense = next((r["median_s"] for r in records if r["method"] == "torch-dense"), None)
    for r in sorted(records, key=lambda record: record["median_s"]):
        name = r["method"] + (f" ({r['chosen']})" if r["chosen"] != r["method"] else "")
        table.add_row(
            name,
            *(f"{r[key] * 1e3:.1f}" for key in ("median_s", "p10_s", "p90_s")),
            f"{r['bytes_per_rank'] / 1e6:.2f}",
            f"{r['bytes_over_bound']:.2f}",
            f"{dense / r['median_s']:.1f}" if dense else "",
            "yes" if r["verified"] else "NO",
        )
    Console(width=110).print(table)


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Density x ranks x link; prints how far auto is from the best fixed choice at each point."""
    shapes = [
        Shape(rows=args.sweep_rows, dim=args.sweep_dim, tokens=0, zipf=args.zipf, density=density)
        for density in DENSITIES
    ]
    records = []
    for ranks in (2, 4):
        for link in ("none", "10gbit", "1gbit"):
            records += run(shapes, list(SWEEP_METHODS), ranks, link, args.rounds)
    table = Table(title="auto against the best fixed reducer")
    for column in ("ranks", "link", "density", "auto ms", "chose", "best ms", "best", "ratio"):
        table.add_column(column, justify="right")
    for point in points(records):
        table.add_row(*(str(value) for value in point.values()))
    Console(width=110).print(table)
    return records


def points(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a point of the sweep: auto, its choice, and the best of commlib's fixed reducers."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["ranks"], record["link"], record["density"]), []).append(record)
    lines = []
    for (ranks, link, density), group in groups.items():
        auto = next(record for record in group if record["method"] == "auto")
        fixed = [r for r in group if r["method"] != "auto" and not r["method"].startswith("torch")]
        best = min(fixed, key=lambda record: record["median_s"])
        lines.append(
            {
                "ranks": ranks,
                "link": link,
                "density": density,
                "auto_ms": round(auto["median_s"] * 1e3, 2),
                "chose": auto["chosen"],
                "best_ms": round(best["median_s"] * 1e3, 2),
                "best": best["method"],
                "ratio": round(auto["median_s"] / best["median_s"], 2),
            }
        )
    return lines


def plot(records: list[dict[str, Any]], path: str) -> None:
    """Time against density, one panel a number of ranks and link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(record["ranks"], record["link"]) for record in records})
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), squeeze=False, sharex=True)
    for axis, (ranks, link) in zip(axes.flat, panels, strict=False):
        for method in SWEEP_METHODS:
            line = sorted(
                (r["density"], r["median_s"] * 1e3)
                for r in records
                if (r["ranks"], r["link"], r["method"]) == (ranks, link, method)
            )
            style = {"linewidth": 3, "color": "black"} if method == "auto" else {"linewidth": 1.2}
            axis.loglog(*zip(*line, strict=True), label=method, **style)
        axis.set_title(f"{ranks} ranks, link {link}")
        axis.set_xlabel("density S/V")
        axis.set_ylabel("median ms")
        axis.grid(alpha=0.3, which="both")
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="none", help='"none" or a rate such as "1gbit"')
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="per rank")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument(
        "--methods", default="all", help=f"all ({','.join(ALL)}), or some of {','.join(METHODS)}"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sweep", action="store_true", help="density x ranks x link")
    parser.add_argument("--sweep-rows", type=int, default=32_768)
    parser.add_argument("--sweep-dim", type=int, default=128)
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--plot", help="picture of the sweep to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shapes", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    if args.sweep:
        records = sweep(args)
        if args.plot:
            plot(records, args.plot)
    else:
        methods = list(ALL) if args.methods == "all" else args.methods.split(",")
        unknown = sorted(set(methods) - set(METHODS))
        if unknown:
            sys.exit(f"--methods names {unknown}; there are {', '.join(METHODS)}")
        horovod_ranks.require(methods)
        shape = Shape(rows=args.rows, dim=args.dim, tokens=args.tokens, zipf=args.zipf)
        records = run([shape], methods, args.ranks, args.link, args.rounds)
        show(records)
    if args.json:
        write_json(args.json, records)


if __name__ == "__main__":
    main()
