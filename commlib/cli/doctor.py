"""`commlib doctor`: what is here, what works, and why the rest does not."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commlib.cli import checkout
from commlib.cli.horovod.installed import find_horovod
from commlib.cli.ping import ping

_INSTALL_HOROVOD = "commlib install-horovod"
_MARKS = {True: "[green]yes[/green]", False: "[yellow]no[/yellow]", None: ""}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        works: Whether it can be used; None for a plain fact.
        note: The fact, or why it cannot be used and what to do.
    """

    name: str
    works: bool | None
    note: str


def examine(console: Console) -> None:
    """Prints what is installed, what can be used, and the measured link."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    with console.status("looking around"):
        for title, section in _SECTIONS:
            table.add_row(f"[cyan]{title}[/cyan]", "", "")
            for finding in section():
                table.add_row(f"  {finding.name}", _MARKS[finding.works], escape(finding.note))
    console.print(table)


def find_installed() -> list[Finding]:
    """Looks at commlib, what it runs on, and its optional packages."""
    return [
        Finding("commlib", None, _version("commlib") or "not installed: run from source"),
        Finding("python", None, f"{platform.python_version()} on {platform.platform()}"),
        Finding("cores", None, str(os.cpu_count())),
        _find_torch(),
        _find_cuda(),
        _find_tool("nvcc", "only needed to build CUDA kernels ahead of time"),
        _find_package("cupy", "pip install '.[cupy12]' or '.[cupy13]'"),
    ]


def find_kernels() -> list[Finding]:
    """Looks for the compiled kernels."""
    built = importlib.util.find_spec("commlib._C_cuda") is not None
    cuda = _import_error("commlib._C_cuda") if built else "not built"
    return [
        _found("CPU (commlib._C)", _import_error("commlib.ops")),
        _found("CUDA (commlib._C_cuda)", cuda),
    ]


def find_transports() -> list[Finding]:
    """Looks at the process-group backends of this torch, Horovod, and the network interfaces."""
    import torch.distributed as dist

    if not dist.is_available():
        return [Finding("torch.distributed", False, "this torch is built without it")]
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    note = f"{interfaces}; GLOO_SOCKET_IFNAME={chosen}" if chosen else interfaces
    return [
        Finding("gloo", dist.is_gloo_available(), ""),
        Finding("nccl", dist.is_nccl_available(), "" if dist.is_nccl_available() else "no CUDA"),
        _find_horovod(),
        Finding("interfaces", None, note),
    ]


def find_bench() -> list[Finding]:
    """Looks whether the benchmarks are there, and whether hosts can be emulated."""
    if checkout.root() is None:
        return [Finding("benchmarks", False, "not part of an installed package; use a checkout")]
    reason: str | None = checkout.import_bench("netlab").why_not()
    return [
        Finding("benchmarks", True, ", ".join(checkout.bench_names())),
        Finding("emulated links", reason is None, reason or "network namespaces and tc"),
    ]


def find_link() -> list[Finding]:
    """Measures the link between two processes of this machine."""
    try:
        link = ping()
    except RuntimeError as error:
        return [Finding("two local ranks", False, str(error).strip().splitlines()[-1])]
    rate = 8e-9 / link["beta_s"] if link["beta_s"] else float("inf")
    return [
        Finding("two local ranks", True, "gloo on loopback"),
        Finding("latency", None, f"{link['alpha_s'] * 1e3:.2f} ms per exchange"),
        Finding("bandwidth", None, f"{rate:.1f} Gbit/s"),
    ]


_SECTIONS: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
    ("installed", find_installed),
    ("kernels", find_kernels),
    ("transports", find_transports),
    ("benchmarks", find_bench),
    ("link", find_link),
)


def _find_torch() -> Finding:
    import torch

    return Finding("torch", None, f"{torch.__version__}, {torch.get_num_threads()} threads")


def _find_cuda() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("cuda", True, torch.cuda.get_device_name())
    built = torch.version.cuda
    why = f"torch is built for CUDA {built}, but no device answers" if built else "a CPU torch"
    return Finding("cuda", False, why)


def _find_tool(name: str, note: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, False, note)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "release" in line]
    return Finding(name, done.returncode == 0, (lines or [path])[0].strip())


def _find_horovod() -> Finding:
    there = find_horovod()
    if there is None:
        return Finding("horovod", False, f"not installed: {_INSTALL_HOROVOD}")
    remedy = "" if there.works else f"; to build it for this torch: {_INSTALL_HOROVOD}"
    return Finding("horovod", there.works, there.describe() + remedy)


def _find_package(name: str, hint: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, f"not installed: {hint}")
    return Finding(name, True, _version(name) or "")


def _found(name: str, error: str | None) -> Finding:
    return Finding(name, error is None, error or "")


def _import_error(module: str) -> str | None:
    """Returns why a module cannot be imported, or None."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).strip().splitlines()[0]
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
