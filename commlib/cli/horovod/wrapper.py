"""Programs in front of the compiler and of CMake, that change what Horovod asks of them.

Horovod's CMake files, and those of the Gloo in it, ask for C++11 and C++14 in several places, and
torch's headers no longer compile with either. CMake has no variable that overrides all of them, so
the argument is replaced where every one of them ends up.

nvcc runs the same compiler to preprocess for its own front end, which reads the standard that nvcc
was told: a call by nvcc keeps its standard.

A build for the CPU is not to depend on the CUDA that lies about: CMake would stop at an nvcc that
does not work with this compiler, and at a /usr/local/cuda without nvcc, in which torch still sees a
toolkit. So CMake is told that there is none, and torch is not asked.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

_COMPILER = """\
#!/bin/sh
standard=-std=c++20
for argument do
    case $argument in
        -D__CUDACC__*|-D__NVCC__*) standard= ;;
    esac
done
for argument do
    shift
    case $argument in
        -std=c++0x|-std=c++11|-std=c++1y|-std=c++14|-std=c++1z|-std=c++17|\\
        -std=gnu++0x|-std=gnu++11|-std=gnu++1y|-std=gnu++14|-std=gnu++1z|-std=gnu++17)
            argument=${{standard:-$argument}} ;;
    esac
    set -- "$@" "$argument"
done
exec {compiler} "$@"
"""
_CMAKE = """\
#!/bin/sh
case $1 in
    --build) ;;
    *)
        file=$1/cmake/Modules/FindPytorch.cmake
        sed 's/CUDA_HOME is not None/False/' "$file" > "$file.new" && mv "$file.new" "$file"
        set -- "$@" -DCMAKE_CUDA_COMPILER= -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON
        ;;
esac
exec {cmake} "$@"
"""


def write_wrapper(path: Path, compiler: Sequence[str]) -> Path:
    """Writes an executable that runs `compiler` with C++20 in place of an older standard.

    Args:
        path: The file to write.
        compiler: The compiler's command, such as `["ccache", "g++"]`.

    Returns:
        `path`.
    """
    return _write(path, _COMPILER.format(compiler=shlex.join(compiler)))


def write_cmake(path: Path, cmake: str) -> Path:
    """Writes an executable that runs `cmake` on Horovod's source and hides CUDA from it.

    Args:
        path: The file to write.
        cmake: CMake's path.

    Returns:
        `path`.
    """
    return _write(path, _CMAKE.format(cmake=shlex.quote(cmake)))


def _write(path: Path, script: str) -> Path:
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)
    return path
