"""`commlib demo | bench | doctor | install-horovod`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    help="Distributed training that moves only the bytes that carry information.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _main() -> None:
    """Keeps `commlib` a command of commands."""


@app.command()
def demo(
    methods: Annotated[
        str, typer.Option(help="Methods to compare, with commas between.")
    ] = "ddp,ddp-sparse,exact,sketch,embrace-2d",
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each method.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="File or folder to train on instead of Python's standard library."),
    ] = None,
    link: Annotated[
        str, typer.Option(help='Rate of emulated links, such as "1gbit"; needs root.')
    ] = "none",
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
) -> None:
    """Train a word language model with plain DDP and with commlib, and compare."""
    from commlib.cli.demo.run import run_demo
    from commlib.cli.demo.settings import Settings

    console = Console()
    names = [name.strip() for name in methods.split(",") if name.strip()]
    settings = Settings() if steps is None else Settings(steps=steps)
    try:
        if not names:
            raise ValueError(f"--methods {methods!r} names no method")
        run_demo(
            methods=names,
            ranks=ranks,
            settings=settings,
            text=text,
            link=link,
            out=out,
            console=console,
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        console.print(f"[red]commlib demo:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A file of bench/, without .py.")],
) -> None:
    """Run a benchmark of a checkout; what follows the name is the benchmark's."""
    from commlib.cli import checkout

    names = checkout.bench_names()
    if name not in names:
        there = ", ".join(names) or "none: commlib does not run from a checkout"
        typer.echo(f"commlib bench: no benchmark {name!r}; there are {there}", err=True)
        raise typer.Exit(2)
    path = os.pathsep.join(filter(None, [str(checkout.root()), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", f"bench.{name}", *context.args]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False)
    raise typer.Exit(done.returncode)


@app.command()
def doctor() -> None:
    """Show what is installed, what can be used, and how fast the link is."""
    from commlib.cli.doctor import examine

    examine(Console())


@app.command()
def install_horovod(
    mpi: Annotated[
        bool | None,
        typer.Option("--mpi/--no-mpi", help="With MPI. Default: where mpicxx is on PATH."),
    ] = None,
    nccl: Annotated[
        bool | None,
        typer.Option("--nccl/--no-nccl", help="With NCCL. Default: where torch can use it."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build anew, whatever is there already.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilers at the same time. Default: one a core.")
    ] = None,
) -> None:
    """Build Horovod for the torch that is here, with Gloo, and install it."""
    from commlib.cli.horovod.error import InstallError
    from commlib.cli.horovod.install import install

    console = Console()
    try:
        install(console, mpi=mpi, nccl=nccl, force=force, jobs=jobs)
    except (InstallError, OSError) as error:
        console.print(
            f"[red]commlib install-horovod:[/red] {escape(str(error))}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
