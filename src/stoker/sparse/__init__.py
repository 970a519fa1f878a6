"""Embedding tables of 64-bit ids: rows are admitted and evicted, sharded over processes, and saved by id.

`SparseEmbeddings` is the module that a model looks ids up in; `TableSettings` defines a table.
"""

from stoker.sparse.fused_tables import Feature
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.sparse_embeddings import SparseEmbeddings
from stoker.sparse.table_settings import Admission, DiskTier, Eviction, TableSettings

__all__ = ["Admission", "DiskTier", "Eviction", "Feature", "JaggedIds", "SparseEmbeddings", "TableSettings"]
