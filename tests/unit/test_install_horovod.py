"""`commlib install-horovod` but for the build itself, which `make horovod` does."""

import dataclasses
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from commlib.cli import doctor
from commlib.cli.horovod import cache, install, plan
from commlib.cli.horovod.error import InstallError
from commlib.cli.horovod.installed import Installed, last_exception
from commlib.cli.main import app

PLAN = plan.Plan(torch="2.13.0+cpu", python="cp311", platform="linux-x86_64")
WORKS = Installed(version="0.28.1", controllers=("gloo",), built_for="2.13.0+cpu")
BROKEN = Installed(version="0.28.1", built_for="2.10.0+cpu", error="ImportError: undefined symbol")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_wheel(folder):
    """A wheel of no content, as pip would name the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "horovod-0.28.1-py3-none-any.whl"
    info = "horovod-0.28.1.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("horovod/__init__.py", "")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


# The plan and its key.


def test_key_names_all_that_decides():
    assert PLAN.key == "0.28.1-torch-2.13.0+cpu-cp311-linux-x86_64-gloo"
    others = [
        {"torch": "2.13.0"},
        {"python": "cp312"},
        {"platform": "linux-aarch64"},
        {"mpi": True},
        {"nccl": True},
        {"cuda": Path("/usr/local/cuda")},
    ]
    keys = {dataclasses.replace(PLAN, **other).key for other in others}
    assert len(keys | {PLAN.key}) == len(others) + 1


def test_plan_is_of_this_environment(monkeypatch):
    monkeypatch.setattr(plan.shutil, "which", lambda name: None)
    made = plan.make_plan(mpi=None, nccl=False)
    assert (made.torch, made.mpi, made.nccl) == (torch.__version__, False, False)
    assert made.python.startswith(f"cp{sys.version_info.major}{sys.version_info.minor}")


def test_mpi_is_taken_where_it_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallError, match="no mpicxx on PATH"):
        plan.make_plan(mpi=True, nccl=False)
    program(tmp_path / "mpicxx", "exit 0")
    assert plan.make_plan(mpi=None, nccl=False).mpi
    assert not plan.make_plan(mpi=False, nccl=False).mpi


def test_nccl_wants_cuda_and_headers(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InstallError, match="CPU build"):
        plan.make_plan(mpi=False, nccl=True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    program(tmp_path / "cuda" / "bin" / "nvcc", "exit 0")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    home = tmp_path / "site-packages" / "nvidia" / "nccl"
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        (home / name).parent.mkdir(parents=True)
        (home / name).touch()
    made = plan.make_plan(mpi=False, nccl=None)
    assert made.nccl and made.nccl_home is not None and made.cuda == tmp_path / "cuda"
    assert plan.make_plan(mpi=False, nccl=False).nccl_home is None


def test_missing_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InstallError, match="pip install torch"):
        plan.make_plan(mpi=None, nccl=None)


# The cache.


def test_wheel_goes_to_the_cache_whole(tmp_path):
    assert cache.cached_wheel(PLAN) is None
    with cache.workplace(PLAN) as first, cache.workplace(PLAN) as second:
        assert first != second and cache.cached_wheel(PLAN) is None
        kept = [cache.keep(PLAN, fake_wheel(folder)) for folder in (first, second)]
    assert kept[0] == kept[1] == cache.cached_wheel(PLAN)
    assert kept[0].parent == tmp_path / "cache" / "commlib" / "horovod" / PLAN.key
    assert zipfile.ZipFile(kept[0]).testzip() is None
    assert os.listdir(kept[0].parent) == [kept[0].name]


@pytest.fixture
def steps(monkeypatch):
    """Records what an installation does; what is installed after each `pip` is `answers[n]`."""
    done, answers = [], [WORKS]
    monkeypatch.setattr(install, "make_plan", lambda **options: PLAN)
    monkeypatch.setattr(install, "find_horovod", lambda: answers.pop(0))
    monkeypatch.setattr(install, "pip_install", lambda words: done.append(f"pip {len(words)}"))

    def build(plan, tools, folder, *, jobs, on_progress):
        done.append("build")
        return fake_wheel(folder)

    monkeypatch.setattr(install, "find_tools", lambda folder: None)
    monkeypatch.setattr(install, "build", build)
    return done, answers


def run(**options):
    settings = {"mpi": None, "nccl": None, "force": False, "jobs": 1} | options
    return install.install(Console(quiet=True), **settings)


PIP = ["pip 3", "pip 1"]  # the wheel by force, then what it needs


def test_installed_already(steps):
    done, _ = steps
    assert run() == WORKS and done == []


def test_built_when_not_there_and_cached_for_the_next(steps):
    done, answers = steps
    answers[:] = [None, WORKS, None, WORKS]
    assert run() == WORKS and done == ["build", *PIP]
    done.clear()
    assert run() == WORKS and done == PIP


def test_force_builds_whatever_is_there(steps):
    done, answers = steps
    with cache.workplace(PLAN) as folder:
        cache.keep(PLAN, fake_wheel(folder))
    assert run(force=True) == WORKS and done == ["build", *PIP]
    assert answers == []


@pytest.mark.parametrize("there", [BROKEN, dataclasses.replace(WORKS, built_for="2.13.0+cu130")])
def test_built_for_another_torch_is_built_anew(steps, there):
    done, answers = steps
    answers[:] = [there, WORKS]
    assert run() == WORKS and done == ["build", *PIP]


def test_cached_wheel_that_does_not_load_is_built_anew(steps):
    done, answers = steps
    with cache.workplace(PLAN) as folder:
        cache.keep(PLAN, fake_wheel(folder))
    answers[:] = [None, BROKEN, WORKS]
    assert run() == WORKS and done == [*PIP, "build", *PIP]


def test_installed_without_what_is_asked_for_is_built_anew(steps):
    done, answers = steps
    with_mpi = dataclasses.replace(WORKS, controllers=("gloo", "mpi"))
    answers[:] = [WORKS, with_mpi]
    assert run(mpi=True) == with_mpi and done == ["build", *PIP]


def test_built_but_does_not_load(steps):
    _, answers = steps
    answers[:] = [None, BROKEN]
    with pytest.raises(InstallError, match=r"does not work: .*undefined symbol; log: .*\.log"):
        run()


def test_command_exits_with_1_and_a_line(monkeypatch):
    def fail(**options):
        raise InstallError("no C++ compiler on PATH: install GCC 10")

    monkeypatch.setattr(install, "make_plan", fail)
    result = CliRunner().invoke(app, ["install-horovod"])
    assert result.exit_code == 1
    assert result.output == "commlib install-horovod: no C++ compiler on PATH: install GCC 10\n"


# What doctor says.


def test_the_reason_is_the_first_line_of_the_last_exception():
    text = """Traceback (most recent call last):
  File "mpi_ops.py", line 1, in <module>
