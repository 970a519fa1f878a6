"""Rows of trained tables outside of the training: sorted shards in a folder, LMDB and Redis, version by version.

`row_reader` reads them and needs NumPy alone; `store_writers` writes, switches and rolls back.
"""
