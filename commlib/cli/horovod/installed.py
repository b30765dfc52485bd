"""Looks at the Horovod that is installed, from a process of its own: an import may also crash."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import subprocess
import sys

CONTROLLERS = ("gloo", "mpi", "nccl")
_ASK = """\
import json
import horovod.torch as hvd
import horovod.torch.mpi_lib_v2  # horovod.torch hides why it could not load it
built = [name for name in %r if getattr(hvd, name + "_built")()]
print(json.dumps({"built": built, "cuda": bool(hvd.cuda_built())}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Installed:
    """An installed Horovod.

    Attributes:
        version: Its version.
        controllers: Those of CONTROLLERS that it was built with; none if it does not load.
        cuda: It takes tensors on CUDA devices.
        built_for: Version of torch that it was built for, or None if its files do not say.
        error: Why it cannot be imported, or None if it can.
    """

    version: str
    controllers: tuple[str, ...] = ()
    cuda: bool = False
    built_for: str | None = None
    error: str | None = None

    @property
    def works(self) -> bool:
        """Whether it can be imported and has a controller that needs no MPI."""
        return self.error is None and "gloo" in self.controllers

    def describe(self) -> str:
        """Says in a line what it can do, or why it cannot be imported."""
        if self.error is not None:
            for_torch = f"built for torch {self.built_for}" if self.built_for else "not for torch"
            return f"{self.version}, {for_torch}, cannot be imported: {self.error}"
        has = ", ".join(self.controllers) or "no controller"
        return f"{self.version} with {has}" + (" and CUDA" if self.cuda else "")


def find_horovod() -> Installed | None:
    """Returns the Horovod of this environment, or None if none is installed."""
    try:
        package = importlib.metadata.distribution("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    built_for = _built_for(package)
    done = subprocess.run(
        [sys.executable, "-c", _ASK % (CONTROLLERS,)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        error = last_exception(done.stderr) or f"its import ends with code {done.returncode}"
        return Installed(version=package.version, built_for=built_for, error=error)
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return Installed(
        version=package.version,
        controllers=tuple(answer["built"]),
        cuda=answer["cuda"],
        built_for=built_for,
    )


def last_exception(text: str) -> str | None:
    """Finds the first line of a traceback's message; Horovod's own go on for several."""
    lines = [line for line in text.splitlines() if re.match(r"[\w.]+: ", line)]
    return lines[-1].rpartition("Error: ")[2].strip() if lines else None


def _built_for(package: importlib.metadata.Distribution) -> str | None:
    """Reads torch's version from the file that the build leaves in the package."""
    try:
        with open(str(package.locate_file("horovod/metadata.json")), encoding="utf-8") as file:
            version = json.load(file).get("pytorch")
    except (OSError, ValueError):
        return None
    return None if version is None else str(version)
