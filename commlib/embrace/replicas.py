"""Keeps DDP from touching shards, which are no replicas: it would overwrite them with rank 0's.

DDP leaves out the parameters that the wrapped module names in `_ddp_params_and_buffers_to_ignore`.
The list is that module's alone, and names start there, so a model that becomes part of a larger
one needs a list there too: it is kept up to date whenever a module is put into another.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from commlib.embrace.columns import columns_of

_LIST = "_ddp_params_and_buffers_to_ignore"
_OURS = "_commlib_ddp_ignored"

_watching = False


def shard_names(model: nn.Module) -> list[str]:
    """Names of the shards among a model's parameters.

    Modules are asked directly: this runs for every module that anybody builds, and some give
    their parameters in ways of their own.
    """
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None and columns_of(parameter) is not None
    ]


def ignore_shards(model: nn.Module) -> None:
    """Have DDP leave a model's shards alone, and whatever its list has already; drop old ones."""
    _ignore(model, shard_names(model))


def watch_modules() -> None:
    """From now on, whatever takes a module with shards in keeps DDP from them."""
    global _watching
    if not _watching:
        _watching = True
        register_module_module_registration_hook(_on_registration)


def _ignore(model: nn.Module, names: Iterable[str]) -> None:
    ours: list[str] = getattr(model, _OURS, [])
    others = [name for name in getattr(model, _LIST, ()) if name not in ours]
    new = [name for name in names if name not in others]
    if new or ours:
        setattr(model, _OURS, new)
        setattr(model, _LIST, [*others, *new])


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None:
        return
    names = shard_names(child)
    if isinstance(parent, DistributedDataParallel):
        _check_wrapped(child, names)
    else:
        ours: list[str] = getattr(parent, _OURS, [])
        kept = [own for own in ours if not own.startswith(f"{name}.")]
        _ignore(parent, [*kept, *(f"{name}.{inner}" for inner in names)])


def _check_wrapped(model: nn.Module, names: list[str]) -> None:
    """Refuse, before DDP moves a byte, lists that somebody has replaced or that are out of date.

    Raises:
        ValueError: A shard that DDP would treat as a replica, or a replica that it would leave out.
    """
    listed = set(getattr(model, _LIST, ()))
    missing = [name for name in names if name not in listed]
    stale = [name for name in getattr(model, _OURS, ()) if name not in names]
    if missing:
        raise ValueError(
            f"DDP would overwrite partitioned tables {missing} with rank 0's: shard the model that"
            f" is wrapped, and add to its {_LIST} instead of replacing it"
        )
    if stale:
        raise ValueError(
            f"DDP would not average {stale}, which are partitioned no longer: unshard the model"
            " that is wrapped, not a part of it"
        )
