"""Rows of trained tables for use outside of training: sorted shards in a folder, LMDB and Redis, with versions.

`row_reader` reads them and needs NumPy alone; `store_writers` writes, switches and rolls back.
"""
