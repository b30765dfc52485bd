"""Reads the build's log: how far it is, and what went wrong first."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
_CODE = re.compile(r"^\s*(\S+?[:(]\d+(?:[:,]\d+)?\)?: (?:fatal )?error: .*|.*: fatal error: .*)$")
_LINK = re.compile(r"(undefined reference to .*|cannot find -l\S+.*|\bKilled\b.*)$")
_CMAKE = re.compile(r"^\s*CMake Error\b.*")
_PIP = re.compile(r"^\s*ERROR: (.*)")
_PYTHON = re.compile(r"^\s*(\w+(?:Error|Exception): .*)")
_PHASES = (
    ("Collecting horovod", "fetching Horovod"),
    ("Running CMake in", "configuring Horovod"),
    ("[  1%]", "compiling Horovod"),
    ("removing build/", "packing Horovod"),
)
_OFFLINE = (
    "No matching distribution found",
    "Could not find a version",
    "Max retries exceeded",
    "NewConnectionError",
    "Could not fetch URL",
    "ConnectTimeoutError",
    "Temporary failure in name resolution",
)


def percent(line: str) -> int | None:
    """Returns 68 for CMake's line `[ 68%] Building CXX object ...`, None for any other."""
    match = _PERCENT.match(line)
    return int(match[1]) if match else None


def phase(line: str) -> str | None:
    """Returns what the build does from this line on, or None if it goes on as before."""
    text = line.strip()
    return next((name for start, name in _PHASES if text.startswith(start)), None)


def first_error(lines: Sequence[str]) -> str | None:
    """Finds what to tell the user of a failed build.

    Errors of the compiler come first, as they cause the others: then the linker's, CMake's,
    Python's and pip's.

    Returns:
        One line, with the file and its line where the compiler names them; None if there is none.
    """
    for pattern in (_CODE, _LINK):
        for line in lines:
            match = pattern.search(line)
            if match:
                return match[1].strip()
    for number, line in enumerate(lines):
        if _CMAKE.match(line):
            # CMake puts the place on one line and the reason, after an empty one, on the next.
            reason = next((text.strip() for text in lines[number + 1 :] if text.strip()), "")
            return f"{line.strip()} {reason}" if line.rstrip().endswith(":") else line.strip()
    for pattern in (_PYTHON, _PIP):
        for line in lines:
            match = pattern.match(line)
            if match:
                return match[1].strip()
    return None


def offline(lines: Sequence[str]) -> bool:
    """Whether pip could not get a package from any index."""
    return any(sign in line for line in lines for sign in _OFFLINE)
