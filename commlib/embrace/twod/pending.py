"""A gradient that is still on its way: whoever looks at it waits for it first.

Between `backward()` and `optimizer.step()` a training loop may clip, unscale or print gradients.
Those of a scheduled model are under way then. They stand in `parameter.grad` as a tensor that
brings them all home at the first Python use, so such code sees what it always saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PendingGrad(Tensor):
    """Stands for a gradient; `arrive` is called before anything is done with it."""

    arrive: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for pending in _pending_in(args, kwargs or {}):
                pending.arrive()
            return func(*args, **(kwargs or {}))


def pending_grad(buffer: Tensor, arrive: Callable[[], None]) -> PendingGrad:
    """A gradient in the memory of `buffer`, strided or COO, which `arrive` fills."""
    pending: PendingGrad = torch.Tensor._make_subclass(PendingGrad, buffer)
    pending.arrive = arrive
    return pending


def arrived(parameter: Tensor) -> Tensor | None:
    """The pending gradient of a parameter, from now on an ordinary tensor; None where it has none.

    Whoever holds it sees what its memory is filled with.
    """
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        if not isinstance(gradient, PendingGrad):
            return None
        del gradient.arrive
        gradient.__class__ = Tensor  # type: ignore[assignment]
        return gradient


def _pending_in(args: Any, kwargs: dict[str, Any]) -> list[PendingGrad]:
    found = []
    for value in [*args, *kwargs.values()]:
        if isinstance(value, PendingGrad):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, PendingGrad)]
    return found
