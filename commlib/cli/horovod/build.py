"""Builds the wheel: pip fetches the source, CMake compiles it, the log says how far it is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from commlib.cli.horovod.cache import cache_folder
from commlib.cli.horovod.error import InstallError
from commlib.cli.horovod.log import first_error, offline, percent, phase
from commlib.cli.horovod.pip import download_error, pip_env
from commlib.cli.horovod.plan import RELEASE, Plan
from commlib.cli.horovod.tools import Tools
from commlib.cli.horovod.wrapper import write_cmake, write_wrapper

# Where the user's NCCL and CUDA are. Other variables of Horovod's choose what is built, and would
# make a wheel that is not what its key says.
_PLACES = ("HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK", "HOROVOD_NVTX_HOME")


def build(
    plan: Plan, tools: Tools, folder: Path, *, jobs: int, on_progress: Callable[[str, int], None]
) -> Path:
    """Builds the plan's wheel.

    Args:
        plan: What to build.
        tools: What builds it.
        folder: An empty folder to work in.
        jobs: Compilers at the same time; each takes up to 2 GB of memory.
        on_progress: Called with what is being done, and per cent of the files compiled.

    Returns:
        The wheel, in `folder`.

    Raises:
        InstallError: It did not work; says which error came first, and names the log.
    """
    wheels = folder / "wheels"
    command = [tools.python, "-m", "pip", "wheel", "--verbose", "--no-deps"]
    # pip's cache and ready wheels know nothing of torch, so they are for some other one.
    command += ["--no-build-isolation", "--no-cache-dir", "--no-binary", "horovod"]
    command += ["--wheel-dir", str(wheels), f"horovod=={RELEASE}"]
    log = log_path(plan)
    env = build_env(plan, tools, folder, jobs=jobs, environ=os.environ)
    code = _run(command, env, log, on_progress)
    made = sorted(wheels.glob("horovod-*.whl")) if code == 0 else []
    if not made:
        raise InstallError(_explain(log))
    return made[0]


def log_path(plan: Plan) -> Path:
    """Returns the log of this process's build."""
    return cache_folder(plan) / f"build-{os.getpid()}.log"


def build_env(
    plan: Plan, tools: Tools, folder: Path, *, jobs: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the build's environment: compiler, CMake, and Horovod's switches from the plan.

    Args:
        plan: What to build.
        tools: What builds it.
        folder: Folder for the compiler's wrapper and NCCL's links.
        jobs: Compilers at the same time.
        environ: The environment to start from.
    """
    env = {k: v for k, v in environ.items() if not k.startswith("HOROVOD_") or k in _PLACES}
    # GNU make in an outer `make` leaves its own flags here.
    env |= {"MAKEFLAGS": f"-j{jobs}", "CMAKE_GENERATOR": "Unix Makefiles"}
    env |= {"CXX": str(write_wrapper(folder / "cxx", tools.compiler))}
    env |= {"HOROVOD_CMAKE": tools.cmake}
    env |= {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1"}
    env |= {"HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1"}
    env |= {"HOROVOD_WITH_MPI" if plan.mpi else "HOROVOD_WITHOUT_MPI": "1"}
    if plan.cuda is None:
        env |= {"HOROVOD_CMAKE": str(write_cmake(folder / "cmake", tools.cmake))}
    else:
        env |= {"CUDA_HOME": str(plan.cuda), "HOROVOD_CUDA_HOME": str(plan.cuda)}
    if plan.nccl:
        env |= {"HOROVOD_GPU_OPERATIONS": "NCCL"}
        if plan.nccl_home is not None:
            env |= {"HOROVOD_NCCL_HOME": str(_linkable(plan.nccl_home, folder / "nccl"))}
    return pip_env(env)


def _linkable(home: Path, folder: Path) -> Path:
    """Returns a folder whose lib/ has a name that a linker looks for.

    NCCL's package from PyPI has only `libnccl.so.2`, the name that programs load.
    """
    library = home / "lib" / "libnccl.so.2"
    if not library.is_file() or (home / "lib" / "libnccl.so").exists():
        return home
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libnccl.so").symlink_to(library)
    (folder / "include").symlink_to(home / "include")
    return folder


def _run(
    command: list[str], env: dict[str, str], log: Path, on_progress: Callable[[str, int], None]
) -> int:
    """Runs the build with its output in the log; returns the exit code."""
    doing, done = "fetching Horovod", 0
    on_progress(doing, done)
    with (
        open(log, "w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                doing, done = phase(line) or doing, max(done, percent(line) or 0)
                on_progress(doing, done)
        except BaseException:
            # pip's own children too: CMake, make, compilers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
    return process.returncode


def _explain(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if offline(lines):
        return f"{download_error(lines)}; log: {log}"
    return f"the build failed: {first_error(lines) or 'no error in its log'}; log: {log}"
