"""Finds the benchmarks, which are in a checkout but not in an installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import commlib.cli


def root() -> Path | None:
    """Returns the checkout that this package runs from, or None if it was installed elsewhere."""
    folder = Path(commlib.cli.__file__).resolve().parents[2]
    return folder if (folder / "bench" / "netlab.py").is_file() else None


def bench_names() -> list[str]:
    """Lists the benchmarks that `commlib bench` can run."""
    folder = root()
    if folder is None:
        return []
    files = sorted((folder / "bench").glob("*.py"))
    return [path.stem for path in files if "__main__" in path.read_text(encoding="utf-8")]


def import_bench(name: str) -> Any:
    """Imports a module of the checkout's `bench` folder.

    Raises:
        ImportError: Not run from a checkout.
    """
    folder = root()
    if folder is None:
        raise ImportError(
            f"bench/{name}.py is not part of the installed package; "
            "run from a checkout installed with `pip install --editable .`"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"bench.{name}")
