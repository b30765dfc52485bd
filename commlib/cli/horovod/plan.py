"""What to build: Horovod's release, the torch it is built for, and its controllers.

--mpi       with MPI       auto: where `mpicxx` is on PATH
--nccl      with NCCL      auto: where torch is a CUDA build, nvcc is here, and nccl.h too
Gloo        always         it comes with Horovod's source
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from commlib.cli.horovod.error import InstallError

RELEASE = "0.28.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One build.

    Attributes:
        torch: Version of torch with its local part, such as "2.13.0+cpu".
        mpi: Build the MPI controller.
        nccl: Build NCCL's operations.
        cuda: Folder of the CUDA toolkit; None builds for the CPU alone.
        nccl_home: Folder with NCCL's include/ and lib/; None lets CMake look for it.
        python: Python's tag, such as "cp311".
        platform: Platform's tag, such as "linux-x86_64".
    """

    torch: str
    mpi: bool = False
    nccl: bool = False
    cuda: Path | None = None
    nccl_home: Path | None = None
    python: str = f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    platform: str = sysconfig.get_platform()

    @property
    def key(self) -> str:
        """Names all that decides what the wheel holds, for a folder of the cache."""
        controllers = ["gloo"] + ["mpi"] * self.mpi + ["nccl"] * self.nccl
        options = "-".join(controllers + ["cuda"] * (self.cuda is not None))
        return f"{RELEASE}-torch-{self.torch}-{self.python}-{self.platform}-{options}"


def make_plan(*, mpi: bool | None, nccl: bool | None) -> Plan:
    """Decides what to build in this environment.

    Args:
        mpi: With MPI or without; None where it is found.
        nccl: With NCCL or without; None where torch can use it and it is found.

    Raises:
        InstallError: No torch, or what was asked for is not here.
    """
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise InstallError(
            f"Horovod is built against torch, and torch cannot be imported ({error}): "
            "pip install torch"
        ) from error
    found_mpi = shutil.which("mpicxx") is not None
    if mpi and not found_mpi:
        raise InstallError(
            "--mpi: no mpicxx on PATH: install Open MPI or MPICH with its headers "
            "(Debian: libopenmpi-dev)"
        )
    cuda = _find_cuda() if torch.version.cuda else None
    why_not = _why_no_nccl(torch.version.cuda, cuda)
    if nccl and why_not:
        raise InstallError(f"--nccl: {why_not}")
    with_nccl = not why_not if nccl is None else nccl
    return Plan(
        torch=str(torch.__version__),
        mpi=found_mpi if mpi is None else mpi,
        nccl=with_nccl,
        cuda=cuda,
        nccl_home=_find_nccl(cuda) if with_nccl else None,
    )


def _why_no_nccl(built_for: str | None, cuda: Path | None) -> str | None:
    """Says what NCCL's operations lack, or None if nothing."""
    if not built_for:
        return "this torch is a CPU build: install a CUDA build of torch"
    if cuda is None:
        return f"no nvcc on PATH: install the CUDA {built_for} toolkit, or set CUDA_HOME"
    if _find_nccl(cuda) is None:
        return "no nccl.h found: set HOROVOD_NCCL_HOME to the folder of NCCL's include/ and lib/"
    return None


def _find_cuda() -> Path | None:
    """Returns the toolkit's folder, or None if no nvcc is where torch looks for it too."""
    names = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
    places = [Path(os.environ[name]) for name in names if os.environ.get(name)]
    # Before PATH, where a distribution may have put a script that runs the toolkit's nvcc.
    places.append(Path("/usr/local/cuda"))
    on_path = shutil.which("nvcc")
    if on_path:
        places.append(Path(on_path).resolve().parents[1])
    return next((place for place in places if (place / "bin/nvcc").is_file()), None)


def _find_nccl(cuda: Path | None) -> Path | None:
    """Returns the folder that holds include/nccl.h: the user's, the system's, or torch's own."""
    given = os.environ.get("HOROVOD_NCCL_HOME")
    if given:
        return Path(given)
    places = [cuda, Path("/usr/local"), Path("/usr")]
    # pip's builds of torch bring NCCL, with headers, as a package beside torch.
    places += [Path(entry) / "nvidia" / "nccl" for entry in sys.path if entry]
    return next((path for path in places if path and (path / "include/nccl.h").is_file()), None)
