"""The error of an installation that cannot go on."""

from __future__ import annotations


class InstallError(RuntimeError):
    """Horovod cannot be built or installed: says why, and what to do.

    Source: ours.
    """
