"""`commlib doctor`: what is here, what works, and why the rest does not."""

from rich.console import Console


def examine(console: Console) -> None:
    """Prints what was found."""
