"""How fast does a whole training step get? The demo's model, every method in the same processes.

    block 0:  ddp ddp ddp  exact exact exact  sketch ...     Every method keeps its own model and
    block 1:  exact exact exact  sketch ...  ddp ddp ddp     DDP; blocks of steps take turns.

    python -m bench.train --ranks 4 --link 1gbit --methods ddp,fp16,exact --json FILE

`step_s` is the median after the warm-up; `loss` the mean training loss of the last ten steps;
`sparse_bytes_per_step` what a rank sends for the tables, counted where the method counts, else by
formula.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations as objects.
import argparse
import importlib
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench import harness, netlab
from commlib.cli.demo.corpus import Corpus, read_corpus
from commlib.cli.demo.methods import METHODS, Method, Touched, dense_bytes
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.summary import Record, Summary, summarize
from commlib.cli.demo.trainer import Trainer

POWERSGD_RANK = 4
POWERSGD_START = 5
BASELINES = {
    "coo-allgather": "all-gather of COO elements",
    "dense-scan": "dense allreduce",
    "gather-bcast": "gather and broadcast",
    "union-fp32": "union of rows, float32 bitmap",
}
"""The baselines of the S2 paper, in `bench/baselines.py`."""

_TIMEOUT_S = 3_600.0


def methods() -> dict[str, Method]:
    """Returns every method by name: the demo's, torch's compressing hooks, the baselines."""
    torch_hooks = (
        Method("fp16", "DDP, fp16 hook", False, _attach_fp16, lambda t: dense_bytes(t) / 2),
        # The hook issues collectives from callbacks, which Gloo runs in any order: one bucket only.
        # What would free communication give? Ranks drift apart: for the step time only.
        Method("noop", "no communication", True, _attach_noop, lambda t: 0.0),
        Method("powersgd", "DDP, PowerSGD hook", False, _attach_powersgd, powersgd_bytes, 4_096),
    )
    named = {method.name: method for method in torch_hooks}
    return METHODS | named | {name: _baseline(name) for name in BASELINES}


def powersgd_bytes(touched: Touched, element_bytes: int = 4) -> float:
    """Bytes that a rank sends for a table: two factors [V, r] and [D, r], in ring allreduces."""
    num_ranks = touched.num_ranks
    factors = touched.num_rows * element_bytes + touched.row_bytes
    return 2 * (num_ranks - 1) / num_ranks * factors * POWERSGD_RANK


def _attach_noop(ddp: DistributedDataParallel, settings: Settings) -> None:
    ddp.register_comm_hook(None, _noop)


def _noop(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _attach_fp16(ddp: DistributedDataParallel, settings: Settings) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _attach_powersgd(ddp: DistributedDataParallel, settings: Settings) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _baseline(name: str) -> Method:
    def attach(ddp: DistributedDataParallel, settings: Settings) -> None:
        ddp.register_comm_hook(None, importlib.import_module("bench.baselines").hook(name))

    def estimate(touched: Touched) -> float:
        baselines = importlib.import_module("bench.baselines")
        known = getattr(baselines, "estimate_bytes", None)
        return math.nan if known is None else known(name, touched)

    return Method(name, BASELINES[name], name != "dense-scan", attach, estimate)


def train(names: Sequence[str], corpus: Corpus, settings: Settings, block: int) -> list[Record]:
    """Trains all methods in turns of `block` steps; returns their records. Collective."""
    trainers = [Trainer(methods()[name], corpus, settings) for name in names]
    for turn, first_step in enumerate(range(0, settings.steps, block)):
        num_steps = min(block, settings.steps - first_step)
        start = turn % len(trainers)
        for trainer in trainers[start:] + trainers[:start]:
            for _ in range(num_steps):
                trainer.step()
    for trainer in trainers:
        trainer.validate()
    return [trainer.finish() for trainer in trainers]


def show(summaries: Sequence[Summary], title: str) -> None:
    """Prints the table."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("step ms", "p10-p90", "tokens/s", "MB/step", "x bound", "loss", "speed-up"):
        table.add_column(column, justify="right")
    for one in summaries:
        table.add_row(
            one.method,
            f"{one.step_s * 1e3:.0f}",
            f"{one.step_p10_s * 1e3:.0f}-{one.step_p90_s * 1e3:.0f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.sparse_bytes / 1e6:.2f}",
            f"{one.over_bound:.2f}",
            f"{one.train_loss:.4f}",
            "" if one.speedup is None else f"{one.speedup:.2f}x",
        )
    console = Console()
    console.width = max(console.width, 96)
    console.print(table)


def to_json(one: Summary, args: argparse.Namespace) -> dict[str, Any]:
    """Returns one method's line of the JSON file."""
    return {
        "model": args.model,
        "num_ranks": args.ranks,
        "link": args.link,
        "num_steps": args.steps,
        "method": one.method,
        "step_s": one.step_s,
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
    known = methods()
    parser = argparse.ArgumentParser(prog="bench.train", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["lm"], default="lm")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="none", help='"none" or a rate such as "1gbit"')
    parser.add_argument("--methods", default=",".join(METHODS), help=", ".join(known))
    parser.add_argument("--steps", type=int, default=30, help="of each method")
    parser.add_argument("--warmup", type=int, default=POWERSGD_START, help="steps not timed")
    parser.add_argument("--block", type=int, default=5, help="steps of a method in a row")
    parser.add_argument("--text", type=Path, help="default: Python's standard library")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.methods = args.methods.split(",")
    unknown = [name for name in args.methods if name not in known]
    if unknown:
        parser.error(f"no method {', '.join(unknown)}; there are {', '.join(known)}")
    if args.warmup < POWERSGD_START and "powersgd" in args.methods:
        parser.error(f"powersgd starts after {POWERSGD_START} steps: --warmup must be as many")
    if args.steps <= args.warmup:
        parser.error(f"--steps {args.steps} leaves nothing to time after --warmup {args.warmup}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the ranks and shows what they measured, or is one of them."""
    args = parse(argv)
    settings = Settings(steps=args.steps, warmup_steps=args.warmup)
    if args.worker is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        corpus = Corpus.load(args.worker / "corpus.npz")
        records = train(args.methods, corpus, settings, args.block)
        if dist.get_rank() == 0:
            (args.worker / "records.json").write_text(json.dumps(records))
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = read_corpus(
            args.text, max_vocab=settings.max_vocab, max_tokens=settings.max_tokens
        )
        corpus.save(Path(folder) / "corpus.npz")
        worker = ["bench.train", "--worker", folder, "--methods", ",".join(args.methods)]
        for name in ("steps", "warmup", "block"):
            worker += [f"--{name}", str(getattr(args, name))]
        netlab.launch(worker, args.ranks, args.link, timeout_s=_TIMEOUT_S)
        records = json.loads((Path(folder) / "records.json").read_text())
    summaries = summarize(records)
    show(summaries, f"{args.ranks} ranks, link {args.link}, {args.steps} steps")
    if args.json is not None:
        harness.write_json(args.json, [to_json(one, args) for one in summaries])


if __name__ == "__main__":
    main()
