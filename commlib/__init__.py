"""commlib: distributed training that moves only the bytes that carry information.

Names are loaded when they are first used, so `commlib doctor` can speak where the compiled kernels
cannot be loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlib import ddp, embrace, horovod, reducers, topology
    from commlib.clip import clip_grad_norm_
    from commlib.errors import CommError
    from commlib.reducers import S2, Auto, Minimal
    from commlib.rows import SparseRows
    from commlib.topology import Link

__version__ = "0.1.0"

__all__ = [
    "S2",
    "Auto",
    "CommError",
    "Link",
    "Minimal",
    "SparseRows",
    "__version__",
    "clip_grad_norm_",
    "ddp",
    "embrace",
    "horovod",
    "reducers",
    "topology",
]

_HOMES = {
    "S2": "commlib.reducers",
    "Auto": "commlib.reducers",
    "Minimal": "commlib.reducers",
    "CommError": "commlib.errors",
    "clip_grad_norm_": "commlib.clip",
    "Link": "commlib.topology",
    "SparseRows": "commlib.rows",
}
_MODULES = ("ddp", "embrace", "horovod", "reducers", "topology")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"commlib.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'commlib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
