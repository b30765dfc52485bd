"""Builds the stable-ABI extension ``commlib._C`` (one binary for CPython >= 3.10, torch >= 2.10).

Every ``csrc/**/*_cpu.cpp`` is picked up, so a new op family needs no change here, and all of
``csrc/scheduler``. Needs a C++20 compiler only: no ninja, no nvcc. Sources compile side by side,
``MAX_JOBS`` at a time.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TORCH_TARGET = "0x020a000000000000"  # 2.10: the oldest torch whose stable ABI has all we call
PYTHON_TARGET = "0x030a0000"  # 3.10


class ParallelBuild(build_ext):
    """build_ext that compiles the sources of an extension in parallel and skips fresh objects."""

    def build_extension(self, ext: Extension) -> None:
        compiler = self.compiler
        serial = compiler.compile
        headers = [p.stat().st_mtime for p in (ROOT / "csrc").rglob("*.h")]
        newest_header = max([Path(__file__).stat().st_mtime, *headers])

        def compile_one(source: str, output_dir: str, **options: object) -> list[str]:
            objects: list[str] = compiler.object_filenames([source], output_dir=output_dir)
            target = Path(objects[0])
            newest = max(newest_header, Path(source).stat().st_mtime)
            if self.force or not target.exists() or target.stat().st_mtime < newest:
                serial([source], output_dir=output_dir, **options)
            return objects

        def compile_all(sources: list[str], output_dir: str, **options: object) -> list[str]:
            jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
            with ThreadPoolExecutor(jobs) as pool:
                done = pool.map(lambda s: compile_one(s, output_dir, **options), sources)
                return [path for objects in done for path in objects]

        compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            compiler.compile = serial


def cpu_extension() -> Extension:
    from torch.utils.cpp_extension import include_paths, library_paths

    csrc = ROOT / "csrc"
    sources = [
        csrc / "module.cpp",
        csrc / "ops.cpp",
        *sorted(csrc.rglob("*_cpu.cpp")),
        *sorted((csrc / "scheduler").glob("*.cpp")),
    ]
    return Extension(
        "commlib._C",
        [str(path.relative_to(ROOT)) for path in sources],
        depends=[str(path.relative_to(ROOT)) for path in csrc.rglob("*.h")],
        include_dirs=["csrc", *include_paths()],
        library_dirs=library_paths(),
        libraries=["c10", "torch_cpu", "torch"],
        define_macros=[
            ("TORCH_TARGET_VERSION", TORCH_TARGET),
            ("Py_LIMITED_API", PYTHON_TARGET),
        ],
        # -ffp-contract=off: the same bits on machines with and without FMA.
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-g0",
            "-ffp-contract=off",
            "-fno-trapping-math",  # let comparisons vectorise; changes no result
            "-fno-math-errno",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
        ],
        extra_link_args=["-Wl,-s"] if sys.platform == "linux" else [],
        language="c++",
        py_limited_api=True,
    )


setup(
    ext_modules=[cpu_extension()],
    cmdclass={"build_ext": ParallelBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
