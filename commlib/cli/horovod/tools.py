"""What the build needs beside torch: a compiler, make, CMake, setuptools and wheel.

The compiler and make are the system's. The others come from PyPI, pinned, into an environment
that is thrown away after the build and sees the packages of this one, so nothing here changes.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from commlib.cli.horovod.error import InstallError
from commlib.cli.horovod.pip import need_pip, pip_install

# setuptools and wheel: the versions of the dependency group "build" in pyproject.toml.
PYTHON_TOOLS = ("packaging==26.4", "setuptools==84.2.1", "wheel==0.48.0")
CMAKE = "cmake==3.31.10"
_CMAKE_VERSIONS = ((3, 13), (4, 0))  # from, below: 4.0 no longer reads the old files in the source
_PROGRAM = """\
template <typename T> concept Number = requires(T x) { x + x; };
template <Number T> T twice(T x) { return x + x; }
int main() { return twice(0); }
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What builds.

    Attributes:
        python: A python that imports torch, setuptools and wheel.
        cmake: CMake, 3.13 or later, below 4.
        compiler: The C++ compiler's command.
    """

    python: str
    cmake: str
    compiler: list[str]


def find_tools(folder: Path) -> Tools:
    """Finds what builds, and installs what can be installed.

    Args:
        folder: A folder for it, to be deleted after the build.

    Raises:
        InstallError: No compiler, no make or no pip, or a package cannot be downloaded.
    """
    need_pip()
    compiler = find_compiler(folder)
    if shutil.which("make") is None:
        raise InstallError("no make on PATH: install it (Debian: apt-get install make)")
    python = _make_environment(folder / "env")
    cmake = find_cmake()
    wanted = list(PYTHON_TOOLS) + ([CMAKE] if cmake is None else [])
    pip_install(wanted, python=python)
    return Tools(
        python=python, cmake=cmake or str(folder / "env" / "bin" / "cmake"), compiler=compiler
    )


def find_compiler(folder: Path) -> list[str]:
    """Returns the command of a compiler that knows C++20: CXX, or else the first one on PATH.

    Raises:
        InstallError: There is none, or CXX is not one.
    """
    remedy = "install GCC 10 or later (Debian: apt-get install g++), or name another one in CXX"
    given = os.environ.get("CXX")
    if given:
        refused = _why_not_cpp20(shlex.split(given), folder)
        if refused:
            raise InstallError(f"CXX={given} does not compile C++20 ({refused}): {remedy}")
        return shlex.split(given)
    there = [name for name in ("g++", "c++", "clang++") if shutil.which(name)]
    if not there:
        raise InstallError(f"no C++ compiler on PATH: {remedy}")
    reasons = {name: _why_not_cpp20([name], folder) for name in there}
    for name, refused in reasons.items():
        if refused is None:
            return [name]
    raise InstallError(f"{there[0]} does not compile C++20 ({reasons[there[0]]}): {remedy}")


def find_cmake() -> str | None:
    """Returns a CMake that reads Horovod's files, or None if the system has none such.

    Raises:
        InstallError: HOROVOD_CMAKE names one that does not.
    """
    given = os.environ.get("HOROVOD_CMAKE")
    path = given or shutil.which("cmake")
    if path is None:
        return None
    version = _cmake_version(path)
    oldest, too_new = _CMAKE_VERSIONS
    if version is not None and oldest <= version < too_new:
        return path
    if given:
        raise InstallError(
            f"HOROVOD_CMAKE={given} is no CMake from 3.13 to 3.31: "
            f'pip install "{CMAKE}", or unset it to have one installed for the build'
        )
    return None


def _make_environment(folder: Path) -> str:
    """Makes an environment that also sees this one's packages, and returns its python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = str(folder / "bin" / "python")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    places = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    # addsitedir, and not the bare path, because setuptools' stand-in for distutils is a .pth file.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in places]
    Path(done.stdout.strip(), "around.pth").write_text("".join(lines), encoding="utf-8")
    return python


def _why_not_cpp20(compiler: Sequence[str], folder: Path) -> str | None:
    source = folder / "try.cpp"
    source.write_text(_PROGRAM, encoding="utf-8")
    program = folder / "try"
    command = [*compiler, "-std=c++20", str(source), "-o", str(program)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        return lines[0] if lines else f"it exits with code {done.returncode}"
    return None if program.is_file() else "it writes no program"


def _cmake_version(path: str) -> tuple[int, int] | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    match = re.search(r"version (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else None
