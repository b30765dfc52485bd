"""How fast does a whole training step get? Every method on the same model, in the same processes.

    block 0:  ddp ddp ddp  exact exact exact  sketch ...     Every method keeps its own model and
    block 1:  exact exact exact  sketch ...  ddp ddp ddp     DDP; blocks of steps take turns.

    python -m bench.train --ranks 4 --link 1gbit --methods ddp,fp16,exact --json FILE --plot PNG

`step_s` is the median after the warm-up, `step_mean_s` the mean; `loss` the mean training loss of
the last ten steps;
`sparse_bytes_per_step` what a rank sends for the tables, counted where the method counts, else by
formula; `compute_s`, `exposed_s`, `hidden_s`, `exposed_embedding_s` as `bench/breakdown.py` says.
Methods named horovod-... need Horovod, which is initialised, beside torch.distributed, for them
only: its background threads then run during all methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from bench import breakdown, harness, horovod_ranks, netlab
from bench.methods import METHODS, POWERSGD_START
from bench.models import MODELS
from commlib.cli.demo.compute import measure_compute
from commlib.cli.demo.corpus import read_corpus
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.summary import Record, Summary, summarize, timed_steps
from commlib.cli.demo.touched import count_touched
from commlib.cli.demo.trainer import Trainer
from commlib.cli.demo.workload import Workload
from commlib.cli.leave import leave

_DEFAULT = ("ddp", "ddp-sparse", "exact", "sketch", "embrace")
_TIMEOUT_S = 3_600.0


def train(names: Sequence[str], workload: Workload, settings: Settings, block: int) -> list[Record]:
    """Trains all methods in turns of `block` steps; returns their records. Collective."""
    for step in range(settings.steps):
        workload.batch(step)  # drawn once, before anything is timed
    trainers = [Trainer(METHODS[name], workload, settings) for name in names]
    for turn, first_step in enumerate(range(0, settings.steps, block)):
        num_steps = min(block, settings.steps - first_step)
        start = turn % len(trainers)
        for trainer in trainers[start:] + trainers[:start]:
            for _ in range(num_steps):
                trainer.step()
            trainer.settle()
    touched = count_touched(workload, trainers[0].driver.tables, settings.steps)
    kinds = {trainer.method.sparse for trainer in trainers}
    computes = {kind: measure_compute(workload, sparse=kind) for kind in sorted(kinds)}
    records = []
    for trainer in trainers:
        trainer.validate()
        compute = computes[trainer.method.sparse]
        record = trainer.finish(touched, compute)
        record["traffic"] = None  # torch's profiler does not see Horovod at work
        if not horovod_ranks.wanted([trainer.method.name]):
            traffic = breakdown.measure_traffic(trainer.driver, settings.steps)
            record["traffic"] = dataclasses.asdict(traffic)
        records.append(record)
    for trainer in trainers:
        trainer.driver.close()
    return records


def split(one: Summary, record: Record) -> breakdown.Breakdown:
    """Returns where a method's median step goes."""
    waits = [step["embedding_wait_s"] for step in timed_steps(record)]
    known = [wait_s for wait_s in waits if wait_s is not None]
    wait_s = statistics.median(known) if known else None
    traffic = breakdown.Traffic(**record["traffic"]) if record["traffic"] else None
    return breakdown.split(one.step_s, record["compute"]["step_s"], traffic, wait_s)


