"""Partitioned embedding tables: each rank holds some columns, whole rows travel when looked up.

model = commlib.embrace.shard(model)    # nn.Embedding, nn.EmbeddingBag: partitioned, in place
ddp = DistributedDataParallel(model)    # the rest as before
"""

from commlib.embrace.bag import ShardedEmbeddingBag
from commlib.embrace.batch import lookup
from commlib.embrace.convert import close, shard, unshard
from commlib.embrace.embedding import ShardedEmbedding
from commlib.embrace.exchange import Exchange
from commlib.embrace.optim import attach
from commlib.embrace.source import RowSource
from commlib.embrace.table import ShardedTable
from commlib.embrace.twod import Schedule, schedule

__all__ = [
    "Exchange",
    "RowSource",
    "Schedule",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "ShardedTable",
    "attach",
    "close",
    "lookup",
    "schedule",
    "shard",
    "unshard",
]