ImportError: /lib/mpi_lib_v2.so: undefined symbol: _ZN3c10
The above exception was the direct cause of the following exception:
horovod.common.exceptions.HorovodVersionMismatchError: Framework pytorch: 2.13 but found 2.10.
            Reinstall Horovod using `pip install --no-cache-dir`"""
    assert last_exception(text) == "Framework pytorch: 2.13 but found 2.10."
    assert last_exception("") is None


@pytest.mark.parametrize(
    ("there", "works", "note"),
    [
        (None, False, r"not installed: commlib install-horovod"),
        (WORKS, True, r"0\.28\.1 with gloo"),
        (
            dataclasses.replace(WORKS, controllers=("gloo", "mpi", "nccl"), cuda=True),
            True,
            r"0\.28\.1 with gloo, mpi, nccl and CUDA",
        ),
        (
            BROKEN,
            False,
            r"0\.28\.1, built for torch 2\.10\.0\+cpu, cannot be imported: .*undefined symbol; "
            r"to build it for this torch: commlib install-horovod",
        ),
    ],
)
def test_doctor(monkeypatch, there, works, note):
    monkeypatch.setattr(doctor, "find_horovod", lambda: there)
    line = next(found for found in doctor.find_transports() if found.name == "horovod")
    assert line.works is works and re.fullmatch(note, line.note)