def show(lines: Sequence[dict[str, Any]], title: str) -> None:
    """Prints the table."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), pad_edge=False
    )
    table.add_column("method", no_wrap=True)
    base = next((line["step_s"] for line in lines if line["method"] == "ddp"), None)
    parts = ("compute_s", "exposed_s", "exposed_embedding_s", "hidden_s")
    for column in ("step", "mean", "p10-p90", "compute", "exposed", "tables", "hidden"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("samples/s", "MB", "x bound", "loss", "speed-up"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line["method"],
            _number(line["step_s"], 1e3, 0),
            _number(line["step_mean_s"], 1e3, 0),
            f"{line['step_p10_s'] * 1e3:.0f}-{line['step_p90_s'] * 1e3:.0f}",
            *(_number(line[part], 1e3, 0) for part in parts),
            f"{line['tokens_per_s']:,.0f}",
            _number(line["sparse_bytes_per_step"], 1e-6),
            _number(line["over_bound"]),
            f"{line['loss']:.4f}",
            "" if base is None else f"{base / line['step_s']:.2f}x",
        )
    console = Console()
    console.width = max(console.width, 132)
    console.print(table)
    console.print("step to hidden: milliseconds; MB: sent for tables by a rank", style="dim")


def _number(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
    return "" if value is None else f"{value * scale:.{digits}f}"


def to_json(one: Summary, record: Record, args: argparse.Namespace) -> dict[str, Any]:
    """Returns one method's line of the JSON file."""
    return {
        "model": args.model,
        "num_ranks": args.ranks,
        "link": args.link,
        "num_steps": args.steps,
        "num_parameters": record["num_parameters"],
        "table_parameters": record["table_parameters"],
        "method": one.method,
        **dataclasses.asdict(split(one, record)),
        "step_mean_s": one.step_mean_s,
        "step_p10_s": one.step_p10_s,
        "step_p90_s": one.step_p90_s,
        "tokens_per_s": one.tokens_per_s,
        "loss": one.train_loss,
        "valid_loss": one.valid_loss,
        "sparse_bytes_per_step": None if math.isnan(one.sparse_bytes) else one.sparse_bytes,
        "over_bound": None if math.isnan(one.over_bound) else one.over_bound,
        "split_s": one.split_s,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="bench.train", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", choices=list(MODELS), default="lm")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="none", help='"none" or a rate such as "1gbit"')
    parser.add_argument("--methods", default=",".join(_DEFAULT), help=", ".join(METHODS))
    parser.add_argument("--steps", type=int, default=30, help="of each method")
    parser.add_argument("--warmup", type=int, default=POWERSGD_START, help="steps not timed")
    parser.add_argument("--block", type=int, default=5, help="steps of a method in a row")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="one of the settings"
    )
    parser.add_argument("--text", type=Path, help="default: Python's standard library")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of where the time goes, to write")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.methods = args.methods.split(",")
    unknown = [name for name in args.methods if name not in METHODS]
    if unknown:
        parser.error(f"no method {', '.join(unknown)}; there are {', '.join(METHODS)}")
    horovod_ranks.require(args.methods)
    if args.warmup < POWERSGD_START and "powersgd" in args.methods:
        parser.error(f"powersgd starts after {POWERSGD_START} steps: --warmup must be as many")
    if args.steps <= args.warmup:
        parser.error(f"--steps {args.steps} leaves nothing to time after --warmup {args.warmup}")
    return args


def configure(args: argparse.Namespace) -> Settings:
    """Returns the model's settings with those of the command line.

    Raises:
        SystemExit: There is no such setting, or it has another type.
    """
    known = {field.name: field for field in dataclasses.fields(Settings)}
    changed = dict(MODELS[args.model].settings)
    for pair in args.set:
        name, _, value = pair.partition("=")
        if name not in known:
            raise SystemExit(f"--set {pair}: no setting {name}; there are {', '.join(known)}")
        try:
            changed[name] = type(known[name].default)(value)
        except ValueError as error:
            raise SystemExit(f"--set {pair}: {error}") from None
    return Settings(steps=args.steps, warmup_steps=args.warmup, **changed)


def worker(args: argparse.Namespace, settings: Settings) -> None:
    """One rank: trains; rank 0 writes the records."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns where nobody says
    dist.init_process_group("gloo")
    corpus = args.worker / "corpus.npz"
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    workload = MODELS[args.model].load(corpus, settings, rank=rank, num_ranks=num_ranks)
    with horovod_ranks.joined(args.methods):
        records = train(args.methods, workload, settings, args.block)
    if rank == 0:
        (args.worker / "records.json").write_text(json.dumps(records))
    leave()


def run(args: argparse.Namespace, settings: Settings) -> list[Record]:
    """Launches the ranks on their link and collects what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        if MODELS[args.model].text:
            corpus = read_corpus(
                args.text, max_vocab=settings.max_vocab, max_tokens=settings.max_tokens
            )
            corpus.save(Path(folder) / "corpus.npz")
        argv = ["bench.train", "--worker", folder, "--methods", ",".join(args.methods)]
        for name in ("model", "steps", "warmup", "block"):
            argv += [f"--{name}", str(getattr(args, name))]
        argv += [part for pair in args.set for part in ("--set", pair)]
        netlab.launch(argv, args.ranks, args.link, timeout_s=_TIMEOUT_S, on_line=_pass_on)
        records: list[Record] = json.loads((Path(folder) / "records.json").read_text())
        return records


def _pass_on(line: str) -> None:
    """Writes a line of rank 0, but for those in which the profiler says that it runs."""
    if not line.startswith("USDT:"):
        sys.stdout.write(f"{line}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the ranks and shows what they measured, or is one of them."""
    args = parse(argv)
    settings = configure(args)
    if args.worker is not None:
        worker(args, settings)
        return
    records = run(args, settings)
    lines = [
        to_json(one, record, args) for one, record in zip(summarize(records), records, strict=True)
    ]
    share = records[0]["table_parameters"] / records[0]["num_parameters"]
    title = f"{args.model}, tables {share:.0%} of its parameters"
    show(lines, f"{title}, {args.ranks} ranks, link {args.link}, {args.steps} steps")
    if args.json is not None:
        harness.write_json(args.json, lines)
    if args.plot is not None:
        breakdown.plot(lines, args.plot)


if __name__ == "__main__":
    main()
