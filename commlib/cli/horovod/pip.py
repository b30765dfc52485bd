"""Runs pip for one python, and says in one line what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from commlib.cli.horovod.error import InstallError
from commlib.cli.horovod.log import first_error, offline

# pip's own five tries, with longer and longer pauses, only delay the message where no network is.
_QUIET = {"PIP_RETRIES": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def pip_env(env: dict[str, str] | None = None) -> dict[str, str]:
    """Returns an environment for pip: the user's settings, then ours."""
    return _QUIET | dict(os.environ if env is None else env)


def pip_install(arguments: Sequence[str], *, python: str | None = None) -> None:
    """Installs packages into an environment.

    Args:
        arguments: Requirements and options of `pip install`.
        python: The environment's python, which needs no pip. Default: this one.

    Raises:
        InstallError: No pip, no network, or pip refused.
    """
    command = [sys.executable, "-m", "pip"]
    command += [] if python is None else ["--python", python]
    command += ["install", "--quiet", *arguments]
    done = subprocess.run(
        command, env=pip_env(), capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        raise InstallError(download_error(lines) if offline(lines) else _refusal(lines))


def need_pip() -> None:
    """Raises InstallError if this environment has no pip."""
    done = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True)
    if done.returncode:
        raise InstallError(
            f"no pip in {sys.prefix}: {sys.executable} -m ensurepip (or: uv pip install pip)"
        )


def download_error(lines: Sequence[str]) -> str:
    """Returns the message for packages that no index offers."""
    wanted = (line.partition("No matching distribution found for ")[2] for line in lines)
    what = next((name.strip() for name in wanted if name), "what it needs")
    return (
        f"pip cannot download {what}: check the network, "
        "and the index that pip uses (pip config list, PIP_INDEX_URL, PIP_NO_INDEX)"
    )


def _refusal(lines: Sequence[str]) -> str:
    error = first_error(lines)
    return f"pip failed: {error}" if error else "pip failed: " + " ".join(lines[-1:]).strip()
