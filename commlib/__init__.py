"""commlib: distributed training that moves only the bytes that carry information."""

from commlib import ddp, reducers, topology
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
    "ddp",
    "reducers",
    "topology",
]
