"""Data parallelism: replicated (`replicate.py`) or sharded (`shard.py`) modules; any module by `plain_module.py`."""
