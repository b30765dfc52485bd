"""What `commlib install-horovod` builds with, and what it reads in the log."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from commlib.cli.horovod import build as building
from commlib.cli.horovod import pip, plan, tools
from commlib.cli.horovod.error import InstallError
from commlib.cli.horovod.log import first_error, offline, percent, phase
from commlib.cli.horovod.wrapper import write_cmake, write_wrapper

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
PLAN = plan.Plan(torch="2.13.0+cpu", python="cp311", platform="linux-x86_64")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("CXX", "HOROVOD_CMAKE"):
        monkeypatch.delenv(name, raising=False)


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# What builds.


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("-std=c++11", "-std=c++20"),
        ("-std=gnu++14", "-std=c++20"),
        ("-std=c++17", "-std=c++20"),
        ("-std=c++20", "-std=c++20"),
        ("-std=c++23", "-std=c++23"),
        ("-DSTD=-std=c++11", "-DSTD=-std=c++11"),
        ('-DTEXT="a b"  $HOME', '-DTEXT="a b"  $HOME'),
    ],
)
def test_wrapper_raises_the_standard(tmp_path, given, passed):
    compiler = program(tmp_path / "a compiler", 'printf "%s\\n" "$@"')
    wrapper = write_wrapper(tmp_path / "cxx", [str(compiler), "--own"])
    out = subprocess.check_output([wrapper, "-c", given, "x.cc"], text=True)
    assert out.splitlines() == ["--own", "-c", passed, "x.cc"]


def test_wrapper_leaves_nvcc_its_standard(tmp_path):
    compiler = program(tmp_path / "compiler", 'printf "%s\\n" "$@"')
    wrapper = write_wrapper(tmp_path / "cxx", [str(compiler)])
    out = subprocess.check_output([wrapper, "-std=c++17", "-D__CUDACC__"], text=True)
    assert out.splitlines() == ["-std=c++17", "-D__CUDACC__"]


def test_wrapper_passes_the_exit_code(tmp_path):
    wrapper = write_wrapper(tmp_path / "cxx", ["sh", "-c", "exit 7"])
    assert subprocess.run([wrapper]).returncode == 7


def test_cmake_sees_no_cuda(tmp_path):
    cmake = program(tmp_path / "the cmake", 'printf "%s\\n" "$@"')
    wrapper = write_cmake(tmp_path / "cmake", str(cmake))
    file = tmp_path / "src" / "cmake" / "Modules" / "FindPytorch.cmake"
    file.parent.mkdir(parents=True)
    file.write_text('"True if ((torch.version.cuda is not None) and (CUDA_HOME is not None))"\n')
    out = subprocess.check_output([wrapper, tmp_path / "src"], text=True).splitlines()
    assert out[0] == str(tmp_path / "src") and "-DCMAKE_CUDA_COMPILER=" in out
    assert file.read_text() == '"True if ((torch.version.cuda is not None) and (False))"\n'
    built = subprocess.check_output([wrapper, "--build", "."], text=True)
    assert built.splitlines() == ["--build", "."]


def test_compiler_named_by_cxx_must_work(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(InstallError, match=r"CXX=/bin/false does not compile C\+\+20.*install GCC"):
        tools.find_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    with pytest.raises(InstallError, match="No such file"):
        tools.find_compiler(tmp_path)


def test_no_compiler_no_make(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "need_pip", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(InstallError, match=r"no C\+\+ compiler on PATH: install GCC 10"):
        tools.find_tools(tmp_path)
    program(tmp_path / "bin" / "g++", 'for last do :; done; : > "$last"')
    with pytest.raises(InstallError, match="no make on PATH"):
        tools.find_tools(tmp_path)


@pytest.mark.parametrize(
    ("version", "good"), [("3.12.4", False), ("3.13.0", True), ("3.31.10", True), ("4.0.2", False)]
)
def test_cmake_of_the_system(tmp_path, monkeypatch, version, good):
    cmake = program(tmp_path / "cmake", f"echo cmake version {version}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert tools.find_cmake() == (str(cmake) if good else None)
    monkeypatch.setenv("HOROVOD_CMAKE", str(cmake))
    if good:
        assert tools.find_cmake() == str(cmake)
    else:
        with pytest.raises(InstallError, match="HOROVOD_CMAKE="):
            tools.find_cmake()


def test_no_cmake(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.find_cmake() is None


def test_pins_are_those_of_pyproject():
    text = PYPROJECT.read_text()
    for pin in tools.PYTHON_TOOLS:
        assert f'"{pin}"' in text


def test_build_environment_is_the_plans(tmp_path):
    some = tools.Tools(python="python", cmake="/opt/cmake", compiler=["g++"])
    theirs = {"HOROVOD_WITH_MPI": "1", "HOROVOD_NCCL_LIB": "/n", "MAKEFLAGS": "-j9", "HOME": "/h"}
    env = building.build_env(PLAN, some, tmp_path, jobs=2, environ=theirs)
    assert "HOROVOD_WITH_MPI" not in env and env["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in env and env["HOROVOD_WITH_GLOO"] == "1"
    assert env["HOROVOD_CMAKE"] == str(tmp_path / "cmake")
    assert env["MAKEFLAGS"] == "-j2" and env["HOME"] == "/h" and env["HOROVOD_NCCL_LIB"] == "/n"
    home = tmp_path / "home"
    (home / "lib").mkdir(parents=True)
    (home / "lib" / "libnccl.so.2").touch()
    gpu = dataclasses.replace(PLAN, mpi=True, nccl=True, cuda=Path("/cuda"), nccl_home=home)
    env = building.build_env(gpu, some, tmp_path, jobs=1, environ={})
    assert env["HOROVOD_WITH_MPI"] == "1" and env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert env["CUDA_HOME"] == "/cuda" and env["HOROVOD_CMAKE"] == "/opt/cmake"
    assert (
        Path(env["HOROVOD_NCCL_HOME"], "lib", "libnccl.so").resolve() == home / "lib/libnccl.so.2"
    )


# The log.


def test_progress():
    assert percent("  [  1%] Building CXX object a.cc.o") == 1
    assert percent("[100%] Built target pytorch") == 100
    assert percent("  [12/70] Building") is None and percent("99% of it") is None
    assert phase("  Running CMake in build/temp:") == "configuring Horovod"
    assert phase("  [  1%] Building CXX object a.cc.o") == "compiling Horovod"
    assert phase("  -- The CXX compiler identification is GNU") is None


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (
            """
  CMake Warning at CMakeLists.txt:1 (message):
  [ 80%] Building CXX object mpi_ops_v2.cc.o
  /tmp/t/torch/all.h:4:2: error: #error C++17 or later compatible compiler is required
      4 | #error C++17 or later
  /tmp/t/torch/all.h:9:2: error: another
  gmake: *** [Makefile:136: all] Error 2
  ERROR: Failed building wheel for horovod""",
            "/tmp/t/torch/all.h:4:2: error: #error C++17 or later compatible compiler is required",
        ),
        ("x.cc:1:10: fatal error: a.h: No such file", "x.cc:1:10: fatal error: a.h: No such file"),
        ('kernels.cu(12): error: identifier "x"', 'kernels.cu(12): error: identifier "x"'),
        ("  g++: fatal error: Killed signal terminated program cc1plus",) * 2,
        ("  /usr/bin/ld: cannot find -lnccl", "cannot find -lnccl"),
        (
            "  CMake Error at CMakeLists.txt:9 (message):\n\n    No NCCL\n\n  error: sub",
            "CMake Error at CMakeLists.txt:9 (message): No NCCL",
        ),
        (
            "  ModuleNotFoundError: No module named 'wheel'\n  ERROR: Failed",
            "ModuleNotFoundError: No module named 'wheel'",
        ),
        ("ERROR: Failed building wheel for horovod", "Failed building wheel for horovod"),
        ("nothing", None),
    ],
)
def test_first_error(log, error):
    assert first_error(log.splitlines()) == (error and error.strip())


def test_no_network_is_told_apart():
    lines = ["WARNING: Retrying", "ERROR: No matching distribution found for horovod==0.28.1"]
    assert offline(lines) and not offline(["x.cc:1:1: error: y"])
    assert "cannot download horovod==0.28.1: check the network" in pip.download_error(lines)


def test_pip_without_network_says_so(tmp_path):
    with pytest.raises(InstallError, match="cannot download no-such-package"):
        pip.pip_install(["--no-index", "--target", str(tmp_path), "no-such-package"])
