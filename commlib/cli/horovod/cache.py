"""The wheels that were built, kept for the next environment.

<cache>/commlib/horovod/<key>/horovod-0.28.1-....whl
                              build-<pid>.log
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from commlib.cli.horovod.plan import Plan


def cache_folder(plan: Plan) -> Path:
    """Returns the folder of this plan's wheel and logs; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    return base / "commlib" / "horovod" / plan.key


def cached_wheel(plan: Plan) -> Path | None:
    """Returns the plan's wheel, or None if it has not been built."""
    return next(iter(sorted(cache_folder(plan).glob("horovod-*.whl"))), None)


@contextlib.contextmanager
def workplace(plan: Plan) -> Iterator[Path]:
    """Yields a new folder on the cache's file system; afterwards it is gone."""
    folder = cache_folder(plan)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as name:
        yield Path(name)


def keep(plan: Plan, wheel: Path) -> Path:
    """Moves a finished wheel into the cache, in one step: a reader finds a whole wheel or none.

    Args:
        plan: What the wheel was built from.
        wheel: A file in the plan's `workplace`.

    Returns:
        The wheel's new place. Of several that were built at once, the last one stays.
    """
    place = cache_folder(plan) / wheel.name
    os.replace(wheel, place)
    return place
