"""The order of an installation: is it there, was it built before, build it, does it load.

installed and loads          -> done
a wheel in the cache loads   -> done, in seconds
otherwise                    -> build, keep in the cache, install; must load
"""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from commlib.cli.horovod.build import build, log_path
from commlib.cli.horovod.cache import cached_wheel, keep, workplace
from commlib.cli.horovod.error import InstallError
from commlib.cli.horovod.installed import Installed, find_horovod
from commlib.cli.horovod.pip import pip_install
from commlib.cli.horovod.plan import Plan, make_plan
from commlib.cli.horovod.tools import find_tools
from commlib.cli.processes import terminate_raises


def install(
    console: Console, *, mpi: bool | None, nccl: bool | None, force: bool, jobs: int | None
) -> Installed:
    """Installs Horovod into this environment, for the torch that is in it.

    Args:
        console: Where to say what is done.
        mpi: With MPI or without; None where it is found.
        nccl: With NCCL or without; None where torch can use it and it is found.
        force: Build anew, whatever is installed or in the cache.
        jobs: Compilers at the same time. Default: one a core.

    Returns:
        What is installed afterwards; it can be imported.

    Raises:
        InstallError: It cannot be built or installed, or does not load.
        OSError: The cache cannot be written.
    """
    plan = make_plan(mpi=mpi, nccl=nccl)
    there = None if force else find_horovod()
    if there is not None and _is_asked_for(there, plan, mpi=mpi, nccl=nccl):
        _say(console, f"Horovod {there.describe()} is installed already")
        return there
    wheel = None if force else cached_wheel(plan)
    if wheel is not None:
        _say(console, f"Horovod was built before for torch {plan.torch}: {wheel}")
        done = _install_wheel(wheel)
        if done is not None and done.works:
            return _finish(console, done)
        _say(console, "it does not load on this system: building it anew")
    wheel = _build(console, plan, jobs or _cores())
    done = _install_wheel(wheel)
    if done is None or not done.works:
        what = "pip did not install it" if done is None else done.describe()
        raise InstallError(f"Horovod was built, but does not work: {what}; log: {log_path(plan)}")
    return _finish(console, done)


def _build(console: Console, plan: Plan, jobs: int) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with terminate_raises(), workplace(plan) as folder:
        with console.status("looking for a compiler and CMake"):
            tools = find_tools(folder)
        _say(console, f"building Horovod for torch {plan.torch}; log: {log_path(plan)}")
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("building Horovod", total=100)

            def show(doing: str, percent: int) -> None:
                progress.update(task, description=doing, completed=percent)

            wheel = build(plan, tools, folder, jobs=jobs, on_progress=show)
        return keep(plan, wheel)


def _install_wheel(wheel: Path) -> Installed | None:
    # Two steps, as pip leaves a package alone that has the same version, and forced with its
    # dependencies it would reinstall those too. None of them asks for torch.
    pip_install(["--force-reinstall", "--no-deps", str(wheel)])
    pip_install([str(wheel)])
    return find_horovod()


def _is_asked_for(there: Installed, plan: Plan, *, mpi: bool | None, nccl: bool | None) -> bool:
    """Whether an installed Horovod works, is for this torch, and has what the options name."""
    # Built for another torch, it may load all the same and then read its tensors wrong.
    if not there.works or there.built_for not in (None, plan.torch):
        return False
    asked = {"mpi": mpi, "nccl": nccl}
    return all(want is None or want == (name in there.controllers) for name, want in asked.items())


def _finish(console: Console, done: Installed) -> Installed:
    _say(console, f"installed Horovod {done.describe()}")
    return done


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
