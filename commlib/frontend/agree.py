"""Refuses to start when ranks do not mean the same: what differs is named, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commlib.schedule.peers import Peers


def check_agreement(
    facts: Mapping[str, Any], peers: Peers, mistake: Exception | None = None
) -> None:
    """Compare `facts` over the ranks of `peers`; collective.

    Args:
        facts: What must be equal, by a name that the user knows it by.
        peers: The ranks.
        mistake: What this rank found wrong by itself. It is raised only after the others know, who
            would else wait for a rank that gave up.

    Raises:
        ValueError: Some fact differs; names it, its values and their ranks. Or another rank found
            a mistake; repeats it.
        Exception: `mistake`, where given.

    Source: ours (grace #7 is the failure it prevents).
    """
    text = None if mistake is None else f"{type(mistake).__name__}: {mistake}"
    told = peers.gather("facts", (dict(facts), text))
    if mistake is not None:
        raise mistake
    for rank, (_, theirs) in enumerate(told):
        if theirs is not None:
            raise ValueError(f"rank {rank} of the group refused its arguments: {theirs}")
    everyone: list[dict[str, Any]] = [theirs for theirs, _ in told]
    for fact in {fact: None for theirs in everyone for fact in theirs}:
        values: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            values.setdefault(repr(theirs[fact]) if fact in theirs else "absent", []).append(rank)
        if len(values) > 1:
            shown = "; ".join(f"ranks {ranks}: {_short(value)}" for value, ranks in values.items())
            raise ValueError(
                f"{fact} must be the same on every rank, but differs: {shown}."
                " Build the same model and pass the same arguments on every rank"
            )


def _short(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
