"""Embedding tables of 64-bit ids: rows that come and go, spread over processes, stored by id.

`SparseEmbeddings` is the module that a model looks ids up in; `TableSettings` states a table.
"""

from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.sparse_embeddings import Feature, SparseEmbeddings
from stoker.sparse.table_settings import Admission, DiskTier, Eviction, TableSettings

__all__ = ["Admission", "DiskTier", "Eviction", "Feature", "JaggedIds", "SparseEmbeddings", "TableSettings"]
