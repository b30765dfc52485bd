"""Trains every method in turn, with a progress bar each, and shows what came out."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from commlib.cli import checkout
from commlib.cli.demo import report
from commlib.cli.demo.corpus import Corpus, read_corpus
from commlib.cli.demo.methods import METHODS, OURS
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.summary import Record, Summary, summarize
from commlib.cli.demo.train import PROGRESS
from commlib.cli.ping import loopback_env
from commlib.cli.processes import run_ranks

_WORKER = "commlib.cli.demo.train"
_TIMEOUT_S = 1_800.0


def run_demo(
    *,
    methods: Sequence[str],
    ranks: int,
    settings: Settings,
    text: Path | None,
    link: str,
    out: Path,
    console: Console,
) -> list[Record]:
    """Runs the demo and writes `results.json` and `index.html`.

    Args:
        methods: Names out of `METHODS`.
        ranks: Processes.
        settings: What is trained, and how long.
        text: A file or folder to train on. Default: Python's standard library.
        link: "none", or the rate of emulated links such as "1gbit".
        out: Folder of the report.
        console: Where progress and the final table go.

    Returns:
        One record per method.

    Raises:
        RankError: A worker failed.
        ValueError: A bad text, or no such method.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"no method {', '.join(unknown)}; there are {', '.join(METHODS)}")
    with console.status("reading text"):
        corpus = read_corpus(text, max_vocab=settings.max_vocab, max_tokens=settings.max_tokens)
    _introduce(corpus, ranks, settings, link, console)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        corpus.save(Path(folder) / "corpus.npz")
        records = _train_all(methods, ranks, settings, link, Path(folder), console)
    results = {"source": corpus.source, "link": link, "records": records}
    (out / "results.json").write_text(json.dumps(results), encoding="utf-8")
    page = report.write(results, out)
    console.print(summary_table(summarize(records)))
    console.print(f"report: [bold]{page}[/bold]", highlight=False)
    return records


def summary_table(summaries: Sequence[Summary]) -> Table:
    """Returns the final table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for title in ("step ms", "tokens/s", "embedding MB/step", "x bound", "valid loss", "speed-up"):
        table.add_column(title, justify="right")
    for one in summaries:
        table.add_row(
            one.method,
            f"{one.step_s * 1e3:.0f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.sparse_bytes / 1e6:.2f}",
            f"{one.over_bound:.2f}",
            f"{one.valid_loss:.4f}",
            "" if one.speedup is None else f"{one.speedup:.2f}x",
            style="bold" if one.method in OURS else "",
        )
    return table


def _introduce(corpus: Corpus, ranks: int, settings: Settings, link: str, console: Console) -> None:
    where = "this machine" if link == "none" else f"emulated hosts, {link} links"
    console.print(
        f"[bold]{escape(corpus.source)}[/bold]: {len(corpus.train):,} words, "
        f"two tables of {corpus.num_rows:,} x {settings.dim} | {ranks} ranks on {where}",
        highlight=False,
    )


def _train_all(
    methods: Sequence[str],
    ranks: int,
    settings: Settings,
    link: str,
    folder: Path,
    console: Console,
) -> list[Record]:
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    records = []
    with Progress(*columns, console=console) as progress:
        for name in methods:
            task = progress.add_task(name, total=settings.steps, note="starting")

            def advance(line: str, task: TaskID = task) -> None:
                if not line.startswith(PROGRESS):
                    return
                step = json.loads(line[len(PROGRESS) :])
                note = f"{step['step_s'] * 1e3:4.0f} ms/step, valid loss {step['valid_loss']:.3f}"
                progress.update(task, completed=step["step"], note=note)

            record_path = folder / f"{name}.json"
            arguments = ["--method", name, "--corpus", str(folder / "corpus.npz")]
            arguments += ["--settings", settings.to_json(), "--record", str(record_path)]
            _launch(arguments, ranks, link, advance)
            records.append(json.loads(record_path.read_text(encoding="utf-8")))
    return records


def _launch(arguments: list[str], ranks: int, link: str, on_line: Callable[[str], None]) -> None:
    """Runs the worker on every rank: under torchrun here, or on emulated hosts."""
    if link != "none":
        netlab = checkout.import_bench("netlab")
        netlab.launch([_WORKER, *arguments], ranks, link, timeout_s=_TIMEOUT_S, on_line=on_line)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={ranks}", "-m", _WORKER, *arguments]
    env = {**loopback_env(), "OMP_NUM_THREADS": "1"}
    run_ranks([command], [env], timeout_s=_TIMEOUT_S, on_line=on_line)
